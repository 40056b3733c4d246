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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from imprint.data import flattened
from imprint.errors import DataError, StoreError
from imprint.files import LOCK, Lock, append, leftovers, sha256, write
from imprint.fingerprint import changed_loss
from imprint.manifest import (
    MANIFEST,
    SCHEMA,
    SOURCES,
    Checkpoint,
    File,
    Manifest,
    Probes,
    check_request,
)
from imprint.simulation.snapshot import Snapshot
from imprint.sources import Sources
from imprint.store import JOURNAL, Store
from imprint.task import Batch, Parameters
from imprint.tensorfile import save
from imprint.values import parsed, read_json, sealed

logger = logging.getLogger(__name__)

FILES = "unfinished.files"
_SNAPSHOT = "snapshot.safetensors"
_BEFORE_THE_JOURNAL = {LOCK, f".{JOURNAL}.tmp"}  # what a run may leave that is killed before it has a journal


class Writer:
    """The folder of a store in the making.

    request: everything the result depends on, as JSON. A folder that holds another request is refused, and the first
        difference named; one that holds the same is continued, or returned by `finished` if it is complete.
    """

    def __init__(self, out: str | os.PathLike[str] | None, request: dict[str, Any]) -> None:
        self._temporary = out is None
        written = parsed(json.dumps(request, allow_nan=False).encode(), Path(JOURNAL))
        self._request: dict[str, Any] = written.content
        self._settled: dict[int, Checkpoint] = {}
        self._files: dict[str, File] = {}
        self.path = Path(tempfile.mkdtemp(prefix="imprint-") if out is None else out)
        self.finished = self._open_folder()
        if self.finished:
            self._tidy_up()
            return
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
            if self._found and not begun and any(file.name not in _BEFORE_THE_JOURNAL for file in self.path.iterdir()):
                raise StoreError(f"{self.path} is not empty and holds no store: give a new folder.")
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            raise StoreError(f"could not make the folder {self.path}: {error}.") from error
        return None

    def _open_finished(self) -> Store | None:
        if not (self.path / MANIFEST).exists():
            return None
        store = Store(self.path)
        before, fixed = store.manifest.request, self._request["fixed"]
        if before["fixed"].items() <= fixed.items():  # what else is fixed it keeps, as stores of earlier schemas do
            before["fixed"] = fixed
        if different := difference(before, self._request):
            raise StoreError(f"{self.path} already holds a store, made otherwise: {different}. Give another folder.")
        logger.info("%s already holds this store", self.path)
        return store

    def _open_journal(self) -> None:
        """Go on with what an earlier run of the same request has left."""
        try:
            request = self._read_journal()
        except StoreError as error:
            raise StoreError(f"{error} Delete {self.path} to begin anew.") from error
        if different := difference(request, self._request):
            raise StoreError(
                f"{self.path} holds an unfinished simulation of something else: {different}. Give another folder, or "
                "delete it."
            )
        for leftover in leftovers(self.path):
            leftover.unlink()
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
                self._settled[index] = Checkpoint.from_json(checkpoint)
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
            if sha256(place) == file.sha256:
                return True
            state = "damaged"
        except FileNotFoundError:
            state = "missing"
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
        text = json.dumps(sealed({"schema": SCHEMA, "request": self._request, "checkpoints": checkpoints}))
        write(self.path / JOURNAL, lambda path: path.write_text(text))

    def snapshot(self, folder: str, start: int) -> Snapshot | None:
        """Where the chunk of sources from `start` on keeps its state."""
        return None if self._temporary else Snapshot(self.path / folder / _SNAPSHOT, start)

    def tensors(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        """Write tensors under `name`, with plain values `about` them."""
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        metadata = {"imprint": json.dumps(about or {}, allow_nan=False)}
        checksum = write(self.path / name, lambda path: save(contiguous, path, metadata))
        file = self._file(name, rows, checksum)
        if not self._temporary:  # killed right here, the file is not on the list, and is made again
            append(self.path / FILES, _line(file))
        return file

    def done(self, name: str, rows: tuple[int, int] | None = None) -> tuple[File, dict[str, Any]] | None:
        """A file of tensors that an earlier run has written, and what it is about."""
        file = self._files.get(name)
        if file is None or file.rows != rows:
            return None
        try:
            with safe_open(self.path / name, framework="pt") as tensors:
                about: dict[str, Any] = json.loads(tensors.metadata()["imprint"])
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{self.path / name} cannot be read: {error}.") from error
        return file, about

    def read(self, name: str, device: torch.device) -> Parameters:
        """The tensors of a file that was written."""
        try:
            return load_file(self.path / name, str(device))
        except (OSError, SafetensorError) as error:
            raise StoreError(f"{self.path / name} cannot be read: {error}.") from error

    def sources(self, sources: Sources) -> File:
        """Write the table of sources."""
        table = json.dumps({"ids": sources.ids, "names": sources.names, "sizes": sources.sizes})
        parsed(table.encode(), self.path / SOURCES)  # what could not be read again is not written
        write(self.path / SOURCES, lambda path: path.write_text(table))
        return self._file(SOURCES)

    def probes(self, batch: Batch, losses: list[float]) -> Probes | None:
        """Write the probe examples; None where they are more than tensors and plain values."""
        try:
            structure, tensors = flattened(batch)
            parsed(json.dumps(structure).encode(), self.path)  # values that JSON does not keep, such as infinity
        except (DataError, StoreError) as error:
            logger.info("the store keeps no probe examples: %s", error)
            return None
        return Probes(self.tensors("probes.safetensors", tensors), structure, losses)

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
            weakref.finalize(store, shutil.rmtree, self.path, ignore_errors=True)
        return store

    def close(self) -> None:
        """The store is complete: what served its making goes."""
        for file in self._scaffolding():
            with contextlib.suppress(OSError):  # it does no harm where it is
                file.unlink()
        self._lock.release()

    def _tidy_up(self) -> None:
        """Remove what a run has left that was killed when the store was already complete."""
        if any(file.exists() for file in (*self._scaffolding(), self.path / LOCK)):
            with contextlib.suppress(StoreError):  # the folder is read-only, or another process is tidying it up
                self._lock = Lock(self.path)
                self.close()

    def _scaffolding(self) -> list[Path]:
        return [*leftovers(self.path), *self.path.rglob(_SNAPSHOT), self.path / JOURNAL, self.path / FILES]

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
            for folder in self.path.glob("checkpoint-*"):
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


def _line(file: File) -> str:
    """A line of the list of finished files; it begins with its own checksum."""
    text = json.dumps(asdict(file))
    return f"{_checksum(text.encode())} {text}\n"


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _listed(place: Path) -> Iterator[File]:
    """The finished files on a list. Its last line may be cut short: that file is not done."""
    try:
        *lines, _ = place.read_bytes().split(b"\n")
    except FileNotFoundError:  # it comes with the first file
        return
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        checksum, _, text = line.partition(b" ")
        if checksum == _checksum(text).encode():
            yield File.from_json(parsed(text, place))
        elif number < len(lines):
            raise StoreError(f"{place} is damaged in line {number}: delete it to have the finished shards made again.")


def _shard(file: File) -> tuple[str, int]:
    """Which shard a file belongs to: its folder and its first row. The base is made with the first shard."""
    return str(Path(file.path).parent), file.rows[0] if file.rows else 0


def difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What two requests differ in first, in words. The plan may be chosen from all that stands before it."""
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
    if before["data"] != now["data"]:
        return "the training data changed"
    if different := _other_field("the plan's", before["plan"], now["plan"]):
        return different
    if before["dtype"] != now["dtype"]:
        return f"imprints were kept as {before['dtype']}, now as {now['dtype']}"
    if len(before["losses"]) != len(now["losses"]):
        return f"losses were kept of {len(before['losses'])} probe examples, now of {len(now['losses'])}"
    if different := changed_loss(before["losses"], now["losses"]):
        return f"{different}: the loss function changed"
    if before["regulariser"] is not None:  # stores of the first schema do not tell
        for was, value in zip_longest(before["regulariser"], now["regulariser"], fillvalue=math.inf):
            if not abs(was - value) <= 1e-3 * max(abs(was), abs(value)):
                return f"the regulariser changed: its value was {was:.4g} where it is {value:.4g}"
    return None


def _other_field(what: str, before: dict[str, Any], now: dict[str, Any]) -> str | None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{what} {name} was {before.get(name)}, is {now.get(name)}"
    return None
