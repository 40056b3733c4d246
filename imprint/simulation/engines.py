"""The engines by name, and how many trajectories each source has in them."""

from imprint.simulation.descent import Descent, Simulated
from imprint.simulation.plan import Plan
from imprint.simulation.tangent import tangent
from imprint.simulation.trajectories import trajectories


def simulated(descent: Descent, epsilon: float | None) -> Simulated:
    """The imprints of a descent's sources by the engine of its plan; `epsilon` is None where that has none."""
    return tangent(descent) if epsilon is None else trajectories(descent, epsilon)


def sides(plan: Plan) -> int:
    """How many trajectories a source has."""
    return 2 if plan.engine == "trajectories" and plan.variant == "two_sided" else 1
