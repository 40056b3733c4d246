"""The curvature frozen at a checkpoint, and the response to every source on it, in closed form.

u_b = −S_T(H_λ) g_b with S_T(μ) = (1 − (1 − η(μ + λ))^T)/(μ + λ), or 1/(μ + λ) for T = ∞. A Lanczos basis has the
leading directions of H; what a gradient has outside of it sees one more curvature, measured on just that part. So k
products with H serve all sources, and each source costs one gradient.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from imprint.errors import SimulationError
from imprint.plan import Curvature, Settings
from imprint.simulation.curvature import ENDED, Basis, curvature_product, lanczos_basis
from imprint.simulation.derivatives import Weighted, gradient
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.source_gradients import source_gradients
from imprint.task import Functional, Parameters
from imprint.tensors.rows import Rows
from imprint.tensors.vectors import Flat

_PROBES = 8  # random sums of all examples' gradients, on which the curvature outside the basis is measured
_NOTHING = 1e-10  # share of the gradients below which nothing is outside the basis


@dataclass(frozen=True)
class FrozenCurvature:
    """The curvature at a checkpoint.

    values, basis: curvatures (directions,), and directions as a stack of parameters.
    rest: the mean curvature that gradients see outside of the basis, and `share` how much of them lies there.
    """

    values: Tensor
    basis: Parameters
    rest: float
    share: float

    @property
    def largest(self) -> float:
        return max(float(self.values[-1]), self.rest if self.share > 0 else -math.inf)

    @property
    def smallest(self) -> float:
        return min(float(self.values[0]), self.rest if self.share > 0 else math.inf)

    def outside(self, settings: Settings, lr: float) -> float:
        """Return S_T for the part of a gradient outside the basis."""
        rest = torch.tensor([self.rest], dtype=torch.float64)
        return float(respond(rest, settings, lr)) if self.share > 0 else 0.0

    @property
    def rounding(self) -> float:
        """The curvature that rounding hides."""
        return _unknown(self.values, next(iter(self.basis.values())).dtype)


def freeze_curvature(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    kind: Curvature,
    directions: int,
    on_product: Callable[[int], None] = lambda products: None,
    memory: int | str | None = None,
) -> FrozenCurvature:
    """Measure the curvature of the objective at θ, on `directions` of a Lanczos basis and in the mean outside of it."""
    flat, product = Flat(theta), curvature_product(task, theta, batches, kind, memory)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(flat.size, generator=generator, dtype=torch.float64).to(flat.device, flat.dtype)
    basis = lanczos_basis(
        product, start, directions, on_product, lambda: sum_with_signs(task, theta, batches, generator)
    )
    rest, share = _outside(task, theta, batches, basis, product, generator)
    return FrozenCurvature(basis.values, flat.parameters(basis.vectors), rest, share)


def _outside(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    basis: Basis,
    product: Callable[[Tensor], Tensor],
    generator: torch.Generator,
) -> tuple[float, float]:
    """Return Σ_i r_iᵀ H r_i / Σ_i |r_i|² for the examples' gradients outside the basis, r_i, and Σ|r_i|²/Σ|g_i|².

    A sum of all gradients with random signs has the mean of both sums, so that a few of them estimate it.
    """
    bent, outer, whole = 0.0, 0.0, 0.0
    for _ in range(_PROBES):
        total = sum_with_signs(task, theta, batches, generator)
        rest = basis.outside(total)
        whole, outer = whole + float(total.double() @ total.double()), outer + float(rest.double() @ rest.double())
        bent += float(rest.double() @ product(rest).double())
    if outer <= _NOTHING * whole:
        return 0.0, 0.0
    mean = bent / outer
    return (0.0 if abs(mean) <= _unknown(basis.values, basis.vectors.dtype) else mean), outer / whole


def _unknown(values: Tensor, dtype: torch.dtype) -> float:
    """Return the curvature that rounding hides beside these; directions are found in float32 at least."""
    return ENDED * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * float(values.abs().max())


def sum_with_signs(
    task: Functional, theta: Parameters, batches: Iterable[Weighted], generator: torch.Generator
) -> Tensor:
    """Return Σ_i ±g_i with random signs as one vector; its expected squared norm is Σ_i |g_i|² in any metric."""
    flat = Flat(theta)
    total = torch.zeros(flat.size, device=flat.device, dtype=flat.dtype)
    for part in batches:
        signs = torch.randint(0, 2, (len(part),), generator=generator).to(part.weights) * 2 - 1
        total += flat.vector(gradient(task, theta, signs, part.batch, plain=True)[0])
    return total


def respond(curvature: Tensor, settings: Settings, lr: float) -> Tensor:
    """Return S_T(μ + λ), elementwise: what T steps of size η make of a gradient that sees curvature μ."""
    damped = curvature.double() + settings.damping
    if settings.steps == "infinite":
        return 1 / damped
    x = lr * damped
    mild = x < 1  # where nothing must cancel, however small x is; a longer step overshoots and alternates
    lost = -torch.expm1(settings.steps * torch.log1p(-torch.where(mild, x, 0.0)))
    lost = torch.where(mild, lost, 1 - (1 - x) ** settings.steps)
    return torch.where(x == 0, lr * settings.steps, lost / torch.where(x == 0, 1.0, damped))


def make_imprints(
    frozen: FrozenCurvature, gradients: Rows, seen: Tensor, settings: Settings, lr: float
) -> tuple[Rows, Tensor]:
    """Return u_b of sources from their gradients, in factored form, and how long each is.

    seen: what the gradients have `along` the basis, (sources, directions).
    """
    inside, outside = respond(frozen.values, settings, lr), frozen.outside(settings, lr)
    coefficients = (-(inside - outside)).to(seen) * seen
    moved = gradients.scaled(-outside)
    found = Rows(moved.inputs, moved.outputs, moved.dense, coefficients, frozen.basis)
    like = {name: directions[0] for name, directions in frozen.basis.items()}
    return found, found.lengths(like, -outside * seen)


def project_imprints(frozen: FrozenCurvature, seen: Tensor, settings: Settings, lr: float) -> tuple[Rows, Tensor]:
    """Return what u_b of sources has on the basis, from what their gradients have there, and how long that is."""
    coefficients = -respond(frozen.values, settings, lr).to(seen) * seen
    return Rows({}, {}, {}, coefficients, frozen.basis), coefficients.double().norm(dim=1)


def refuse_unstable(frozen: FrozenCurvature, settings: Settings, lr: float, index: int) -> None:
    """Refuse a frozen recursion that grows without bound."""
    top, lowest = frozen.largest + settings.damping, frozen.smallest
    if abs(lowest) <= frozen.rounding:  # a zero, of either sign
        lowest = 0.0
    if settings.steps == "infinite" and not lowest + settings.damping > frozen.rounding:
        raise SimulationError(
            f"checkpoint {index}: infinitely many steps need positive curvature, and with a damping of "
            f"{settings.damping:.3g} it goes down to {lowest + settings.damping:.3g}: give a damping above "
            f"{frozen.rounding - lowest:.2g}, or a number of steps."
        )
    if settings.steps != "infinite" and lr * top > 2:
        raise SimulationError(
            f"checkpoint {index}: steps of lr={lr:.3g} are too long for curvature {top:.3g} and would diverge: "
            f'a step below {2 / top:.2g} holds, lr="auto" takes half of that.'
        )


def attempt_products(descent: Descent) -> None:
    """Take a product with the curvature on one batch and the gradients of all sources, to see whether that works."""
    batch = [next(iter(FullBatch(descent.data, descent.dtype)))]
    product = curvature_product(descent.task, descent.start, batch, descent.plan.seen_curvature)
    product(Flat(descent.start).vector(descent.start))
    source_gradients(descent, descent.start, 0)
