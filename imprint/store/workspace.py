"""The folder of a simulation that is under way: it can be killed at any moment, and is resumed.

While a simulation runs, its folder holds a journal of what was asked for and how each checkpoint is simulated, and a
list of the finished files with their checksums. Tensors come as complete files or not at all. A record comes last and
makes the folder what it is: a store (`writing`), or a part of one (`part_writing`).
"""

import contextlib
import json
import logging
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from imprint.errors import DataError, StoreError, first_line
from imprint.sources import Sources
from imprint.store.checkpoint import Checkpoint, Decided, File
from imprint.store.comparison import Evaluate, compare_training_data, difference
from imprint.store.draws import Draws, refuse_other_draws
from imprint.store.files import LOCK, Lock, clear_leftovers, find_leftovers, sha256, write_tensors
from imprint.store.finished import FILES, Finished
from imprint.store.folder import make_folder, write_sealed
from imprint.store.layouts import Layout, find_misfit
from imprint.store.manifest import JOURNAL, SCHEMA, SOURCES, Manifest, Probes
from imprint.store.probing import ProbeValues
from imprint.store.records import read
from imprint.store.request import Request
from imprint.store.structure import flatten
from imprint.store.table import Table
from imprint.store.values import Value, parsed, read_json
from imprint.task import Batch, Parameters

logger = logging.getLogger(__name__)

Whole = TypeVar("Whole")
Result = TypeVar("Result")
CheckChoices = Callable[[Checkpoint, int, Request, Value], None]
Remarks = Callable[[], Mapping[str, str]]
"""Texts that only the engine which settled a checkpoint can give."""
_SNAPSHOT = "snapshot.safetensors"
SETTLING = 3  # how many states an engine may keep while it settles a checkpoint
_SETTLING = tuple(f"settling-{number}.safetensors" for number in range(SETTLING))
SCRATCH = "scratch"  # the name of a file of tensors that is removed once the store is complete
CHECKPOINTS = "checkpoint-*"
ABOUT = "imprint"  # the name of what is said about a file, in its header


class Workspace(ABC, Generic[Whole]):
    """The folder of a simulation that is under way.

    record, content: the file that makes it complete, and what it holds, in words.
    is_whole: whether the imprints of all sources come into it.
    keeps_ends: whether it keeps where the path of each file of imprints ended (`path_ends`).
    otherwise: what to do about a folder with another request, in words; {path} stands for the folder.
    begins: whether what comes with the first sources of a checkpoint does, such as its base.
    request: everything the result depends on. A folder with a different request is refused, and the error names the
        first difference. A folder with the same request is resumed or, if it is complete, returned by `finished`.
    evaluate: evaluates the task on given training examples, to compare it with a request that has different probes.
    check: refuses choices for a checkpoint that no simulation would have made.
    temporary: whether nothing in the folder outlives the process.
    draws: what dropout along the path is drawn with; None for a plan without.
    resumed: whether an earlier run has begun.
    """

    record: ClassVar[str]
    content: ClassVar[str]
    is_whole: ClassVar[bool] = True
    keeps_ends: ClassVar[bool] = False
    begins: bool = True
    otherwise: ClassVar[str] = "Give another folder, or delete it"

    def __init__(
        self,
        path: Path,
        request: Request,
        evaluate: Evaluate,
        check: CheckChoices,
        *,
        temporary: bool = False,
        draws: Draws | None = None,
    ) -> None:
        self._check, self._evaluate, self._draws = check, evaluate, draws
        self._temporary = temporary
        written = json.dumps(asdict(request), allow_nan=False)  # what could not be read again is refused now
        self.request = Request.from_json(parsed(written.encode(), Path(JOURNAL)))
        self._settled: dict[int, Checkpoint] = {}
        self.path, self.resumed = path, False
        self._done = Finished(path)
        self._found = make_folder(path, self.content, JOURNAL, self.record)
        self.finished = self._open_finished() if (path / self.record).exists() else None
        if self.finished:
            self._tidy_up()
            return
        self._refuse_links()
        self._lock = Lock(path)
        try:
            if (path / self.record).exists():  # another process may have come to the end in the meantime
                self.finished = self._open_finished()
                self.close()
            elif (path / JOURNAL).exists():
                self._resume()
        except BaseException:
            self._lock.release()
            raise

    @property
    def place(self) -> str:
        """The folder as users know it."""
        return str(self.path)

    @abstractmethod
    def _open_finished(self) -> Whole:
        """Open what is complete; refuse it if it was made from another request."""

    @abstractmethod
    def finish(self, manifest: Manifest) -> Whole:
        """Write what makes the folder complete, and return what it now holds."""

    def simulates(self, index: int) -> bool:
        """Tell whether a checkpoint is simulated here."""
        return True

    def _publish(self, *names: str) -> None:
        """Tell who follows the making of the folder from elsewhere that files in it are new."""

    def check_end(self, index: int, base: Parameters) -> None:
        """Refuse sources whose path from a checkpoint ends elsewhere than that of sources which are there already."""

    def chunks(self, count: int) -> range:
        """Return which of so many chunks of sources are to be simulated here."""
        return range(count)

    def bound(self, decided: Decided, sources: int) -> Decided:
        """Return what an engine has decided for so many sources, with files that are small enough to be shared out."""
        return decided

    def agree(self, index: int, checkpoint: Checkpoint, remarks: Remarks) -> Checkpoint:
        """Return how a checkpoint is simulated: as it was settled here, or by another process before."""
        return checkpoint

    def _refuse_links(self) -> None:
        """Refuse a folder with links in it: what is written to or removed from them would be somewhere else."""
        if link := next((path for path in self.path.rglob("*") if path.is_symlink()), None):
            raise StoreError(f"{link} is a link, and a store is written to plain folders and files: remove it.")

    def _resume(self) -> None:
        """Take over what an earlier run of the same request has left."""
        try:
            request, before = self._read_journal()
        except StoreError as error:
            raise StoreError(f"{error} Delete {self.path} to begin anew.") from error
        content, otherwise = f"{self.place} holds an unfinished simulation", self.otherwise.format(path=self.place)
        if different := difference(request, self.request, self._evaluate):
            raise StoreError(f"{content} of something else: {different}. {otherwise}.")
        refuse_other_draws(before, self._draws, request.n, content, otherwise[0].lower() + otherwise[1:])
        compare_training_data(request, self.request).warn()
        self.request = request  # its losses may differ from ours in the last digit, and the manifest must not
        clear_leftovers(self.path)
        self._done.resume()
        self.resumed = bool(self._settled)
        logger.info("resuming the simulation in %s", self.place)

    def _read_journal(self) -> tuple[Request, Draws | None]:
        """Learn how checkpoints are simulated, and return what was asked for, and what dropout was drawn with."""
        journal = read_json(self.path / JOURNAL)
        schema = journal.mapping().get("schema")
        if schema is not None and schema.content != SCHEMA:
            raise StoreError(f"{self.path} was begun by another version of imprint: finish it with that one.")
        drawn = ("draws",) if "draws" in journal.mapping() else ()
        values = journal.unsealed().record("schema", "request", "checkpoints", *drawn)
        request = Request.from_json(values["request"])
        for index, checkpoint in enumerate(values["checkpoints"].items()):
            if checkpoint.content is not None:
                self._settled[index] = settled = read(Checkpoint, checkpoint)
                self._check(settled, index, request, checkpoint)
        return request, read(Draws, values["draws"]) if drawn else None

    def settled(self, index: int) -> Checkpoint | None:
        """Return how a checkpoint is simulated, if an earlier run has decided it."""
        return self._settled.get(index)

    def settle(self, index: int, checkpoint: Checkpoint) -> None:
        """Note how a checkpoint is simulated, so that it stays so."""
        self._settled[index] = checkpoint
        self._write_journal()

    def begin(self) -> None:
        """Note what is simulated, before anything is kept of it: nothing else is resumed from that."""
        if not (self.path / JOURNAL).exists():
            self._write_journal()

    def _write_journal(self) -> None:
        settled = [self._settled.get(k) for k in range(max(self._settled, default=-1) + 1)]
        checkpoints = [asdict(value) if value else None for value in settled]
        journal: dict[str, Any] = {"schema": SCHEMA, "request": asdict(self.request), "checkpoints": checkpoints}
        if self._draws is not None:
            journal["draws"] = asdict(self._draws)
        write_sealed(self.path / JOURNAL, journal)
        self._publish(JOURNAL)

    def snapshot(self, folder: str) -> Path | None:
        """Return the file in which a chunk of sources keeps its state; None where nothing outlives the process."""
        return None if self._temporary else self.path / folder / _SNAPSHOT

    def settling(self, folder: str, number: int) -> Path | None:
        """Return a file in which a checkpoint keeps its state while it is settled; None where nothing outlives it."""
        return None if self._temporary else self.path / folder / _SETTLING[number]

    def tensors(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        """Write tensors under `name`, with plain values `about` them."""
        write_tensors(self.path / name, tensors, {ABOUT: json.dumps(about or {}, allow_nan=False)})
        file = describe_file(self.path, name, rows)
        if not self._temporary:  # killed right here, the file is not on the list, and is made again
            self._done.add(file)
            self._publish(name, FILES)
        return file

    def done(
        self, name: str, rows: tuple[int, int] | None, expected: Layout | None, read: Callable[[Value], Result]
    ) -> tuple[File, Result] | None:
        """Return a file of tensors that an earlier run has written, and what `read` makes of what it is about.

        One that does not hold what a simulation writes there is not done, nor is the shard it belongs to.

        expected: its tensors; None where they are not known beforehand, but for their number of rows.
        """
        if (found := self._locate(name, rows)) is None:
            return None
        place, file = found
        try:
            with safe_open(place, framework="pt") as tensors:
                about = parsed((tensors.metadata() or {}).get(ABOUT, "").encode(), place)
                misfit = _find_other_rows(tensors, rows) if expected is None else find_misfit(tensors, expected)
                if misfit:
                    about.fail(misfit)
            return file, read(about)
        except (OSError, SafetensorError, MemoryError, StoreError) as error:
            logger.warning("%s is not what a simulation leaves there, and is made again: %s", place, first_line(error))
        self._done.drop_shard(file)
        return None

    def _locate(self, name: str, rows: tuple[int, int] | None) -> tuple[Path, File] | None:
        """Find a file that an earlier run has written."""
        file = self._done.get(name, rows)
        return None if file is None else (self.path / name, file)

    def _place(self, name: str) -> Path:
        """Return where a file is read."""
        return self.path / name

    def read(self, name: str, device: torch.device) -> Parameters:
        """Load the tensors of a file in the folder."""
        place = self._place(name)
        try:
            return load_file(place, str(device))
        except (OSError, SafetensorError, MemoryError) as error:
            raise StoreError(f"{place} cannot be read: {error}.") from error

    def sources(self, sources: Sources) -> File:
        """Write the table of sources."""
        Table.of(sources).write(self.path / SOURCES)
        return describe_file(self.path, SOURCES)

    def probes(self, batch: Batch, values: ProbeValues) -> Probes | None:
        """Write the probe examples; return None where they are more than tensors and plain values."""
        try:
            structure, tensors = flatten(batch)
            parsed(json.dumps(structure).encode(), self.path)  # values that JSON does not keep, such as infinity
        except (DataError, StoreError) as error:
            logger.info("the store keeps no probe examples: %s", error)
            return None
        return Probes(self.tensors("probes.safetensors", tensors), structure, values)

    def close(self) -> None:
        """Remove what served the making of the store, now that it is complete."""
        clear_leftovers(self.path)
        for file in self._scaffolding():
            with contextlib.suppress(OSError):  # it does no harm where it is
                file.unlink()
        self._lock.release()

    def _tidy_up(self) -> None:
        """Remove what a run has left that was killed when the store was already complete."""
        if find_leftovers(self.path) or any(file.exists() for file in (*self._scaffolding(), self.path / LOCK)):
            with contextlib.suppress(StoreError):  # the folder is read-only, or another process is tidying it up
                self._lock = Lock(self.path)
                self.close()

    def _scaffolding(self) -> list[Path]:
        """List the files that serve the making of a store, in its own folders."""
        folders = [path for path in self.path.glob(CHECKPOINTS) if not path.is_symlink()]
        scratch = [path / name for path in folders for name in (_SNAPSHOT, *_SETTLING, f"{SCRATCH}.safetensors")]
        return [*scratch, self.path / JOURNAL, self.path / FILES]

    def stop(self, interrupted: bool = False) -> bool:
        """Leave the folder after an error; return whether it holds work to resume. If not, it is as it was before.

        Of a run that was interrupted even the choice of steps is kept: it may have taken long.
        """
        work = any(self.path.rglob("*.safetensors")) or (interrupted and bool(self._settled))
        if work and not self._temporary:
            self._lock.release()
            return True
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):  # what others have put there stays
            for folder in self.path.glob(CHECKPOINTS):
                folder.rmdir()
            if not self._found:
                self.path.rmdir()
        return False


def describe_file(folder: Path, name: str, rows: tuple[int, int] | None = None) -> File:
    """Describe a file that was written."""
    place = folder / name
    try:
        return File(name, sha256(place), place.stat().st_size, rows)
    except OSError as error:
        raise StoreError(f"{place} was written, but cannot be read: {error.strerror}.") from error


def _find_other_rows(tensors: Any, rows: tuple[int, int] | None) -> str | None:
    """Describe a tensor of an opened file that has not as many rows as there are sources in it."""
    count = rows[1] - rows[0] if rows else None
    for name in tensors.keys():  # noqa: SIM118
        if count is not None and tensors.get_slice(name).get_shape()[:1] != [count]:
            return f"tensor {name!r} has not {count} rows"
    return None
