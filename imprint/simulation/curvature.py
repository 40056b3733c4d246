"""The curvature of the objective: its products with vectors, its extremes, and its leading directions, by Lanczos.

H is the Hessian of Σ_i c_i ℓ_i + r. The Gauss–Newton matrix Σ_i c_i J_iᵀ ∇²ℓ(z_i) J_i + ∇²r, with J_i the derivative of
the outputs z_i, leaves out how the model itself curves: it has no negative directions where ℓ is convex in z.
"""

import logging
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from imprint.errors import SimulationError
from imprint.plan import Curvature
from imprint.runtime.memory import activation_bytes, budget
from imprint.simulation.derivatives import (
    Product,
    Weighted,
    gauss_newton_along,
    gauss_newton_kept,
    gauss_newton_product,
    gradient,
    hessian_product,
    regulariser_gradient,
)
from imprint.task import Functional, Parameters
from imprint.tensors.batching import attempt
from imprint.tensors.vectors import Flat, norm, scale

logger = logging.getLogger(__name__)
ENDED = 100  # times rounding: what remains below it is noise, and the Krylov space is complete
_GRAPHS = 4  # times the activations of a batch: what its graphs keep, of the outputs and of their derivative
_BEYOND = 1e150  # growth in one step that is far beyond anything
_DIFFERENCE = 1e-3  # relative step of the gradient difference that stands in for forward mode


@dataclass(frozen=True)
class Spectrum:
    """The smallest and largest curvature found."""

    smallest: float
    largest: float

    def growth(self, lr: float, damping: float, momentum: float = 0.0) -> float:
        """Return the largest factor by which a step multiplies a direction; above 1, some directions grow."""
        return max(_growth(lr * (mu + damping), momentum) for mu in (self.smallest, self.largest))

    def step(self, damping: float, momentum: float = 0.0) -> float:
        """Return the step size 1/(|μ| + λ) for the sharper end: half of what is stable for positive curvature.

        With momentum the stable step is longer, and half of it too; along negative curvature, which grows with any
        step, it stays as it is.
        """
        top = max((max(self.largest, -self.smallest) + damping) / longer(momentum), -self.smallest - damping)
        if not top > 0:
            raise SimulationError(
                'lr="auto" found no curvature to choose a step from (all second derivatives are 0): give lr a number.'
            )
        return 1 / top


def longer(momentum: float) -> float:
    """Return how many times longer steps may be with momentum β.

    z² = (1 + β − (1 − β)ημ)z − β is stable up to ημ = 2·this.
    """
    return (1 + momentum) / (1 - momentum)


def _growth(curved: float, momentum: float) -> float:
    """Return the larger root of z² = (1 + β − (1 − β)ημ)z − β, by absolute value; |1 − ημ| for β = 0."""
    half = abs(1 + momentum - (1 - momentum) * curved) / 2
    if half > _BEYOND:  # its square would be too large for a number, and momentum does not matter
        return min(2 * half, sys.float_info.max)
    return half + math.sqrt(half**2 - momentum) if half**2 > momentum else math.sqrt(momentum)


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float = 1e-3) -> Spectrum:
    """Find the extreme Ritz values of a symmetric operator, with three vectors in memory.

    Where rounding makes later vectors lean on earlier ones, values repeat, and the extremes stay what they are, as long
    as products are right to about a thousandth. Stops early when both ends have settled to `tolerance` of the larger
    one: with a looser tolerance the lower end seems to have settled before an isolated negative curvature is seen.
    """
    vector, before = start / start.norm(), torch.zeros_like(start)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    found = Spectrum(0.0, 0.0)
    for _ in range(min(iterations, len(start))):
        image = product(vector)
        diagonal.append(float(image @ vector))
        image = image - diagonal[-1] * vector - (off_diagonal[-1] if off_diagonal else 0.0) * before
        matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if off_diagonal:
            beside = torch.tensor(off_diagonal, dtype=torch.float64)
            matrix += torch.diag(beside, 1) + torch.diag(beside, -1)
        if not bool(matrix.isfinite().all()):
            raise SimulationError("the curvature is not finite: look for NaN or infinity in the data or the weights.")
        values, vectors = torch.linalg.eigh(matrix)
        found = Spectrum(float(values[0]), float(values[-1]))
        scale = max(abs(found.smallest), abs(found.largest))
        remaining = float(image.norm())
        residual = remaining * float(vectors[-1, [0, -1]].abs().max())  # of the two extreme Ritz pairs
        if remaining <= 1e-10 * max(scale, 1e-30) or residual <= tolerance * scale:
            break
        off_diagonal.append(remaining)
        before, vector = vector, image / remaining
    return found


@dataclass(frozen=True)
class Basis:
    """Directions of a symmetric operator: orthonormal `vectors` (directions, P) with their curvatures, rising."""

    values: Tensor
    vectors: Tensor

    def outside(self, vector: Tensor) -> Tensor:
        """Return the part of a vector outside the basis."""
        return vector - (self.vectors @ vector) @ self.vectors


def lanczos_basis(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    directions: int,
    on_step: Callable[[int], None] = lambda steps: None,
    more: Callable[[], Tensor | None] = lambda: None,
) -> Basis:
    """Find the Ritz pairs of a symmetric operator on the Krylov space of `start`, with full reorthogonalisation.

    A Krylov space has one direction for each curvature, so that it ends early where several have the same: then it goes
    on from what a vector of `more` has outside of it, if there is something. Whatever the dtype of `start`, which is
    that of the products, directions are made orthogonal in float32 at least.
    """
    count, work = min(directions, len(start)), torch.promote_types(start.dtype, torch.float32)
    tiny = ENDED * torch.finfo(work).eps
    basis = start.new_empty(count, len(start), dtype=work)
    basis[0] = start.to(work) / start.to(work).norm()
    matrix = torch.zeros(count, count, dtype=torch.float64)

    def outside(vector: Tensor, step: int) -> Tensor:
        for _ in range(2):  # twice is enough for orthogonality to rounding
            vector = vector - (basis[: step + 1] @ vector) @ basis[: step + 1]
        return vector

    for step in range(count):
        image = product(basis[step].to(start.dtype)).to(work)
        matrix[step, step] = float(image.double() @ basis[step].double())
        image = outside(image, step)
        remaining = float(image.norm())
        if not math.isfinite(remaining):
            raise SimulationError("the curvature is not finite: look for NaN or infinity in the data or the weights.")
        on_step(1)
        if step + 1 == count:
            break
        if remaining > tiny * float(matrix.diagonal().abs().max()):
            matrix[step, step + 1] = matrix[step + 1, step] = remaining
            basis[step + 1] = image / remaining
            continue
        another = more()
        rest = None if another is None else outside(another.to(work), step)
        if another is None or rest is None or not float(rest.norm()) > tiny * float(another.to(work).norm()):
            count = step + 1
            break
        basis[step + 1] = rest / rest.norm()
    values, turn = torch.linalg.eigh(matrix[:count, :count])
    return Basis(values, (turn.T.to(basis) @ basis[:count]).to(start.dtype))


def spectrum(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    iterations: int = 30,
    *,
    preconditioner: Parameters | None = None,
    damping: float = 0.0,
) -> Spectrum:
    """Measure the curvature extremes of the objective on `batches`, at θ.

    preconditioner: the diagonal of M: the extremes are then those of M⁻¹(H + λI), which are those of the symmetric
        M^{-1/2}(H + λI)M^{-1/2}.
    """
    flat = Flat(theta)
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(flat.size, generator=generator, dtype=torch.float64).to(flat.device)
    exact = _forward_mode_works(task, theta, batches, flat.parameters(start))

    def product(vector: Tensor) -> Tensor:
        v = flat.parameters(vector)
        image = hessian_product(task, theta, batches, v) if exact else _by_difference(task, theta, batches, v)
        return flat.vector(image).double()

    if preconditioner is None:
        return lanczos(product, start, iterations)
    root = flat.vector(preconditioner).double().sqrt()

    def preconditioned(vector: Tensor) -> Tensor:
        vector = vector / root
        return (product(vector) + damping * vector) / root

    return lanczos(preconditioned, start, iterations)


def curvature_product(
    task: Functional,
    theta: Parameters,
    batches: Iterable[Weighted],
    kind: Curvature,
    memory: int | str | None = None,
) -> Callable[[Tensor], Tensor]:
    """Return v ↦ H v on flat vectors, where H is the Gauss–Newton matrix or the Hessian."""
    flat = Flat(theta)
    if kind == "hessian":
        return lambda vector: flat.vector(hessian_product(task, theta, batches, flat.parameters(vector)))
    products = _linearised(task, theta, batches, memory)
    return lambda vector: flat.vector(gauss_newton_product(task, theta, products(), flat.parameters(vector)))


def _linearised(
    task: Functional, theta: Parameters, batches: Iterable[Weighted], memory: int | str | None
) -> Callable[[], Iterable[Product]]:
    """Linearise the model on every batch: once for all products if that fits memory, otherwise each time."""

    def one(part: Weighted) -> Product:
        along = gauss_newton_along(task, theta, part.weights, part.batch)
        return lambda v: along(v, part.weights.new_zeros(len(part)))

    first, size = next(iter(batches)), sum(1 for _ in batches)
    each = activation_bytes(lambda: task.outputs(theta, first.batch))
    if _GRAPHS * each * size > budget(memory, first.weights.device) // 4:
        return lambda: (one(part) for part in batches)
    _, reason = attempt(lambda: gauss_newton_kept(task, theta, first)(theta))
    linearise = one if reason else lambda part: gauss_newton_kept(task, theta, part)  # backward has no derivative
    kept = [linearise(part) for part in batches]
    return lambda: kept


def _forward_mode_works(task: Functional, theta: Parameters, batches: Iterable[Weighted], v: Parameters) -> bool:
    _, reason = attempt(lambda: hessian_product(task, theta, islice(batches, 1), v))
    if reason is not None:
        logger.warning("curvature is measured by differences of gradients: forward mode fails here (%s)", reason)
    return reason is None


def _by_difference(task: Functional, theta: Parameters, batches: Iterable[Weighted], v: Parameters) -> Parameters:
    """Return H v from two gradients, for models without forward-mode rules."""
    step = _DIFFERENCE * scale(theta, task) / norm(v)

    def total(sign: float) -> Parameters:
        at = {name: p + sign * step * v[name] for name, p in theta.items()}
        parts = [gradient(task, at, part.weights, part.batch, plain=True)[0] for part in batches]
        if task.task.regulariser is not None:
            parts.append(regulariser_gradient(task, at, plain=True))
        return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in at}

    up, down = total(1.0), total(-1.0)
    return {name: (up[name] - down[name]) / (2 * step) for name in theta}
