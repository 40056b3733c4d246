"""The state of a chunk between two steps, kept on disk every minute, so that a killed run goes on from there."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from imprint.errors import StoreError
from imprint.files import write
from imprint.fingerprint import of_tensors
from imprint.task import Parameters
from imprint.tensorfile import save

logger = logging.getLogger(__name__)
SECONDS = 60.0
_STACKS = ("base", "rows", "kept", "kept_rows")
_LONGEST = 3.0  # seconds to write one; where it takes longer, they are kept more seldom


@dataclass(frozen=True)
class Moment:
    """Where a descent stands before step `step`: the base path, one row per trajectory, and the growth reference.

    kept, kept_rows: the directions of the last step, if there is momentum.
    """

    step: int
    base: Parameters
    rows: Parameters
    pull: Tensor
    kept: Parameters
    kept_rows: Parameters


class Snapshot:
    """Keeps the latest moment of the chunk of sources that starts at row `start`."""

    def __init__(self, path: Path, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._start, self._clock = path, start, clock
        self._last, self._took = clock(), 0.0

    def keep(self, moment: Moment) -> None:
        """Write the moment if the last one is old enough. It is insurance: a full disk does not stop the run."""
        begin = self._clock()
        if begin - self._last < SECONDS * max(1.0, self._took / _LONGEST):
            return
        tensors = {"pull": moment.pull.cpu()}
        for kind in _STACKS:
            tensors |= {f"{kind}/{name}": t.cpu().contiguous() for name, t in getattr(moment, kind).items()}
        about = {"step": moment.step, "start": self._start, "sha256": _checksum(moment.step, self._start, tensors)}
        metadata = {"imprint": json.dumps(about)}
        try:
            write(self._path, lambda path: save(tensors, path, metadata))
        except StoreError as error:
            logger.warning("no snapshot was kept, the simulation goes on without: %s", error)
        self._last = self._clock()
        self._took = self._last - begin

    def restore(self, device: torch.device, count: int) -> Moment | None:
        """The moment that was kept, if it is of this chunk, of `count` rows, and as it was written."""
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                about = json.loads(file.metadata()["imprint"])
                step, start, checksum = about["step"], about["start"], about["sha256"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if checksum != _checksum(step, start, tensors):
                raise ValueError("it differs from its checksum")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s is damaged, its chunk starts over: %s", self._path, error)
            return None

        def stack(kind: str) -> Parameters:
            start = f"{kind}/"
            return {name.removeprefix(start): t.to(device) for name, t in tensors.items() if name.startswith(start)}

        moment = Moment(step=step, pull=tensors["pull"].to(device), **{kind: stack(kind) for kind in _STACKS})
        same = start == self._start and all(len(tensor) == count for tensor in moment.rows.values())
        return moment if same else None

    def clear(self) -> None:
        """The chunk is done: forget it."""
        self._path.unlink(missing_ok=True)


def _checksum(step: int, start: int, tensors: Parameters) -> str:
    return hashlib.sha256(f"{step} {start} {of_tensors(tensors)}".encode()).hexdigest()
