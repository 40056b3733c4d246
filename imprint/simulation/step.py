"""The step size, from the curvature the descent will meet and not only from where it starts.

Curvature rises along a training path, by a factor of ten from an early checkpoint. A step that suits the start then
leaves the stable range half-way, and the response grows without bound; so the unperturbed path is walked first, at the
cost of about one source's gradient steps, and the step follows the sharpest point on it.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from imprint.errors import SimulationError
from imprint.simulation.curvature import Spectrum, spectrum
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.task import Parameters

LOOKS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # shares of the path at which curvature is measured
LOOK_ITERATIONS = 15
_TRIES = 10
_UPHILL = 0.1  # share by which a path may end above where it began: mini-batches are noisy


def starting_curvature(descent: Descent) -> Spectrum:
    """Of the objective the descent starts with: the full batch, or the sharpest of its first two mini-batches."""
    batches = descent.batches()
    looks = 1 if descent.is_full_batch else min(2, descent.steps)
    return _widest([curvature_at(descent, descent.start, next(batches)) for _ in range(looks)])


def curvature_at(descent: Descent, theta: Parameters, parts: Iterable[Weighted], iterations: int = 30) -> Spectrum:
    """The extremes of the curvature H that responses see at θ, to which damping adds; or those of M⁻¹(H + λI)."""
    if descent.preconditioner is None:
        return spectrum(descent.task, theta, parts, iterations)
    diagonal = descent.preconditioner.diagonal
    return spectrum(descent.task, theta, parts, iterations, preconditioner=diagonal, damping=descent.damping)


def settle(descent: Descent, start: Spectrum) -> tuple[float, Spectrum]:
    """A step of 1/(|μ| + λ) for the sharpest curvature on the path it makes, and the extremes met there.

    With momentum it is longer, by as much as steps may be.
    Under a preconditioner μ is a curvature of M⁻¹(H + λI), and the step 1/|μ|.
    """
    assumed = start
    for _ in range(_TRIES):
        step = assumed.step(descent.shift, descent.plan.momentum)
        along = _walk(replace(descent, lr=step))
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


def _walk(descent: Descent) -> Spectrum | None:
    """Curvature extremes along the unperturbed path; None if it goes uphill or to where losses are not finite."""
    looks = {max(1, round(share * descent.steps)) for share in LOOKS}
    theta, kept = {name: p.clone() for name, p in descent.start.items()}, descent.at_rest(descent.start)
    found = []
    reference = next(descent.batches())
    begin = _mean_loss(descent, theta, reference)
    for step, parts in enumerate(descent.batches(), start=1):
        try:
            descent.move_(theta, descent.base_gradient(theta, parts, step), kept)
            descent.on_step(0)
            if step in looks:
                if _mean_loss(descent, theta, reference) - begin > _UPHILL * max(abs(begin), 1e-3):
                    return None
                found.append(curvature_at(descent, theta, parts, LOOK_ITERATIONS))
        except SimulationError:
            return None
    return _widest(found)


def _mean_loss(descent: Descent, theta: Parameters, parts: Iterable[Weighted]) -> float:
    with torch.no_grad():
        losses = [(part.weights * descent.task.losses(theta, part.batch, len(part))).sum() for part in parts]
    return float(torch.stack(losses).sum())


def _widest(spectra: list[Spectrum]) -> Spectrum:
    return Spectrum(min(s.smallest for s in spectra), max(s.largest for s in spectra))
