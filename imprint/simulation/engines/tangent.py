"""The tangent engine: the exact response of the path to a source's weight, by forward-over-reverse.

v_0 = 0,  v_{t+1} = v_t − η [(H(θ_t⁰) + λI) v_t + g_b(θ_t⁰)],  u_b = v_T, read out at θ_T⁰. By choice H is the
Gauss–Newton matrix, for which nothing but the response changes; a preconditioner divides each step by M, and momentum
keeps a part of the last one.
"""

from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from imprint.plan import EngineRules, Plan
from imprint.simulation.derivatives import Weighted, gauss_newton_along, gradient_along, regulariser_gradient_along
from imprint.simulation.descent import Descent
from imprint.simulation.engines.paths import FIELDS, TRIED, PathEngine
from imprint.simulation.engines.protocol import AutoFindings, Chunk
from imprint.simulation.path import Hooks, follow
from imprint.simulation.source_gradients import source_gradients
from imprint.task import Parameters
from imprint.tensors.vectors import add_scaled_, over_rows, zeros_like


class Tangent(PathEngine):
    """The response recursion, for sources in the hundreds and models that forward mode covers."""

    name = "tangent"
    rules = EngineRules(FIELDS | {"curvature"}, tried=(*TRIED, "curvature"))

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        """Follow the path with the response of every source beside it."""
        rows, own = len(descent.sources), list[Tensor]()  # which examples are a source's, for each part of the data

        def moving(base: Parameters, responses: Parameters, parts: Iterable[Weighted], step: int) -> Parameters:
            """Return H v_b + g_b of every source, over the batches of a step."""
            total = zeros_like(base, rows)
            for index, part in enumerate(parts):
                if descent.is_full_batch and index == len(own):
                    own.append(descent.sources.indicator(part.examples, descent.dtype))
                weights = own[index] if descent.is_full_batch else part.weights.new_zeros(rows, len(part))
                one = _response_on(descent, base, part, step, index)
                moved = over_rows(one, responses, weights, vectorise=descent.vectorise, randomness=descent.randomness)
                add_scaled_(total, moved, 1.0)
            if descent.task.task.regulariser is not None:
                one = partial(regulariser_gradient_along, descent.task, base)
                add_scaled_(total, over_rows(one, responses, vectorise=descent.vectorise), 1.0)
            if not descent.is_full_batch:
                add_scaled_(total, source_gradients(descent, base, step), 1.0)
            return total

        with self.advising():
            base, imprints = follow(
                descent, zeros_like(descent.start, rows), moving, lambda base, rows: rows, 1 / descent.n, hooks
            )
        return Chunk(base, imprints, drift=self.measure_drift(base))

    @classmethod
    def propose(cls, found: AutoFindings) -> Plan | None:
        """Return a plan for sources that are groups of examples."""
        if not found.grouped:
            return None
        paths = found.paths()
        return Plan(
            engine=cls.name,
            steps=tuple(path.steps for path in paths),
            lr=tuple(path.lr for path in paths),
            weight=tuple(path.weight for path in paths),
            curvature=found.curvature,
            preconditioner=found.preconditioner,
            dropout=found.dropout,
        )


def _response_on(
    descent: Descent, theta: Parameters, part: Weighted, step: int, index: int
) -> Callable[..., Parameters]:
    """Return (v, d) ↦ H v + Σ_i d_i ∇ℓ_i on one batch, H the curvature that the plan says."""
    task = descent.at_part(step, index)
    if descent.plan.seen_curvature == "gauss-newton":
        return gauss_newton_along(task, theta, part.weights, part.batch)
    return partial(gradient_along, task, theta, part.weights, part.batch)
