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


@dataclass(frozen=True)
class Found:
    """What a snapshot holds: tensors, after how many steps they were kept, and what their owner noted about them."""

    step: int
    tensors: Parameters
    note: str


class Snapshot:
    """Keeps the latest state of the chunk of sources that starts at row `start`.

    begin: called before a state is written.
    """

    def __init__(
        self,
        path: Path,
        start: int,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._path, self._start, self._clock, self._begin = path, start, clock, begin
        self._last, self._took = clock(), 0.0
        self._used = False

    def keep(self, state: PathState) -> None:
        """Write the state of a path if the last one is old enough."""

        def make() -> tuple[Parameters, str]:
            assert state.pull is not None
            stacks = ((kind, getattr(state, kind)) for kind in _STACKS)
            named = {f"{kind}/{name}": t for kind, stack in stacks for name, t in stack.items()}
            return {"pull": state.pull, **named}, ""

        self.keep_tensors(state.step, make)

    def keep_tensors(self, step: int, make: Callable[[], tuple[Parameters, str]]) -> None:
        """Write tensors, and a text about them, if the last ones are old enough.

        It is insurance: a full disk does not stop the run.
        """
        begin = self._clock()
        if begin - self._last < SECONDS * max(1.0, self._took / _LONGEST):
            return
        tensors, note = make()
        written = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        sha256 = _checksum(step, self._start, note, written)
        metadata = {"imprint": json.dumps({"step": step, "start": self._start, "note": note, "sha256": sha256})}
        try:
            self._begin()
            write_tensors(self._path, written, metadata)
            self._used = True
        except StoreError as error:
            logger.warning("no snapshot could be saved, the simulation continues without it: %s", error)
        self._last = self._clock()
        self._took = self._last - begin

    def restore(self, start: PathState, steps: int) -> PathState | None:
        """Return the state that was kept, if it is of this chunk and on a path of so many steps from `start`."""
        found = self.read_tensors(next(iter(start.base.values())).device)
        if found is None:
            return None

        def stack(kind: str) -> Parameters:
            start = f"{kind}/"
            return {name.removeprefix(start): t for name, t in found.tensors.items() if name.startswith(start)}

        state = PathState(found.step, pull=found.tensors.get("pull"), **{kind: stack(kind) for kind in _STACKS})
        count = len(next(iter(start.rows.values())))
        if any(tensor.shape[:1] != (count,) for tensor in state.rows.values()):
            return None
        if different := state.misfit(start, steps):
            self.refuse(different)
            return None
        self._used = True
        return state

    def refuse(self, reason: str) -> None:
        """Report why a snapshot cannot be used."""
        logger.warning("%s is damaged, its chunk starts over: %s", self._path, reason)

    def read_tensors(self, device: torch.device) -> "Found | None":
        """Return what was kept of this chunk, if its file is whole; the caller checks whether it fits."""
        if not self._path.is_file():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                about = parsed(file.metadata()["imprint"].encode(), self._path).record(
                    "step", "start", "note", "sha256"
                )
                step, start, checksum = about["step"].whole(), about["start"].whole(), about["sha256"].checksum()
                note = about["note"].text()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if checksum != _checksum(step, start, note, tensors):
                raise ValueError("it differs from its checksum")
            moved = {name: tensor.to(device) for name, tensor in tensors.items()}
        except (OSError, SafetensorError, MemoryError, StoreError, ValueError, KeyError, TypeError) as error:
            self.refuse(first_line(error))
            return None
        if start != self._start:
            return None
        return Found(step, moved, note)

    def use(self) -> None:
        """Say that the state that was read is gone on from, so that it is removed with the chunk."""
        self._used = True

    def clear(self) -> None:
        """Remove the state of a chunk that is done, if this one was kept or restored."""
        if self._used:
            self._path.unlink(missing_ok=True)


def _checksum(step: int, start: int, note: str, tensors: Parameters) -> str:
    return hashlib.sha256(f"{step} {start} {note} {of_tensors(tensors)}".encode()).hexdigest()
