"""Writes a store so that it can be killed at any moment and continued.

While a simulation runs, its folder holds a journal of what was asked for and how each checkpoint is simulated, and a
list of the finished files with their checksums. Tensors come as complete files or not at all; a file is done once it is
on the list and still what the list says. The manifest comes last and makes the folder a store.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from imprint.data import spread_examples
from imprint.errors import DataError, StoreError, first_line
from imprint.sources import Sources
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.files import (
    LOCK,
    Lock,
    append,
    clear_leftovers,
    is_leftover,
    leftovers,
    refuse_unreadable,
    sha256,
    write,
)
from imprint.store.fingerprint import Likeness, compare_data
from imprint.store.manifest import (
    MANIFEST,
    SCHEMA,
    SOURCES,
    Manifest,
    Probes,
    check_request,
)
from imprint.store.probing import (
    SINGLE,
    Seen,
    other_gradients,
    other_loss,
    other_outputs,
    other_settings,
)
from imprint.store.reading import JOURNAL, Store
from imprint.store.records import read
from imprint.store.structure import flattened
from imprint.store.tensorfile import Layout, misfit, save
from imprint.store.values import Value, parsed, read_json, sealed
from imprint.task import Batch, Parameters

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
See = Callable[[list[int]], Seen]
CheckChoices = Callable[[Checkpoint, int, dict[str, Any], Value], None]
FILES = "unfinished.files"
_SNAPSHOT = "snapshot.safetensors"
_CHECKPOINTS = "checkpoint-*"
_ABOUT = "imprint"  # the name of what is said about a file, in its header


class Writer:
    """The folder of a store in the making.

    request: everything the result depends on, as JSON. A folder that holds another request is refused, and the first
        difference named; one that holds the same is continued, or returned by `finished` if it is complete.
    see: evaluates the task on some training examples, to compare it with a request that has others for probes.
    check: refuses choices for a checkpoint that no simulation would have made.
    """

    def __init__(
        self, out: str | os.PathLike[str] | None, request: dict[str, Any], see: See, check: CheckChoices
    ) -> None:
        self._check = check
        self._temporary = out is None
        written = parsed(json.dumps(request, allow_nan=False).encode(), Path(JOURNAL))
        self.request: dict[str, Any] = written.content
        self._see = see
        self._settled: dict[int, Checkpoint] = {}
        self._files: dict[str, File] = {}
        self.path = Path(tempfile.mkdtemp(prefix="imprint-") if out is None else out)
        self.finished = self._open_folder()
        if self.finished:
            self._tidy_up()
            return
        self._refuse_links()
        self._lock = Lock(self.path)
        try:
            self.finished = self._open_finished()  # another process may have come to the end in the meantime
            if self.finished:
                self.close()
            elif (self.path / JOURNAL).exists():
                self._open_journal()
        except BaseException:
            self._lock.release()
            raise

    def _open_folder(self) -> Store | None:
        """Make the folder if need be. Nothing is touched in one that holds something else."""
        try:
            str(self.path).encode()  # safetensors opens only what is UTF-8
            if self.path.exists() and not self.path.is_dir():
                raise StoreError(f"{self.path} is a file: give a folder for the store.")
            self._found = self.path.exists() and not self._temporary
            begun = (self.path / JOURNAL).exists()  # looked at first: it goes only once there is a manifest
            if store := self._open_finished():
                return store
            if self._found and not begun and any(not _before_the_journal(file) for file in self.path.iterdir()):
                raise StoreError(f"{self.path} is not empty and holds no store: give a new folder.")
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            raise StoreError(f"could not make the folder {self.path}: {error}.") from error
        return None

    def _refuse_links(self) -> None:
        """Refuse a folder with links in it: what is written to or removed from them would be somewhere else."""
        if link := next((path for path in self.path.rglob("*") if path.is_symlink()), None):
            raise StoreError(f"{link} is a link, and a store is written to plain folders and files: remove it.")

    def _open_finished(self) -> Store | None:
        if not (self.path / MANIFEST).exists():
            return None
        store = Store(self.path)
        before, fixed = store.manifest.request, self.request["fixed"]
        if before["fixed"].items() <= fixed.items():  # what else is fixed it keeps, as stores of earlier schemas do
            before["fixed"] = fixed
        if different := difference(before, self.request, self._see):
            raise StoreError(f"{self.path} already holds a store, made otherwise: {different}. Give another folder.")
        compared_data(before, self.request).warn()
        logger.info("%s already holds this store", self.path)
        return store

    def _open_journal(self) -> None:
        """Go on with what an earlier run of the same request has left."""
        try:
            request = self._read_journal()
        except StoreError as error:
            raise StoreError(f"{error} Delete {self.path} to begin anew.") from error
        if different := difference(request, self.request, self._see):
            raise StoreError(
                f"{self.path} holds an unfinished simulation of something else: {different}. Give another folder, or "
                "delete it."
            )
        compared_data(request, self.request).warn()
        self.request = request  # its losses may differ from ours in the last digit, and the manifest must not
        clear_leftovers(self.path)
        self._take_over(_listed(self.path / FILES))
        logger.info("going on with the simulation in %s", self.path)

    def _read_journal(self) -> dict[str, Any]:
        """Learn how checkpoints are simulated, and return what was asked for."""
        journal = read_json(self.path / JOURNAL)
        schema = journal.mapping().get("schema")
        if schema is not None and schema.content != SCHEMA:
            raise StoreError(f"{self.path} was begun by another version of imprint: finish it with that one.")
        values = journal.unsealed().record("schema", "request", "checkpoints")
        check_request(values["request"])
        for index, checkpoint in enumerate(values["checkpoints"].items()):
            if checkpoint.content is not None:
                self._settled[index] = settled = read(Checkpoint, checkpoint)
                self._check(settled, index, values["request"].content, checkpoint)
        request: dict[str, Any] = values["request"].content
        return request

    def _take_over(self, listed: Iterable[File]) -> None:
        """Count those files as done that are what the list says. A shard with another is made again as a whole."""
        latest = {file.path: file for file in listed}
        again = {_shard(file) for file in latest.values() if not self._is_sound(file)}
        for path, file in latest.items():
            if _shard(file) in again:
                (self.path / path).unlink(missing_ok=True)
            else:
                self._files[path] = file
        text = "".join(_line(file) for file in self._files.values())
        write(self.path / FILES, lambda path: path.write_text(text))

    def _is_sound(self, file: File) -> bool:
        place = self.path / file.path
        try:
            if place.is_file() and place.stat().st_size == file.bytes and sha256(place) == file.sha256:
                return True
            state = "damaged" if place.is_file() else "missing"
        except OSError as error:  # such as a bad sector
            state = f"damaged ({error.strerror})"
        rows = f", rows {file.rows[0]} to {file.rows[1] - 1}" if file.rows else ""
        logger.warning("%s is %s: its shard is simulated again%s", place, state, rows)
        return False

    def settled(self, index: int) -> Checkpoint | None:
        """How a checkpoint is simulated, if an earlier run has decided it."""
        return self._settled.get(index)

    def settle(self, index: int, checkpoint: Checkpoint) -> None:
        """Note how a checkpoint is simulated, so that it stays so."""
        self._settled[index] = checkpoint
        settled = [self._settled.get(k) for k in range(max(self._settled) + 1)]
        checkpoints = [asdict(value) if value else None for value in settled]
        text = json.dumps(sealed({"schema": SCHEMA, "request": self.request, "checkpoints": checkpoints}))
        write(self.path / JOURNAL, lambda path: path.write_text(text))

    def snapshot(self, folder: str) -> Path | None:
        """Return the file in which a chunk of sources keeps its state; None where nothing outlives the process."""
        return None if self._temporary else self.path / folder / _SNAPSHOT

    def tensors(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        """Write tensors under `name`, with plain values `about` them."""
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        metadata = {_ABOUT: json.dumps(about or {}, allow_nan=False)}
        checksum = write(self.path / name, lambda path: save(contiguous, path, metadata))
        file = self._file(name, rows, checksum)
        if not self._temporary:  # killed right here, the file is not on the list, and is made again
            append(self.path / FILES, _line(file))
        return file

    def done(
        self, name: str, rows: tuple[int, int] | None, expected: Layout | None, read: Callable[[Value], Result]
    ) -> tuple[File, Result] | None:
        """A file of tensors that an earlier run has written, and what `read` makes of what it is about.

        One that does not hold what a simulation writes there is not done, nor is the shard it belongs to.

        expected: its tensors; None where they are not known beforehand, but for their number of rows.
        """
        file, place = self._files.get(name), self.path / name
        if file is None or file.rows != rows:
            return None
        try:
            with safe_open(place, framework="pt") as tensors:
                about = parsed((tensors.metadata() or {}).get(_ABOUT, "").encode(), place)
                if different := _misfit(tensors, rows) if expected is None else misfit(tensors, expected):
                    about.fail(different)
            return file, read(about)
        except (OSError, SafetensorError, MemoryError, StoreError) as error:
            logger.warning("%s is not what a simulation leaves there, and is made again: %s", place, first_line(error))
        self._files = {path: each for path, each in self._files.items() if _shard(each) != _shard(file)}
        return None

    def read(self, name: str, device: torch.device) -> Parameters:
        """The tensors of a file that was written."""
        try:
            return load_file(self.path / name, str(device))
        except (OSError, SafetensorError, MemoryError) as error:
            raise StoreError(f"{self.path / name} cannot be read: {error}.") from error

    def sources(self, sources: Sources) -> File:
        """Write the table of sources."""
        table = json.dumps({"ids": sources.ids, "names": sources.names, "sizes": sources.sizes})
        parsed(table.encode(), self.path / SOURCES)  # what could not be read again is not written
        write(self.path / SOURCES, lambda path: path.write_text(table))
        return self._file(SOURCES)

    def probes(self, batch: Batch, seen: Seen) -> Probes | None:
        """Write the probe examples; None where they are more than tensors and plain values."""
        try:
            structure, tensors = flattened(batch)
            parsed(json.dumps(structure).encode(), self.path)  # values that JSON does not keep, such as infinity
        except (DataError, StoreError) as error:
            logger.info("the store keeps no probe examples: %s", error)
            return None
        file = self.tensors("probes.safetensors", tensors)
        return Probes(file, structure, seen.losses, seen.moved, seen.precision)

    def finish(self, manifest: Manifest) -> Store:
        """Write the manifest, and open what is now a store."""
        place = self.path / MANIFEST
        try:
            text = json.dumps(manifest.to_json(), indent=1)
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"could not write {place} as JSON: {error}. Is the note made of plain values?") from error
        Manifest.from_json(parsed(text.encode(), place))  # what could not be read again is not written
        write(place, lambda path: path.write_text(text))
        self.close()
        store = Store(self.path)
        if self._temporary:  # a temporary folder lives as long as its store
            weakref.finalize(store, _remove, self.path, os.getpid())
        return store

    def close(self) -> None:
        """The store is complete: what served its making goes."""
        clear_leftovers(self.path)
        for file in self._scaffolding():
            with contextlib.suppress(OSError):  # it does no harm where it is
                file.unlink()
        self._lock.release()

    def _tidy_up(self) -> None:
        """Remove what a run has left that was killed when the store was already complete."""
        if leftovers(self.path) or any(file.exists() for file in (*self._scaffolding(), self.path / LOCK)):
            with contextlib.suppress(StoreError):  # the folder is read-only, or another process is tidying it up
                self._lock = Lock(self.path)
                self.close()

    def _scaffolding(self) -> list[Path]:
        """The files that serve the making of a store, in its own folders."""
        folders = [path for path in self.path.glob(_CHECKPOINTS) if not path.is_symlink()]
        return [*(path / _SNAPSHOT for path in folders), self.path / JOURNAL, self.path / FILES]

    def stop(self, interrupted: bool = False) -> bool:
        """Leave the folder after an error: whether it holds work to go on with; if not, it is as it was before.

        Of a run that was interrupted even the choice of steps is kept: it may have taken long.
        """
        work = any(self.path.rglob("*.safetensors")) or (interrupted and bool(self._settled))
        worth = not self._temporary and work
        if worth:
            self._lock.release()
            return True
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        with contextlib.suppress(OSError):  # what others have put there stays
            for folder in self.path.glob(_CHECKPOINTS):
                folder.rmdir()
            if not self._found:
                self.path.rmdir()
        return False

    def _file(self, name: str, rows: tuple[int, int] | None = None, checksum: str | None = None) -> File:
        place = self.path / name
        try:
            return File(name, checksum or sha256(place), place.stat().st_size, rows)
        except OSError as error:
            raise StoreError(f"{place} was written, but cannot be read: {error.strerror}.") from error


def _before_the_journal(path: Path) -> bool:
    """Whether a run may leave this that is killed before it has a journal."""
    return path.name == LOCK or is_leftover(path)


def _remove(folder: Path, process: int) -> None:
    """Remove a temporary store, unless this is a child that was forked from the process it belongs to."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def _line(file: File) -> str:
    """A line of the list of finished files; it begins with its own checksum."""
    text = json.dumps(asdict(file))
    return f"{_checksum(text.encode())} {text}\n"


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _listed(place: Path) -> Iterator[File]:
    """The finished files on a list. Its last line may be cut short: that file is not done."""
    try:
        refuse_unreadable(place)
        *lines, _ = place.read_bytes().split(b"\n")
    except FileNotFoundError:  # it comes with the first file
        return
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        checksum, _, text = line.partition(b" ")
        if checksum == _checksum(text).encode():
            yield read(File, parsed(text, place))
        elif number < len(lines):
            raise StoreError(f"{place} is damaged in line {number}: delete it to have the finished shards made again.")


def _misfit(tensors: Any, rows: tuple[int, int] | None) -> str | None:
    """Which tensor of an opened file has not as many rows as there are sources in it, in words."""
    count = rows[1] - rows[0] if rows else None
    for name in tensors.keys():  # noqa: SIM118
        if count is not None and tensors.get_slice(name).get_shape()[:1] != [count]:
            return f"tensor {name!r} has not {count} rows"
    return None


def _shard(file: File) -> tuple[str, int]:
    """Which shard a file belongs to: its folder and its first row. The base is made with the first shard."""
    return str(Path(file.path).parent), file.rows[0] if file.rows else 0


def compared_data(before: dict[str, Any], now: dict[str, Any]) -> Likeness:
    """Whether two requests are of the same training data."""
    return compare_data(before["data"], now["data"], now["n"])


def difference(before: dict[str, Any], now: dict[str, Any], see: See) -> str | None:
    """What two requests differ in first, in words. The plan may be chosen from all that stands before it.

    see: evaluates the task of now on the examples that were probes before.
    """
    if different := _other_field("the selected parameters'", before["parameters"], now["parameters"]):
        return different
    if before["n"] != now["n"]:
        return f"the training data had {before['n']} examples, has {now['n']}"
    if len(before["states"]) != len(now["states"]):
        return f"there were {len(before['states'])} checkpoints, are {len(now['states'])}"
    for index, (was, value) in enumerate(zip(before["states"], now["states"], strict=True)):
        if was != value:
            return f"the weights of checkpoint {index} changed"
    if before["fixed"] != now["fixed"]:
        return "the frozen parameters that the model shares with all checkpoints changed"
    for index, (was, value) in enumerate(zip(before["moments"], now["moments"], strict=True)):
        if was != value:
            return f"the second moments of checkpoint {index} changed"
    if before["sources"] != now["sources"]:
        return "the sources changed (their ids, names or members)"
    if not (data := compared_data(before, now)).same:
        return f"the training data changed{data.remark}"
    if different := _other_field("the plan's", before["plan"], now["plan"]):
        return different
    if before["dtype"] != now["dtype"]:
        return f"imprints were kept as {before['dtype']}, now as {now['dtype']}"
    return _other_task(before, now, see)


def _other_task(before: dict[str, Any], now: dict[str, Any], see: See) -> str | None:
    """How the task differs that two requests are of: by its modules, its loss, its outputs and its regulariser."""
    drawn = bool(now["plan"].get("dropout"))
    if different := other_settings(before["modules"] or {}, now["modules"] or {}, dropout=drawn):
        return different
    steady = compared_data(before, now).by != "none"  # losses of data that reads differently each time tell nothing
    if steady and (different := _other_loss(before, see)):
        return different
    if before["regulariser"] is not None:  # stores of the first schema do not tell
        for earlier, pull in zip_longest(before["regulariser"], now["regulariser"], fillvalue=math.inf):
            if not abs(earlier - pull) <= 1e-3 * max(abs(earlier), abs(pull)):
                return f"the regulariser changed: its value was {earlier:.4g} where it is {pull:.4g}"
    return None


def _other_loss(before: dict[str, Any], see: See) -> str | None:
    """How losses or outputs differ from those in a request, on its probes."""
    known = before["probes"] or {"examples": spread_examples(before["n"]).tolist(), "moved": [], "precision": SINGLE}
    if len(before["losses"]) != len(known["examples"]):
        return f"losses were kept of {len(before['losses'])} probe examples, now of {len(known['examples'])}"
    was = Seen(before["losses"], known["moved"], known.get("outputs"), known["precision"], known.get("gradients", []))
    value = see(known["examples"])
    if different := other_loss(was, value):
        return f"{different}: the loss function changed"
    if different := other_outputs(was, value):
        return f"{different}: outputs changed, which the curvature is computed from"
    if different := other_gradients(was, value):
        return f"{different}, though its values are the same: what it detaches changed"
    return None


def _other_field(what: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{what} {name} was {before.get(name)}, is {now.get(name)}"
    return None
