"""Chooses damping and weight of every checkpoint from curvature and gradients there, never from ground truth.

**Damping.** λ = tr(H)/N: the curvature that one average example brings. A direction with less curvature than that hangs
on single examples; take one away and the frozen H is wrong there, so the response must not trust it. λ is kept inside a
trust region: what a random half of the data is predicted to do to the outputs must be neither nothing nor more than a
linear prediction can hold, from a quarter to one nat of the margins (in other tasks, of the noise of the outputs).
Where data is plentiful a half does move little: λ stays above a tenth of tr(H)/N, and above what rounding hides.

**Step of a path.** A path has μ/λ steps of 1/μ, μ the largest curvature: where it starts for the number of steps, and
on the whole of it for their size. From an early checkpoint curvature rises tenfold and more, most of all where the
running statistics of batch norm have not settled, and a step that suits the start would multiply responses at each
later one. So the path is walked first; as λ rises with the curvature, it gets shorter and not longer.

**Weight.** A checkpoint far from where training comes to rest, in units of what sampling the data does to it, says
little of the models that retraining ends with: 1/(1 + snr), snr = N ḡᵀ(H+λ)⁻¹ḡ / mean_i g_iᵀ(H+λ)⁻¹g_i. A silent one
disagrees with the others: times the square of its mean agreement with them on what halves would do. Divided by the size
of its predictions, so that each has one vote.
"""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vjp

from imprint.data import Collate, HashData, spread_examples
from imprint.errors import SimulationError
from imprint.model.dropout import dropouts
from imprint.model.measures import find_targets, margin
from imprint.plan import Checkpoints, Plan, engine_for, register_chooser
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import jvp
from imprint.simulation.curvature import curvature_product
from imprint.simulation.derivatives import Weighted, regulariser_gradient_along, transposed
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.engines import AutoFindings, registered
from imprint.simulation.frozen import FrozenCurvature, attempt_products, freeze_curvature, sum_with_signs
from imprint.simulation.inputs import Inputs
from imprint.simulation.preflight import find_why_not_vmap, refuse_loss
from imprint.simulation.recorded import Recorded, list_checkpoints, open_run, refuse_both
from imprint.simulation.repeatable import find_reason_against
from imprint.simulation.step_size import TRIES, measure_gauss_newton, walk
from imprint.sources import Sources
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.vectors import Flat, over_rows

logger = logging.getLogger(__name__)

LEAST, MOST = 0.25, 1.0  # by how much a half may move the outputs, in their own units
DIRECTIONS = 80  # of the curvature that are resolved to choose; the simulation has more
HALVES = 16
EXAMPLES = 256  # on which the effect of halves is predicted
OUTPUTS = 65_536  # of them, where they have more, such as the tokens of a vocabulary
_PROBES = 4  # for the trace outside the basis
_BELOW = 10  # by how much λ may fall below tr(H)/N for the sake of the trust region
_STEPS = 1000  # of a path, at most: beyond, H is not what it was
_WALKED = 1024  # examples of a step of the path that is walked beforehand
_SHARPER = 1.8  # times the curvature a step was chosen for: below 2, where responses begin to grow


@dataclass(frozen=True)
class Look:
    """Measurements at one checkpoint, from which a plan is chosen.

    trace: the trace of the curvature of the loss, without the regulariser.
    halves, gradient: coefficients along the basis of half-sums of all gradients with random signs,
        (halves, directions), and of the gradient of the objective, (directions,).
    halves_rest, gradient_rest: squared norms of the parts of these vectors outside the basis.
    moved: derivatives of the outputs of some examples along the basis, (directions, outputs), in units of the noise of
        the outputs.
    moved_rest: the same along the part of each half outside the basis, (halves, outputs).
    """

    n: int
    values: Tensor
    rest: float
    rounding: float
    trace: float
    halves: Tensor
    halves_rest: Tensor
    gradient: Tensor
    gradient_rest: float
    moved: Tensor
    moved_rest: Tensor

    def effects(self, damping: float) -> Tensor:
        """Predict what each half does to the outputs: (halves, outputs)."""
        inside = (self.halves / (self.values + damping)) @ self.moved
        return -(inside + self.moved_rest / (self.rest + damping))

    def size(self, damping: float) -> float:
        """Return the root mean square of the effects. It falls as damping grows."""
        return float(self.effects(damping).square().mean().sqrt())

    @cached_property
    def damping(self) -> float:
        """The damping that is chosen, λ."""
        one = self.trace / self.n
        return max(min(max(one, self._crossing(MOST)), max(self._crossing(LEAST), one / _BELOW)), 2 * self.rounding)

    def _crossing(self, size: float) -> float:
        """Find the damping at which effects have this size."""
        low, high = (math.log(scale * float(self.values[-1])) for scale in (1e-6, 4.0))
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self.size(math.exp(middle)) > size else (low, middle)
        return math.exp(low)

    def signal(self, damping: float) -> float:
        """Return the squared distance from rest, over what sampling the data does to it."""
        inside, outside = 1 / (self.values + damping), 1 / (self.rest + damping)
        drift = float((self.gradient.square() * inside).sum()) + self.gradient_rest * outside
        noise = float((self.halves.square() @ inside + self.halves_rest * outside).mean())
        return drift / max(noise, 1e-300)


def look(descent: Descent, on_work: Callable[[int], None]) -> Look:
    """Measure what the choice needs at the checkpoint where a descent starts."""
    task, theta, data = descent.task, descent.start, descent.data
    batches, flat = FullBatch(data, descent.dtype), Flat(theta)
    frozen = freeze_curvature(task, theta, batches, "gauss-newton", DIRECTIONS, on_product=on_work)
    basis = flat.vectors(frozen.basis)
    generator = torch.Generator().manual_seed(1)
    # the mean gradient of a random half of the data, less that of all, is (1/N) Σ_i ±g_i
    sums = torch.stack([sum_with_signs(task, theta, batches, generator) / len(data) for _ in range(HALVES)])
    slope = flat.vector(descent.base_gradient(theta, batches, 0))
    inside, drift = sums @ basis.T, basis @ slope
    outside = sums - inside @ basis
    examples = spread_examples(len(data), EXAMPLES)
    at_once = max(1, data.batch_size // len(examples)) if descent.vectorise else 0
    derivative = _differentiate_outputs(task, theta, data.gather(examples), len(examples), at_once)
    return Look(
        n=len(data),
        values=frozen.values.to(flat.device),
        rest=frozen.rest,
        rounding=frozen.rounding,
        trace=_measure_trace(task, theta, batches, frozen, basis, generator),
        halves=inside.double(),
        halves_rest=(sums.double().square().sum(1) - inside.double().square().sum(1)).clamp(min=0),
        gradient=drift.double(),
        gradient_rest=max(float(slope.double().square().sum() - drift.double().square().sum()), 0.0),
        moved=derivative(frozen.basis),
        moved_rest=derivative(flat.parameters(outside)),
    )


def _measure_trace(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    frozen: FrozenCurvature,
    basis: Tensor,
    generator: torch.Generator,
) -> float:
    """Return the trace of the curvature of the loss: exact in the basis, by random probes outside of it."""
    flat, product = Flat(theta), curvature_product(task, theta, batches, "gauss-newton")

    def regulariser(vector: Tensor) -> float:
        if task.task.regulariser is None:
            return 0.0
        pull = flat.vector(regulariser_gradient_along(task, theta, flat.parameters(vector)))
        return float(vector.double() @ pull.double())

    total = float(frozen.values.sum()) - sum(map(regulariser, basis))
    for _ in range(_PROBES):
        signs = (torch.randint(0, 2, (flat.size,), generator=generator) * 2 - 1).to(flat.device, flat.dtype)
        outside = signs - (basis @ signs) @ basis
        total += (float(outside.double() @ product(outside).double()) - regulariser(outside)) / _PROBES
    return max(total, 0.0)


def _differentiate_outputs(
    task: Functional, theta: Parameters, batch: Batch, count: int, at_once: int
) -> Callable[[Parameters], Tensor]:
    """Return a function that differentiates a batch's outputs along a stack of directions: (directions, outputs).

    `at_once` directions are taken by `vmap`, with 0 each by itself.

    Of a classifier the outputs are margins, in nats. Otherwise the unit is √(E|∇ℓ|²/E tr ∇²ℓ) with derivatives by the
    outputs z: for a squared error the size of the residuals, for a likelihood 1.
    """
    with torch.no_grad():
        z = task.outputs(theta, batch)
    wanted = find_targets(batch)
    if z.dim() == 2 and z.shape[1] > 1 and wanted is not None and not wanted.is_floating_point() and wanted.dim() == 1:
        unit, classes = 1.0, wanted
    else:
        unit, classes = _measure_unit(task, z, batch, count), None
    chosen = spread_examples(z.numel(), OUTPUTS).to(z.device)

    def values(theta: Parameters) -> Tensor:
        z = task.outputs(theta, batch)
        return z.flatten()[chosen] if classes is None else margin(z, classes)

    found, pull, *_ = vjp(values, theta)
    push = transposed(pull, found)

    def one(direction: Parameters) -> Tensor:
        moved: Tensor = push(direction)[0]
        return moved.double() / unit

    def derivative(directions: Parameters) -> Tensor:
        rows, size = len(next(iter(directions.values()))), at_once or 1
        parts = [
            over_rows(one, {name: t[i : i + size] for name, t in directions.items()}, vectorise=at_once > 0)
            for i in range(0, rows, size)
        ]
        return torch.cat(parts)

    return derivative


def _measure_unit(task: Functional, z: Tensor, batch: Batch, count: int) -> float:
    def slope(z: Tensor) -> Tensor:
        return grad(lambda z: task.output_losses(z, batch, count).sum())(z)  # type: ignore[no-any-return]

    signs = torch.randint(0, 2, z.shape, generator=torch.Generator().manual_seed(2)).to(z) * 2 - 1
    steep, bent, *_ = jvp(slope, (z,), (signs,))
    return math.sqrt(float(steep.double().square().sum()) / max(float((signs * bent).double().sum()), 1e-300)) or 1.0


def weigh(looks: Sequence[Look]) -> list[float]:
    """Return how much each checkpoint counts in the mean; the largest weight is 1."""
    effects = [one.effects(one.damping) for one in looks]
    unit = [(e - e.mean(0)) / (e - e.mean(0)).norm(dim=0).clamp(min=1e-300) for e in effects]
    agreement = torch.tensor([[float((a * b).sum(0).mean()) for b in unit] for a in unit])
    found = []
    for index, one in enumerate(looks):
        with_others = float(agreement[index].sum() - agreement[index, index])
        others = with_others / (len(looks) - 1) if len(looks) > 1 else 1.0
        vote = 1 / max(one.size(one.damping), 1e-300)
        found.append(vote * max(others, 0.0) ** 2 / (1 + one.signal(one.damping)))
    top = max(found)
    return [value / top for value in found] if top > 0 else [1.0] * len(looks)


def choose_path(descent: Descent, damping: float, sharpest: float) -> tuple[int, float]:
    """Choose steps and step size of a path: as many as lead to λ, each 1/μ of the sharpest curvature along it.

    sharpest: the largest curvature where the path starts.
    """
    descent = replace(descent, plan=Plan(batch_size=_WALKED))  # all of the data where it is no more than that
    steps = min(max(1, round(sharpest / damping)), _STEPS)
    for _ in range(TRIES):
        size = float(f"{1 / sharpest:.4g}")
        along = walk(replace(descent, lr=size, steps=steps), measure_gauss_newton)
        if along is not None and along.largest <= _SHARPER * sharpest:
            break
        sharpest = 8 * sharpest if along is None else along.largest
    return steps, size


@torch.inference_mode(False)
def choose_plan(
    task: Task,
    data: Any,
    sources: Sources,
    checkpoints: Checkpoints | None,
    run: Recorded | None,
    batch_size: int | None,
    collate_fn: Collate | None,
    hash_data: HashData,
    progress: bool | Advance,
) -> Plan:
    """Choose a plan: the work of `Plan.auto`."""
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "device": None, "dtype": None}
    options["hash_data"] = hash_data
    if (recorded := open_run(run)) is not None:
        refuse_both(checkpoints)
        reason = find_reason_against(task, data, sources, recorded, **options)
        if reason is None:
            return Plan(engine=engine_for("this_run"))
        logger.warning(
            "the recorded run is not repeated, %s; scores will describe training like it, on average", reason
        )
        checkpoints = list_checkpoints(recorded, task)
    return choose_for_checkpoints(task, data, sources, checkpoints, options, progress)


def choose_for_checkpoints(
    task: Task,
    data: Any,
    sources: Sources,
    checkpoints: Checkpoints | None,
    options: dict[str, Any],
    progress: bool | Advance,
) -> Plan:
    """Choose a plan that simulates from checkpoints.

    options: of `Inputs.checked`.
    """
    inputs = Inputs.checked(task, data, sources, Plan(curvature="gauss-newton"), checkpoints, **options)
    bar = Progress("choosing", DIRECTIONS * len(inputs.states), "curvature products", progress)
    looks = []
    with task.evaluating(), closing(bar):
        for index in range(len(inputs.states)):
            descent = inputs.descent(index, inputs.state(index))
            refuse_loss(descent, FullBatch(descent.data, descent.dtype))
            descent = replace(descent, vectorise=find_why_not_vmap(descent, attempt_products) is None)
            looks.append(look(descent, bar.advance))
            if not looks[-1].values[-1] > 0:
                raise SimulationError(
                    f"checkpoint {index} has no curvature to choose a plan from: its outputs do not change "
                    "with the parameters, or fit the data to within rounding. Leave it out, or give a plan."
                )
            bar.skip((index + 1) * DIRECTIONS - bar.done)  # the space may end before
    dampings = [float(f"{one.damping:.4g}") for one in looks]
    shares = [float(f"{weight:.4g}") for weight in weigh(looks)]
    for index, (damping, share) in enumerate(zip(dampings, shares, strict=True)):
        logger.info("checkpoint %d: damping %.3g, weight %.3g", index, damping, share)

    def choose_paths() -> list[tuple[int, float]]:
        with task.evaluating():
            return [
                choose_path(inputs.descent(index, inputs.state(index)), damping, float(one.values[-1]))
                for index, (damping, one) in enumerate(zip(dampings, looks, strict=True))
            ]

    found = AutoFindings(
        max(sources.sizes) > 1, tuple(dampings), tuple(shares), bool(dropouts(task.model)), choose_paths
    )
    return next(plan for engine in reversed(registered()) if (plan := engine.propose(found)) is not None)


register_chooser(choose_plan)
