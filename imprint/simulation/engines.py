"""The engines by name, and how many trajectories each source has in them."""

from imprint.plan import Plan
from imprint.simulation.descent import Descent, Simulated
from imprint.simulation.tangent import tangent
from imprint.simulation.trajectories import trajectories


def simulated(descent: Descent, epsilon: float | None) -> Simulated:
    """The imprints of a descent's sources by the engine of its plan; `epsilon` is None where that has none."""
    if descent.plan.engine == "tangent":
        return tangent(descent)
    assert epsilon is not None
    return trajectories(descent, epsilon)


def trial_epsilon(plan: Plan) -> float | None:
    """An ε to try an engine with, before a plan's own is chosen; None where the engine has none."""
    if plan.engine == "tangent":
        return None
    return 1.0 if plan.epsilon == "auto" else float(plan.epsilon)


def sides(plan: Plan) -> int:
    """How many trajectories a source has."""
    return 2 if plan.engine == "trajectories" and plan.variant == "two_sided" else 1
