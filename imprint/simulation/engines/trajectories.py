"""The trajectories engine: the perturbed descents themselves, with first derivatives only.

θ_{t+1}^± = θ_t^± − η [∇L(θ_t^±) ± (ε/N) ∇ℓ_b(θ_t^±) + λ(θ_t^± − θ_t⁰)], all from θ*, beside the unperturbed θ_t⁰;
a preconditioner divides each step by M, momentum keeps a part of the last one.
`two_sided` takes (θ⁺ − θ⁻)/(2ε/N), `one_sided` (θ⁺ − θ⁰)/(ε/N), the paper's `mirrored` (θ⁺ − θ*)/(ε/N).
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from imprint.errors import SimulationError
from imprint.plan import EngineRules, Plan
from imprint.simulation.derivatives import Weighted, gradient, regulariser_gradient
from imprint.simulation.descent import Descent
from imprint.simulation.engines.paths import FIELDS, TRIED, PathEngine
from imprint.simulation.engines.protocol import Chunk
from imprint.simulation.path import Hooks, follow
from imprint.simulation.source_gradients import source_gradients
from imprint.task import Functional, Parameters
from imprint.tensors.vectors import add_scaled_, minus, norm, over_rows, repeated, row_norms, scaled

logger = logging.getLogger(__name__)

EPSILONS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
_DRIFT_ALLOWED = 0.1  # of a source's own displacement, before mirroring it is refused


class Trajectories(PathEngine):
    """The paper's perturbed descents, for few sources and any model."""

    name = "trajectories"
    rules = EngineRules(
        FIELDS | {"variant", "epsilon", "accept_drift", "keep_pair"},
        second_order=False,
        perturbs=True,
        trial={"keep_pair": True},
        tried=TRIED,
    )

    @property
    def epsilon(self) -> float:
        """By how much sources are up- and down-weighted; 1 before that is chosen."""
        if self.decided is not None and self.decided.epsilon is not None:
            return self.decided.epsilon
        return 1.0 if self.plan.epsilon == "auto" else float(self.plan.epsilon)

    def choose_epsilon(self) -> tuple[float | None, dict[str, float]]:
        if self.plan.epsilon == "auto":
            return choose_epsilon(self.descent)
        return self.epsilon, {}

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        """Follow the perturbed descents, and take their differences."""
        with self.advising():
            found = perturb(descent, self.epsilon, hooks)
        drift = self.measure_drift(found.end)
        midpoints = found.midpoints if descent.plan.keep_pair else None
        return Chunk(found.base, found.imprints, drift=drift, midpoints=midpoints, linearity=found.linearity)

    def attempt(self, trial: Descent) -> None:
        """Run a first step of a few sources; a step is too short to say whether drift is small."""
        plan = replace(trial.plan, accept_drift=trial.plan.variant == "mirrored")
        self.simulate(replace(trial, plan=plan), Hooks())

    @classmethod
    def rows_per_source(cls, plan: Plan) -> int:
        """Return how many trajectories a source has."""
        return 2 if plan.variant == "two_sided" else 1


@dataclass(frozen=True)
class Perturbed:
    """What perturbed descents lead to: the read-out point, a row for each source, and the end θ_T⁰ of the path."""

    base: Parameters
    imprints: Parameters
    end: Parameters
    midpoints: Parameters | None = None
    linearity: list[float] = field(default_factory=list)


def perturb(descent: Descent, epsilon: float, hooks: Hooks) -> Perturbed:
    """Return the imprints of the descent's sources from their perturbed trajectories."""
    variant, rows = descent.plan.variant, len(descent.sources)
    if variant == "two_sided":
        base, ends = _descend(descent, [1.0] * rows + [-1.0] * rows, epsilon, hooks)
        plus = {name: tensor[:rows] for name, tensor in ends.items()}
        minus_ends = {name: tensor[rows:] for name, tensor in ends.items()}
        apart = minus(plus, minus_ends)
        middle = {name: (plus[name] + minus_ends[name]) / 2 - base[name] for name in base}
        linearity = _ratio(2 * row_norms(middle), row_norms(apart)).tolist()
        return Perturbed(base, scaled(apart, descent.n / (2 * epsilon)), base, middle, linearity)
    base, plus = _descend(descent, [1.0] * rows, epsilon, hooks)
    if variant == "one_sided":
        return Perturbed(base, scaled(minus(plus, base), descent.n / epsilon), base)
    _refuse_drift(descent, base, plus)
    return Perturbed(descent.start, scaled(minus(plus, descent.start), descent.n / epsilon), base)


def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return above / below, and 0 where a source moves nothing at all."""
    return torch.where(below == 0, 0.0, above / below)


def _descend(descent: Descent, signs: list[float], epsilon: float, hooks: Hooks) -> tuple[Parameters, Parameters]:
    """Return θ_T⁰ and the perturbed end points, with one row for each source and sign."""
    shift = epsilon / descent.n * torch.tensor(signs, dtype=descent.dtype, device=descent.data.device)
    extra: list[Tensor] = []

    def moving(base: Parameters, theta: Parameters, parts: Iterable[Weighted], step: int) -> Parameters:
        if not descent.is_full_batch:
            total = _gradients(descent, theta, parts, extra, step)
            own = source_gradients(descent, theta, step, per_row=True)
            for name, tensor in total.items():
                tensor += own[name] * shift.reshape(-1, *[1] * (tensor.dim() - 1))
            return total
        if not extra:
            own_examples = [descent.sources.indicator(part.examples, descent.dtype) for part in parts]
            extra.extend(shift[:, None] * own.repeat(len(signs) // len(own), 1) for own in own_examples)
        return _gradients(descent, theta, parts, extra, step)

    together = repeated(descent.start, len(signs))

    def responses(base: Parameters, theta: Parameters) -> Parameters:
        return minus(theta, base)

    return follow(descent, together, moving, responses, removal=1 / epsilon, hooks=hooks)


def _gradients(
    descent: Descent, theta: Parameters, parts: Iterable[Weighted], extra: list[Tensor], step: int
) -> Parameters:
    """Return ∇L at every row of θ, each with extra weights on its source's examples."""
    rows = next(iter(theta.values())).shape[0]
    total = {name: torch.zeros_like(p) for name, p in theta.items()}
    for index, part in enumerate(parts):
        weights = part.weights.expand(rows, -1)
        if extra:
            weights = weights + extra[index]

        task = descent.at_part(step, index)

        def one(theta: Parameters, weights: Tensor, task: Functional = task, part: Weighted = part) -> Parameters:
            return gradient(task, theta, weights, part.batch, plain=not descent.vectorise)[0]

        pull = over_rows(one, theta, weights, vectorise=descent.vectorise, randomness=descent.randomness)
        add_scaled_(total, pull, 1.0)
    if descent.task.task.regulariser is not None:
        pull = over_rows(
            lambda t: regulariser_gradient(descent.task, t, plain=not descent.vectorise),
            theta,
            vectorise=descent.vectorise,
        )
        add_scaled_(total, pull, 1.0)
    return total


def _refuse_drift(descent: Descent, base: Parameters, plus: Parameters) -> None:
    """Refuse to mirror where the drift θ_T⁰ − θ* is not small: it enters θ* ± Δθ⁺ in full."""
    drift = norm(minus(base, descent.start))
    own = row_norms(minus(plus, base))
    index = int(own.argmin())
    if drift <= _DRIFT_ALLOWED * float(own[index]) or descent.plan.accept_drift:
        return
    raise SimulationError(
        f"mirrored trajectories are valid only at an optimum: further training moves the parameters by {drift:.3g}, "
        f"while source {descent.sources.ids[index]!r} moves them by {float(own[index]):.3g}. Use "
        "variant='one_sided' (the same cost and right everywhere) or 'two_sided'; accept_drift=True takes the "
        "mirrored value as it is."
    )


def choose_epsilon(descent: Descent) -> tuple[float, dict[str, float]]:
    """Choose the ε whose imprints agree best with those at 2ε, over a few sources; return the disagreement at each."""
    few = descent.with_sources(descent.sources.spread(3))
    imprints: dict[float, Parameters] = {}
    last: SimulationError | None = None
    for epsilon in EPSILONS:
        try:
            imprints[epsilon] = perturb(few, epsilon, Hooks()).imprints
        except SimulationError as error:
            logger.info("epsilon %g does not work: %s", epsilon, error)
            last = error
    disagreement = {
        epsilon: float(_ratio(row_norms(minus(imprints[2 * epsilon], u)), row_norms(u)).mean())
        for epsilon, u in imprints.items()
        if 2 * epsilon in imprints
    }
    if not disagreement:
        raise SimulationError(
            f'epsilon="auto" found no usable step: the trajectories fail at every ε from {EPSILONS[0]} to '
            f"{EPSILONS[-1]}, the last because {last}"
        ) from last
    best = min(disagreement, key=disagreement.__getitem__)
    return best, {f"{epsilon:g}": value for epsilon, value in disagreement.items()}
