"""The extremes of the curvature, by Lanczos: for the step size, and to know whether a descent is stable."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from imprint.errors import SimulationError, first_line
from imprint.simulation.derivatives import Weighted, gradient, hessian_product, regulariser_gradient
from imprint.task import Functional, Parameters
from imprint.vectors import norm

logger = logging.getLogger(__name__)
_DIFFERENCE = 1e-3  # relative step of the gradient difference that stands in for forward mode


@dataclass(frozen=True)
class Spectrum:
    """The smallest and largest curvature found."""

    smallest: float
    largest: float

    def norm_of_step(self, lr: float, damping: float) -> float:
        """‖I − η(H + λI)‖: above 1, some direction grows at first."""
        return max(abs(1 - lr * (self.smallest + damping)), abs(1 - lr * (self.largest + damping)))

    def step(self, damping: float) -> float:
        """The step size 1/(|μ| + λ) for the sharper end, half of what is stable for positive curvature."""
        top = max(self.largest, -self.smallest) + damping
        if not top > 0:
            raise SimulationError(
                'lr="auto" found no curvature to choose a step from (all second derivatives are 0): give lr a number.'
            )
        return 1 / top


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, iterations: int, tolerance: float = 1e-2) -> Spectrum:
    """Extreme Ritz values of a symmetric operator, with full reorthogonalisation.

    Stops early when both ends have settled to `tolerance` of the larger one.
    """
    basis = [start / start.norm()]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    found = Spectrum(0.0, 0.0)
    for _ in range(min(iterations, len(start))):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):  # twice is enough for orthogonality to rounding
            for vector in basis:
                image = image - (image @ vector) * vector
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
        basis.append(image / remaining)
    return found


def spectrum(task: Functional, theta: Parameters, batches: Iterable[Weighted], iterations: int = 30) -> Spectrum:
    """The curvature extremes of the objective on `batches`, at θ."""
    names, shapes = list(theta), [p.shape for p in theta.values()]
    sizes = [p.numel() for p in theta.values()]
    like = next(iter(theta.values()))

    def unflatten(vector: Tensor) -> Parameters:
        pieces = torch.split(vector.to(like.dtype), sizes)
        return {name: piece.reshape(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}

    def flatten(parameters: Parameters) -> Tensor:
        return torch.cat([parameters[name].flatten() for name in names]).double()

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(sum(sizes), generator=generator, dtype=torch.float64).to(like.device)
    exact = _forward_mode_works(task, theta, batches, unflatten(start))

    def product(vector: Tensor) -> Tensor:
        v = unflatten(vector)
        return flatten(hessian_product(task, theta, batches, v) if exact else _by_difference(task, theta, batches, v))

    return lanczos(product, start, iterations)


def _forward_mode_works(task: Functional, theta: Parameters, batches: Iterable[Weighted], v: Parameters) -> bool:
    try:
        hessian_product(task, theta, islice(batches, 1), v)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError, ValueError) as error:
        logger.warning(
            "curvature is measured by differences of gradients: forward mode fails here (%s)", first_line(error)
        )
        return False
    return True


def _by_difference(task: Functional, theta: Parameters, batches: Iterable[Weighted], v: Parameters) -> Parameters:
    """H v from two gradients, for models without forward-mode rules."""
    step = _DIFFERENCE * (norm(theta) or 1.0) / norm(v)

    def total(sign: float) -> Parameters:
        at = {name: p + sign * step * v[name] for name, p in theta.items()}
        parts = [gradient(task, at, part.weights, part.batch, plain=True)[0] for part in batches]
        if task.task.regulariser is not None:
            parts.append(regulariser_gradient(task, at, plain=True))
        return {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in at}

    up, down = total(1.0), total(-1.0)
    return {name: (up[name] - down[name]) / (2 * step) for name in theta}
