"""Choose the step of a `central` readout: rounding grows below it, curvature above."""

import math

import torch
from torch import Tensor

from imprint.readout.base import Base
from imprint.task import Batch, Parameters
from imprint.tensors.vectors import row_norms

_RELATIVE_STEPS = tuple(10 ** (exponent / 2) for exponent in range(-12, -1))
TRIAL_STEP = _RELATIVE_STEPS[4]  # good enough to see whether a model can be read by differences at all


def step_lengths(scale: float, imprints: Parameters, relative: float) -> Tensor:
    """Return c_b with ‖c_b·u_b‖ = relative · scale; 1 for an imprint that is zero."""
    norms = row_norms(imprints)
    lengths = torch.where(norms > 0, relative * scale / norms, 1.0)
    return lengths.to(next(iter(imprints.values())).dtype)


def calibrate_step(base: Base, imprints: Parameters, batch: Batch, count: int, *, vectorise: bool) -> float:
    """Return the relative step whose scores agree best with those of the steps next to it."""
    found = []
    for step in _RELATIVE_STEPS:
        c = step_lengths(base.scale, imprints, step)
        found.append(base.central(imprints, c, batch, count, vectorise=vectorise).double())
    # a step too small for the precision moves nothing: its scores are 0, and agree with their neighbours
    gaps = [
        float((here - below).norm() + (above - here).norm()) / float(here.norm()) if bool(here.any()) else math.inf
        for below, here, above in zip(found, found[1:], found[2:], strict=False)
    ]
    best = min(range(len(gaps)), key=gaps.__getitem__)
    return _RELATIVE_STEPS[best + 1 if math.isfinite(gaps[best]) else len(_RELATIVE_STEPS) // 2]
