"""The tangent engine: the exact response of the path to a source's weight, by forward-over-reverse.

v_0 = 0,  v_{t+1} = v_t − η [(H(θ_t⁰) + λI) v_t + g_b(θ_t⁰)],  u_b = v_T, read out at θ_T⁰. By choice H is the
Gauss–Newton matrix, for which nothing but the response changes; a preconditioner divides each step by M, and momentum
keeps a part of the last one.
"""

from collections.abc import Callable, Iterable

from torch import Tensor

from imprint.plan import EngineRules, Plan
from imprint.simulation.derivatives import Weighted, gauss_newton_along, gradient_along, regulariser_gradient_along
from imprint.simulation.descent import Descent
from imprint.simulation.engines.paths import FIELDS, TRIED, PathEngine
from imprint.simulation.engines.protocol import Choice, Chunk
from imprint.simulation.path import Hooks, follow
from imprint.simulation.source_gradients import source_gradients
from imprint.task import Parameters
from imprint.tensors.vectors import add_scaled_, over_rows, zeros_like


class Tangent(PathEngine):
    """The response recursion, for sources in the hundreds and models that forward mode covers."""

    name = "tangent"
    rules = EngineRules(FIELDS | {"curvature"}, tried=(*TRIED, "curvature"))

    def walk(self, descent: Descent, hooks: Hooks) -> Chunk:
        base, imprints = respond(descent, hooks)
        return Chunk(base, imprints, drift=self.measure_drift(base))

    @classmethod
    def propose(cls, choice: Choice) -> Plan | None:
        """Return a plan for sources that are groups of examples."""
        if not choice.grouped:
            return None
        paths = choice.paths()
        return Plan(
            engine=cls.name,
            steps=tuple(steps for steps, _ in paths),
            lr=tuple(size for _, size in paths),
            weight=choice.weights,
            curvature="gauss-newton",
            dropout=choice.dropout,
        )


def respond(descent: Descent, hooks: Hooks) -> tuple[Parameters, Parameters]:
    """Return θ_T⁰ and the response of each source to its weight."""
    indicators: list[Tensor] = []

    def moving(base: Parameters, responses: Parameters, parts: Iterable[Weighted], step: int) -> Parameters:
        if descent.is_full_batch:
            if not indicators:
                indicators.extend(descent.sources.indicator(part.examples, descent.dtype) for part in parts)
            return _along(descent, base, parts, responses, indicators, step)
        still = [part.weights.new_zeros(len(descent.sources), len(part)) for part in parts]
        total = _along(descent, base, parts, responses, still, step)
        add_scaled_(total, source_gradients(descent, base, step), 1.0)
        return total

    nothing = zeros_like(descent.start, len(descent.sources))
    return follow(descent, nothing, moving, responses=lambda base, rows: rows, removal=1 / descent.n, hooks=hooks)


def _along(
    descent: Descent,
    theta: Parameters,
    parts: Iterable[Weighted],
    responses: Parameters,
    directions: list[Tensor],
    step: int,
) -> Parameters:
    """H v_b + Σ_i d_bi ∇ℓ_i for every source, over the batches of a step."""
    total = zeros_like(theta, len(descent.sources))
    for index, (part, direction) in enumerate(zip(parts, directions, strict=True)):
        one = _one_source(descent, theta, part, step, index)
        moved = over_rows(one, responses, direction, vectorise=descent.vectorise, randomness=descent.randomness)
        add_scaled_(total, moved, 1.0)
    if descent.task.task.regulariser is not None:
        curved = over_rows(
            lambda v: regulariser_gradient_along(descent.task, theta, v), responses, vectorise=descent.vectorise
        )
        add_scaled_(total, curved, 1.0)
    return total


def _one_source(
    descent: Descent, theta: Parameters, part: Weighted, step: int, index: int
) -> Callable[[Parameters, Tensor], Parameters]:
    """(v, d) ↦ H v + Σ_i d_i ∇ℓ_i on one batch, H the curvature that the plan says."""
    task = descent.at_part(step, index)
    if descent.plan.seen_curvature == "gauss-newton":
        return gauss_newton_along(task, theta, part.weights, part.batch)
    return lambda v, d: gradient_along(task, theta, part.weights, part.batch, v, d)
