"""How far a recorded training went: the sum of its learning rates, in the units in which paths measure theirs.

A path that reaches much further than the training did overfits where the training was stopped before, so `Plan.auto`
keeps horizons to a share of it. Known for SGD, where momentum β makes a step 1/(1 − β) times as long, and for Adam and
its kin in the metric of their second moments; None for other optimisers, and for checkpoints of no recording.
"""

import os
from pathlib import Path
from typing import Literal

import torch

from imprint.errors import StoreError
from imprint.plan import Checkpoints
from imprint.recording.header import RECORD
from imprint.recording.reading import Recording
from imprint.recording.records import Run, Settings
from imprint.simulation.states import flatten


def find_training_time(checkpoints: Checkpoints | None, metric: Literal["adam"] | None) -> float | None:
    """Return how far the trainings went that checkpoints are from, the shortest of them; None if one is not known."""
    times = [None if run is None else measure_training_time(run, metric) for run in _find_recordings(checkpoints)]
    known = [time for time in times if time is not None]
    return min(known) if known and len(known) == len(times) else None


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


def _find_recordings(checkpoints: Checkpoints | None) -> list[Recording | None]:
    """Return the finished recordings that checkpoints are from, None in place of what is no such recording."""
    states, _ = flatten(checkpoints or ())
    places = [given[1] if isinstance(given, tuple) else given for given in states]
    folders = {Path(place).parent if isinstance(place, str | os.PathLike) else None for place in places}
    return [None if folder is None else _open_recording(folder) for folder in folders]


def _open_recording(folder: Path) -> Recording | None:
    if not (folder / RECORD).is_file():
        return None
    try:
        return Recording(folder)
    except StoreError:  # unfinished, or with an optimiser of the user's own
        return None
