"""What `Plan.auto` measures at a checkpoint: curvature, gradients, and what random halves of the data would do.

A task that shows its outputs is seen through the Gauss–Newton matrix, and the effect of halves on its outputs. Of one
with a loss alone there are the Hessian and the effect on the losses of single examples. The trace of the Hessian is
close to that of Gauss–Newton, because the curvature of the model itself has both signs; along its negative directions a
response is taken to be as long as along positive ones of that size.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.func import grad, vjp

from imprint.data import spread_examples
from imprint.model.measures import find_targets, margin
from imprint.plan import Curvature
from imprint.runtime.turns import jvp
from imprint.simulation.curvature import curvature_product
from imprint.simulation.derivatives import Weighted, regulariser_gradient_along, transposed
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.frozen import FrozenCurvature, freeze_curvature, sum_with_signs
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.vectors import Flat, over_rows

LEAST, MOST = 0.25, 1.0  # by how much a half may move the outputs, in their own units
DIRECTIONS = 80  # of the curvature that are resolved to choose; the simulation has more
HALVES = 16
EXAMPLES = 256  # on which the effect of halves is predicted
OUTPUTS = 65_536  # of them, where they have more, such as the tokens of a vocabulary
_PROBES = 4  # for the trace outside the basis
_PART = 4  # the part of the training that a path may reach ahead, at most
_BEYOND = 2  # times the most negative curvature: the least damping of infinitely many steps
_BELOW = 10  # by how much λ may fall below tr(H)/N for the sake of the trust region, or exceed it for a short training
_OWN = 2  # times the curvature that one example brings: what a path's horizon is the inverse of
_SIGNED = 16  # random sums of the examples' curvatures, from which that of one is estimated


def curvature_of(task: Task) -> Curvature:
    """Return the curvature that a task lets see."""
    return "hessian" if task.outputs is None else "gauss-newton"


@dataclass(frozen=True)
class Look:
    """Measurements at one checkpoint, from which a plan is chosen.

    values, rest: sizes of the curvature along the basis, (directions,), and in the mean outside of it.
    sharpest, lowest: the extremes of the curvature; the lowest is negative only of a Hessian.
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
    sharpest: float
    lowest: float
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

    @property
    def safe_damping(self) -> float:
        """λ for infinitely many steps: beyond negative curvature, where there is some."""
        return max(self.damping, -_BEYOND * self.lowest)

    def reach(self, own: float, time: float | None) -> float:
        """Return what a path's horizon is the inverse of: 2c/N, and no less than the trust region or training allow.

        own: c, the size of the curvature that one example brings (`measure_own_curvature`).
        time: how far the training went, where that is known.
        """
        one = _OWN * own / self.n
        allowed = 0.0 if time is None else min(_PART / time, _BELOW * one)
        return max(self._crossing(MOST), one, allowed, 2 * self.rounding)

    def _crossing(self, size: float) -> float:
        """Find the damping at which effects have this size."""
        low, high = (math.log(scale * self.sharpest) for scale in (1e-6, 4.0))
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
    batches, flat, kind = FullBatch(data, descent.dtype), Flat(theta), curvature_of(task.task)
    frozen = freeze_curvature(task, theta, batches, kind, DIRECTIONS, on_product=on_work)
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
        values=frozen.values.abs().to(flat.device),
        rest=abs(frozen.rest),
        sharpest=float(frozen.values[-1]),
        lowest=frozen.smallest,
        rounding=frozen.rounding,
        trace=_measure_trace(task, theta, batches, frozen, basis, generator),
        halves=inside.double(),
        halves_rest=(sums.double().square().sum(1) - inside.double().square().sum(1)).clamp(min=0),
        gradient=drift.double(),
        gradient_rest=max(float(slope.double().square().sum() - drift.double().square().sum()), 0.0),
        moved=derivative(frozen.basis),
        moved_rest=derivative(flat.parameters(outside)),
    )


def measure_own_curvature(descent: Descent) -> float:
    """Return the root mean square Frobenius norm of the curvature H_i that a single example brings.

    With random signs, E|Σ_i ±H_i v|² = Σ_i |H_i v|², whose mean over v of ±1 is Σ_i ‖H_i‖². Where an example has one
    output, ‖H_i‖ is its trace; a window of many tokens spreads its trace over as many directions.
    """
    task, theta, kind = descent.task, descent.start, curvature_of(descent.task.task)
    batches, flat = FullBatch(descent.data, descent.dtype), Flat(theta)
    total = 0.0
    for probe in range(_SIGNED):
        generator = torch.Generator().manual_seed(probe)
        vector = _draw_signs(flat.size, generator).to(flat.device, flat.dtype)
        bent = curvature_product(task, theta, _Signed(batches, probe), kind)(vector)
        if task.task.regulariser is not None:
            bent = bent - flat.vector(regulariser_gradient_along(task, theta, flat.parameters(vector)))
        total += float(bent.double().square().sum())
    return math.sqrt(total / _SIGNED / len(descent.data))


@dataclass(frozen=True)
class _Signed:
    """Batches whose examples have a random sign each as their weight, the same every time they are gone through."""

    batches: Iterable[Weighted]
    seed: int

    def __iter__(self) -> Iterator[Weighted]:
        generator = torch.Generator().manual_seed(_SIGNED + self.seed)
        for part in self.batches:
            yield replace(part, weights=_draw_signs(len(part), generator).to(part.weights))


def _draw_signs(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (count,), generator=generator) * 2 - 1


def _measure_trace(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    frozen: FrozenCurvature,
    basis: Tensor,
    generator: torch.Generator,
) -> float:
    """Return the trace of the curvature of the loss: exact in the basis, by random probes outside of it."""
    flat, product = Flat(theta), curvature_product(task, theta, batches, curvature_of(task.task))

    def regulariser(vector: Tensor) -> float:
        if task.task.regulariser is None:
            return 0.0
        pull = flat.vector(regulariser_gradient_along(task, theta, flat.parameters(vector)))
        return float(vector.double() @ pull.double())

    total = float(frozen.values.sum()) - sum(map(regulariser, basis))
    for _ in range(_PROBES):
        signs = _draw_signs(flat.size, generator).to(flat.device, flat.dtype)
        outside = signs - (basis @ signs) @ basis
        total += (float(outside.double() @ product(outside).double()) - regulariser(outside)) / _PROBES
    return max(total, 0.0 if curvature_of(task.task) == "gauss-newton" else float(frozen.values[-1]))


def _differentiate_outputs(
    task: Functional, theta: Parameters, batch: Batch, count: int, at_once: int
) -> Callable[[Parameters], Tensor]:
    """Return a function that differentiates a batch's outputs along a stack of directions: (directions, outputs).

    `at_once` directions are taken by `vmap`, with 0 each by itself.

    Of a classifier the outputs are margins, in nats. Otherwise the unit is √(E|∇ℓ|²/E tr ∇²ℓ) with derivatives by the
    outputs z: for a squared error the size of the residuals, for a likelihood 1. Where only losses are seen, they are
    the outputs, and the unit is their own size.
    """
    blind = task.task.outputs is None

    def see(theta: Parameters) -> Tensor:
        return task.losses(theta, batch, count) if blind else task.outputs(theta, batch)

    with torch.no_grad():
        z = see(theta)
    wanted = find_targets(batch)
    labelled = wanted is not None and wanted.dim() == 1 and not wanted.is_floating_point()
    if blind:
        unit, classes = float(z.double().square().mean().sqrt()) or 1.0, None
    elif z.dim() == 2 and z.shape[1] > 1 and labelled:
        unit, classes = 1.0, wanted
    else:
        unit, classes = _measure_unit(task, z, batch, count), None
    chosen = spread_examples(z.numel(), OUTPUTS).to(z.device)

    def values(theta: Parameters) -> Tensor:
        z = see(theta)
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
