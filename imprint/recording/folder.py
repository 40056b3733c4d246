"""The folder of a recording while it is written: locked, resumable after any interruption, with few checkpoints."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from imprint.errors import StoreError
from imprint.recording.checkpoints import write_checkpoint
from imprint.recording.header import RECORD, Conditions, Header, Kept, read_header
from imprint.recording.journal import STEPS, Entry, Journal, Position, read_journal
from imprint.recording.records import Circumstances, Step
from imprint.recording.settings import describe_groups
from imprint.store.addresses import is_address
from imprint.store.checkpoint import File
from imprint.store.files import Lock, clear_leftovers, sha256
from imprint.store.folder import make_folder
from imprint.store.uploading import begin_upload

_MOST = 8  # checkpoints between start and end, where the recorder chooses
_HELD = (
    "is held by an earlier RunRecorder of this process: call its close() to resume the recording with a new one, or "
    "its finish() if the training is over"
)
_CONTENT = "the recording"
_SHORTEST = 10  # steps between two of them


def choose_interval(steps: int) -> int:
    """Return the number of steps between checkpoints in a run of so many: 10, 20, 40, …, so that there are few.

    It follows from the steps so far alone: a longer run keeps every second checkpoint of a shorter one.

    >>> [choose_interval(steps) for steps in (5, 80, 81, 1000)]
    [10, 10, 20, 160]
    """
    interval = _SHORTEST
    while steps > _MOST * interval:
        interval *= 2
    return interval


def refuse_finished(path: Path, header: Header) -> None:
    """Refuse to record into a folder whose recording is finished; say how to go on from it."""
    if header.finished:
        raise StoreError(
            f"{path} holds a finished recording, which is not written to again. To go on from it, do not train: give "
            f"simulate run=imprint.Recording({str(path)!r}), with the data and the collate_fn of that training. To "
            "record another training, give a new folder, or delete this one."
        )


class RecordingFolder:
    """Writes the files of a recording; one process at a time.

    header: what is known of the run; None in a new folder until `begin`.
    entries: the steps that an unfinished recording already has; empty once the run goes on.
    place: a folder, or the address of one in a bucket: there a run is uploaded with each checkpoint, and at its end.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = place
        self._upload = begin_upload(place, _CONTENT, RECORD) if is_address(place) else None
        self.path = path = Path(place) if self._upload is None else self._upload.folder
        try:
            make_folder(path, _CONTENT, RECORD)
            self._lock = Lock(path, advice=_HELD)
        except BaseException:
            self._leave()
            raise
        try:
            clear_leftovers(path)
            self._journal = Journal(path)
            self.header = read_header(path) if (path / RECORD).exists() else None
            self.entries: list[Entry] = []
            if self.header is not None:
                refuse_finished(path, self.header)
                self.entries = read_journal(path, self.header.groups, self.header.n)
        except BaseException:
            self.release()
            raise

    @property
    def steps(self) -> int:
        """How many steps are recorded."""
        return self._journal.steps

    def require_header(self) -> Header:
        """Return the header of a run that has begun."""
        assert self.header is not None
        return self.header

    def begin(self, header: Header, model: nn.Module, optimiser: Optimizer) -> None:
        """Begin a new recording with the model and the optimiser as they are."""
        self._journal.resume([])
        self.header = replace(header, checkpoints=(write_checkpoint(self.path, 0, model, optimiser, header.groups),))
        self.header.write(self.path)
        self._publish()

    def go_back(self, step: int) -> Position | None:
        """Drop all steps and checkpoints after a step; return where that one left the order of the data."""
        header = self.require_header()
        if step > len(self.entries):
            have = f"{len(self.entries)} steps" if self.entries else "no step"
            raise StoreError(
                f"{self.path} has {have} of the run, where {step} are needed: steps {len(self.entries) + 1} to {step} "
                "are missing. Resume from an earlier checkpoint, run.resume(), or record in a new folder."
            )
        kept = self.entries[:step]
        later = [each for each in header.checkpoints if each.step > step]
        if later:
            self._replace(checkpoints=tuple(each for each in header.checkpoints if each.step <= step))
        self._journal.resume(kept)
        self._remove(later)
        self.entries = []
        return kept[-1].position if kept else None

    def latest(self) -> Kept:
        """Return the latest checkpoint whose steps are all there."""
        checkpoints = self.require_header().checkpoints
        if checkpoints[-1].step > len(self.entries):
            raise StoreError(
                f"{self.path / STEPS} is damaged: it has {len(self.entries)} steps, and there is a checkpoint of step "
                f"{checkpoints[-1].step}. Record in a new folder, or resume from a checkpoint of your own, "
                f"RunRecorder(..., step={len(self.entries)})."
            )
        return checkpoints[-1]

    def add(self, step: Step, position: Position | None) -> None:
        """Append a step."""
        self._journal.add(step, position)

    def note(self, circumstances: Circumstances) -> None:
        """Keep how forward passes run, once it is known."""
        self._replace(circumstances=Conditions.of(circumstances))

    def is_due(self) -> bool:
        """Tell whether a checkpoint is to be written after the present step."""
        every = self.require_header().every or choose_interval(self.steps)
        return self.steps % every == 0

    def keep(self, model: nn.Module, optimiser: Optimizer, seconds: float, schedule: dict[str, Any] | None) -> None:
        """Write a checkpoint after the present step, and remove those that are no longer among the few to keep."""
        header = self.require_header()
        self._journal.sync()
        latest = write_checkpoint(self.path, self.steps, model, optimiser, header.groups)
        every = header.every or choose_interval(self.steps)
        kept = [each for each in header.checkpoints if header.every or each.step % every == 0]
        removed = [each for each in header.checkpoints if each not in kept]
        self._replace(
            checkpoints=(*kept, latest), seconds=seconds, settings=describe_groups(optimiser), schedule=schedule
        )
        self._remove(removed)
        self._publish()

    def _publish(self) -> None:
        """Upload the run up to its latest checkpoint."""
        if self._upload is not None:
            self._upload.push(*self._list_files(), now=True)

    def _list_files(self) -> list[str]:
        """List the files that a resumed or repeated run needs, the record last."""
        files = [file.path for kept in self.require_header().checkpoints for file in kept.files]
        return [*files, *([STEPS] if (self.path / STEPS).exists() else []), RECORD]

    def _leave(self) -> None:
        if self._upload is not None:
            self._upload.close()

    def finish(self, seconds: float) -> None:
        """Declare the recording complete, after so many seconds of training."""
        self._journal.sync()
        place = self.path / STEPS
        journal = File(STEPS, sha256(place), place.stat().st_size)
        self._replace(finished=True, journal=journal, seconds=seconds)
        self._lock.release()
        if self._upload is not None:
            self._upload.finish(self._list_files())

    def release(self) -> None:
        """Let other processes in."""
        self._lock.release()
        self._leave()

    def _replace(self, **fields: Any) -> None:
        self.header = replace(self.require_header(), **fields)
        self.header.write(self.path)

    def _remove(self, checkpoints: list[Kept]) -> None:
        """Remove the files of checkpoints that the header no longer has."""
        for kept in checkpoints:
            for file in kept.files:
                with contextlib.suppress(OSError):  # what remains does no harm
                    (self.path / file.path).unlink()
