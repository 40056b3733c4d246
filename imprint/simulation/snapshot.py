"""The state of a chunk between two steps, written every minute, so that an interrupted run resumes from there."""

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

from imprint.errors import StoreError, first_line
from imprint.store.files import write_tensors
from imprint.store.fingerprint import of_tensors
from imprint.store.values import parsed
from imprint.task import Parameters

logger = logging.getLogger(__name__)
SECONDS = 60.0
_STACKS = ("base", "rows", "kept", "kept_rows")
_LONGEST = 3.0  # seconds to write one; where it takes longer, they are kept more seldom


@dataclass(frozen=True)
class PathState:
    """Where a descent stands before step `step`: the base path, one row per trajectory, and the growth reference.

    kept, kept_rows: the directions of the last step, if there is momentum.
    """

    step: int
    base: Parameters
    rows: Parameters
    pull: Tensor | None
    kept: Parameters
    kept_rows: Parameters

    def misfit(self, start: "PathState", steps: int) -> str | None:
        """Explain why a descent of so many steps from `start` cannot reach this state; None if it can."""
        if not start.step <= self.step <= steps:
            return f"it is of step {self.step} of {steps}"
        count = len(next(iter(start.rows.values())))
        if self.pull is None or self.pull.shape != (count,) or not self.pull.is_floating_point():
            return f"its pull is {_look(self.pull)}, not one number for each row"
        for kind in _STACKS:
            mine, expected = getattr(self, kind), getattr(start, kind)
            for name in sorted(mine.keys() | expected.keys()):
                there, wanted = (_look(stack[name]) if name in stack else "missing" for stack in (mine, expected))
                if there != wanted:
                    return f"{kind}/{name} is {there}, not {wanted}"
        return None


def _look(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"


class Snapshot:
    """Keeps the latest state of the chunk of sources that starts at row `start`."""

    def __init__(self, path: Path, start: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._start, self._clock = path, start, clock
        self._last, self._took = clock(), 0.0
        self._used = False

    def keep(self, state: PathState) -> None:
        """Write the state if the last one is old enough. It is insurance: a full disk does not stop the run."""
        begin = self._clock()
        if begin - self._last < SECONDS * max(1.0, self._took / _LONGEST):
            return
        assert state.pull is not None
        tensors = {"pull": state.pull.cpu()}
        for kind in _STACKS:
            tensors |= {f"{kind}/{name}": t.cpu().contiguous() for name, t in getattr(state, kind).items()}
        about = {"step": state.step, "start": self._start, "sha256": _checksum(state.step, self._start, tensors)}
        metadata = {"imprint": json.dumps(about)}
        try:
            write_tensors(self._path, tensors, metadata)
            self._used = True
        except StoreError as error:
            logger.warning("no snapshot could be saved, the simulation continues without it: %s", error)
        self._last = self._clock()
        self._took = self._last - begin

    def restore(self, start: PathState, steps: int) -> PathState | None:
        """Return the state that was kept, if it is of this chunk and on a path of so many steps from `start`."""
        state = self._read(next(iter(start.base.values())).device)
        count = len(next(iter(start.rows.values())))
        if state is None or any(tensor.shape[:1] != (count,) for tensor in state.rows.values()):
            return None
        if different := state.misfit(start, steps):
            self._refuse(different)
            return None
        self._used = True
        return state

    def _refuse(self, reason: str) -> None:
        logger.warning("%s is damaged, its chunk starts over: %s", self._path, reason)

    def _read(self, device: torch.device) -> PathState | None:
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                about = parsed(file.metadata()["imprint"].encode(), self._path).record("step", "start", "sha256")
                step, start, checksum = about["step"].whole(), about["start"].whole(), about["sha256"].checksum()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                pull = tensors["pull"].to(device)
            if checksum != _checksum(step, start, tensors):
                raise ValueError("it differs from its checksum")
        except (OSError, SafetensorError, MemoryError, StoreError, ValueError, KeyError, TypeError) as error:
            self._refuse(first_line(error))
            return None
        if start != self._start:
            return None

        def stack(kind: str) -> Parameters:
            start = f"{kind}/"
            return {name.removeprefix(start): t.to(device) for name, t in tensors.items() if name.startswith(start)}

        return PathState(step=step, pull=pull, **{kind: stack(kind) for kind in _STACKS})

    def clear(self) -> None:
        """Remove the state of a chunk that is done, if this one was kept or restored."""
        if self._used:
            self._path.unlink(missing_ok=True)


def _checksum(step: int, start: int, tensors: Parameters) -> str:
    return hashlib.sha256(f"{step} {start} {of_tensors(tensors)}".encode()).hexdigest()
