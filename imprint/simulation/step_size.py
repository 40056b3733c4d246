"""The step size, from the curvature the descent will meet and not only from where it starts.

Curvature rises along a training path, by a factor of ten from an early checkpoint. A step that suits the start then
leaves the stable range half-way, and the response grows without bound; so the unperturbed path is walked first, at the
cost of about one source's gradient steps, and the step follows the sharpest point on it.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import replace

import torch

from imprint.errors import SimulationError
from imprint.simulation.curvature import Spectrum, curvature_product, lanczos, spectrum
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.task import Parameters
from imprint.tensors.vectors import Flat

Look = Callable[[Descent, Parameters, Iterable[Weighted], int], Spectrum]
LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # shares of the path at which curvature is measured
LOOK_ITERATIONS = 15
_START_ITERATIONS: ContextVar[int] = ContextVar("products with the curvature where a descent starts", default=30)
TRIES = 10
FEW = 8
"""Steps of a path that is too short to be looked at further on."""
_LEAP = 0.05  # share by which the loss of the full batch rises in a step that is too long
_UPHILL = 0.1  # share by which a path may end above where it began: mini-batches are noisy


def measure_start(descent: Descent) -> Spectrum:
    """Measure the curvature where a descent starts: on the full batch, or the sharper of its first two mini-batches."""
    batches = descent.batches()
    looks, products = 1 if descent.is_full_batch else min(2, descent.steps), _START_ITERATIONS.get()
    return _widest([measure_curvature(descent, descent.start, next(batches), products) for _ in range(looks)])


@contextmanager
def coarse_curvature() -> Iterator[None]:
    """Measure the starting curvature by two products: for trials with a given step, whose figures nobody reads."""
    token = _START_ITERATIONS.set(2)
    try:
        yield
    finally:
        _START_ITERATIONS.reset(token)


def measure_curvature(descent: Descent, theta: Parameters, parts: Iterable[Weighted], iterations: int = 30) -> Spectrum:
    """Measure the extremes of the objective's curvature H at θ; with a preconditioner, those of M⁻¹(H + λI)."""
    if descent.preconditioner is None:
        return spectrum(descent.task, theta, parts, iterations)
    diagonal = descent.preconditioner.diagonal
    return spectrum(descent.task, theta, parts, iterations, preconditioner=diagonal, damping=descent.damping)


def measure_gauss_newton(
    descent: Descent, theta: Parameters, parts: Iterable[Weighted], iterations: int = 30
) -> Spectrum:
    """Measure the extremes of the Gauss–Newton matrix at θ."""
    flat = Flat(theta)
    product = curvature_product(descent.task, theta, list(parts), "gauss-newton")
    start = torch.randn(flat.size, generator=torch.Generator().manual_seed(0)).to(flat.device, flat.dtype)
    return lanczos(product, start, iterations, tolerance=1e-2)


def choose_step(descent: Descent, start: Spectrum, tick: Callable[[], None] = lambda: None) -> tuple[float, Spectrum]:
    """Return a step of 1/(|μ| + λ) for the sharpest curvature on the path it makes, and the extremes met there.

    With momentum it is longer, by as much as steps may be.
    Under a preconditioner μ is a curvature of M⁻¹(H + λI), and the step 1/|μ|.
    """
    assumed = start
    for _ in range(TRIES):
        step = assumed.step(descent.shift, descent.plan.momentum)
        along = walk(replace(descent, lr=step), tick=tick)
        if along is None:  # not even the unperturbed path holds at this step
            assumed = Spectrum(8 * assumed.smallest, 8 * assumed.largest)
        elif along.largest <= 1.25 * assumed.largest:
            return step, _widest([start, along])
        else:
            assumed = _widest([assumed, along])
    raise SimulationError(
        f'lr="auto" found no step at which training goes downhill from here, down to {step:.2g}: give lr a number, or '
        "take another checkpoint."
    )


def measure_path(descent: Descent, tick: Callable[[], None] = lambda: None) -> Spectrum:
    """Measure the curvature that a descent with a given step meets: where it starts, half-way and at its end.

    Where the loss of the full batch leaps, the step was too long just before, and curvature is less afterwards: it is
    measured there too. A path of a few steps hardly leaves its start, and one that fails will say so itself.
    """
    found = [measure_start(descent)]
    if descent.steps < FEW:
        return found[0]
    looks, leaps, loss, before = _find_looks(descent, LOOKS[-2:]), descent.is_full_batch, math.inf, descent.start
    with suppress(SimulationError):
        for step, theta, parts in _follow(descent, tick):
            last, loss = loss, _mean_loss(descent, theta, parts) if leaps or step in looks else loss
            if leaps and loss - last > _LEAP * abs(last):
                found.append(measure_curvature(descent, before, parts, LOOK_ITERATIONS))
                leaps = False
            if step in looks and math.isfinite(loss):
                found.append(measure_curvature(descent, theta, parts, LOOK_ITERATIONS))
            before = {name: p.clone() for name, p in theta.items()} if leaps else descent.start
    return _widest(found)


def walk(descent: Descent, look: Look = measure_curvature, tick: Callable[[], None] = lambda: None) -> Spectrum | None:
    """Measure curvature along the unperturbed path; None if it goes uphill, or to where losses are not finite."""
    looks, found, reference = _find_looks(descent, LOOKS), list[Spectrum](), next(descent.batches())
    begin = _mean_loss(descent, descent.start, reference)
    try:
        for step, theta, parts in _follow(descent, tick):
            if step in looks:
                if _mean_loss(descent, theta, reference) - begin > _UPHILL * max(abs(begin), 1e-3):
                    return None
                found.append(look(descent, theta, parts, LOOK_ITERATIONS))
    except SimulationError:
        return None
    return _widest(found)


def _find_looks(descent: Descent, shares: Iterable[float]) -> set[int]:
    """Return the steps of a path that these shares of it end with."""
    return {max(1, round(share * descent.steps)) for share in shares}


def _follow(descent: Descent, tick: Callable[[], None]) -> Iterator[tuple[int, Parameters, Iterable[Weighted]]]:
    """Walk the unperturbed path; yield each step, where it led, which the next changes in place, and its batch."""
    theta, kept = {name: p.clone() for name, p in descent.start.items()}, descent.at_rest(descent.start)
    for step, parts in enumerate(descent.batches(), start=1):
        descent.move_(theta, descent.base_gradient(theta, parts, step), kept)
        tick()
        yield step, theta, parts


def _mean_loss(descent: Descent, theta: Parameters, parts: Iterable[Weighted]) -> float:
    with torch.no_grad():
        losses = [(part.weights * descent.task.losses(theta, part.batch, len(part))).sum() for part in parts]
    return float(torch.stack(losses).sum())


def _widest(spectra: list[Spectrum]) -> Spectrum:
    return Spectrum(min(s.smallest for s in spectra), max(s.largest for s in spectra))
