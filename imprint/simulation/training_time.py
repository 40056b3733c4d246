"""How far a recorded training went: the sum of its learning rates, in the units in which paths measure theirs.

A path that reaches much further than the training did overfits where the training was stopped before, so `Plan.auto`
keeps horizons to a share of it. Known for SGD, where momentum β makes a step 1/(1 − β) times as long, and for Adam and
its kin in the metric of their second moments; None for other optimisers, and for checkpoints of no one recording.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from imprint.errors import StoreError
from imprint.plan import State
from imprint.recording.header import RECORD
from imprint.recording.reading import Recording
from imprint.recording.records import Run, Settings


def find_training_time(checkpoints: Sequence[State] | None, metric: Literal["adam"] | None) -> float | None:
    """Return how far the training went that checkpoints were recorded from; None where that is not known."""
    run = _find_recording(checkpoints)
    return None if run is None else measure_training_time(run, metric)


def measure_training_time(run: Run, metric: Literal["adam"] | None) -> float | None:
    """Return the sum of a run's learning rates, in a metric; None where its optimiser moved in another one."""
    descends = issubclass(run.optimiser, torch.optim.SGD)
    if not (descends if metric is None else all("betas" in group for group in run.steps[0].groups)):
        return None
    return float(sum(max(map(_length, step.groups)) for step in run.steps))


def _length(group: Settings) -> float:
    """Return how far a step of a parameter group goes in the long run, per unit of the gradient."""
    kept, damped = float(group.get("momentum", 0.0)), float(group.get("dampening", 0.0))
    return float(group["lr"]) * (1 + kept * (1 - damped) / max(1 - kept, 1e-3))


def _find_recording(checkpoints: Sequence[State] | None) -> Recording | None:
    """Return the finished recording that all checkpoints are from, if there is one."""
    places = [given[1] if isinstance(given, tuple) else given for given in checkpoints or ()]
    folders = {Path(place).parent if isinstance(place, str | os.PathLike) else None for place in places}
    folder = folders.pop() if len(folders) == 1 else None
    if folder is None or not (folder / RECORD).is_file():
        return None
    try:
        return Recording(folder)
    except StoreError:  # unfinished, or with an optimiser of the user's own
        return None
