"""Writes a store so that it can be killed at any moment and continued.

While a simulation runs, its folder holds a journal: what was asked for, and how each checkpoint is simulated. Tensors
come as complete files or not at all, so what is there is done; the manifest comes last and makes the folder a store.
"""

import json
import logging
import os
import shutil
import tempfile
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from imprint.data import flattened
from imprint.errors import DataError, StoreError
from imprint.files import Lock, sha256, write
from imprint.fingerprint import changed_loss
from imprint.simulation.snapshot import Snapshot
from imprint.sources import Sources
from imprint.store import JOURNAL, SCHEMA, Checkpoint, File, Manifest, Probes, Store, checkpoint_from_json, read_json
from imprint.task import Batch, Parameters

logger = logging.getLogger(__name__)


class Writer:
    """The folder of a store in the making.

    request: everything the result depends on, as JSON. A folder that holds another request is refused, and the first
        difference named; one that holds the same is continued, or returned by `finished` if it is complete.
    """

    def __init__(self, out: str | os.PathLike[str] | None, request: dict[str, Any]) -> None:
        self._temporary = out is None
        self._request: dict[str, Any] = json.loads(json.dumps(request))
        self.path = Path(tempfile.mkdtemp(prefix="imprint-") if out is None else out)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file: give a folder for the store.")
        self._found = self.path.exists() and not self._temporary
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"could not make the folder {self.path}: {error}") from error
        self._lock = Lock(self.path)
        try:
            self.finished = self._open_finished()
            self._settled = {} if self.finished else self._open_journal()
        except BaseException:
            self._lock.release()
            raise

    def _open_finished(self) -> Store | None:
        if not (self.path / "manifest.json").exists():
            return None
        store = Store(self.path)
        if difference := _difference(store.manifest.fingerprints, self._request):
            raise StoreError(f"{self.path} already holds a store, made otherwise: {difference}. Give another folder.")
        logger.info("%s already holds this store", self.path)
        self.close()
        return store

    def _open_journal(self) -> dict[int, Checkpoint]:
        journal = self.path / JOURNAL
        if not journal.exists():
            if any(file.name != ".lock" for file in self.path.iterdir()):
                raise StoreError(f"{self.path} is not empty and holds no store: give a new folder.")
            return {}
        values = read_json(journal)
        if values.get("schema") != SCHEMA:
            raise StoreError(f"{self.path} was begun by another version of imprint: finish it there, or delete it.")
        if difference := _difference(values["request"], self._request):
            raise StoreError(
                f"{self.path} holds an unfinished simulation of something else: {difference}. Give another folder, or "
                "delete it."
            )
        for leftover in self.path.rglob(".*.tmp"):
            leftover.unlink()
        logger.info("going on with the simulation in %s", self.path)
        return {int(k): checkpoint_from_json(value) for k, value in values["checkpoints"].items()}

    def settled(self, index: int) -> Checkpoint | None:
        """How a checkpoint is simulated, if an earlier run has decided it."""
        return self._settled.get(index)

    def settle(self, index: int, checkpoint: Checkpoint) -> None:
        """Note how a checkpoint is simulated, so that it stays so."""
        self._settled[index] = checkpoint
        settled = {str(k): asdict(value) for k, value in self._settled.items()}
        text = json.dumps({"schema": SCHEMA, "request": self._request, "checkpoints": settled}, allow_nan=False)
        write(self.path / JOURNAL, lambda path: path.write_text(text))

    def snapshot(self, folder: str, start: int) -> Snapshot | None:
        """Where the chunk of sources from `start` on keeps its state."""
        return None if self._temporary else Snapshot(self.path / folder / "snapshot.safetensors", start)

    def tensors(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        """Write tensors under `name`, with plain values `about` them."""
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        metadata = {"imprint": json.dumps(about or {}, allow_nan=False)}
        write(self.path / name, lambda path: save_file(contiguous, path, metadata))
        return self._file(name, rows)

    def done(self, name: str, rows: tuple[int, int] | None = None) -> tuple[File, dict[str, Any]] | None:
        """A file of tensors that an earlier run has written, and what it is about."""
        place = self.path / name
        if not place.is_file():
            return None
        try:
            with safe_open(place, framework="pt") as file:
                about: dict[str, Any] = json.loads(file.metadata()["imprint"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{place} is damaged: {error}. Delete it to have it made again.") from error
        return self._file(name, rows), about

    def sources(self, sources: Sources) -> File:
        """Write the table of sources."""
        table = json.dumps({"ids": sources.ids, "names": sources.names, "sizes": sources.sizes})
        write(self.path / "sources.json", lambda path: path.write_text(table))
        return self._file("sources.json")

    def probes(self, batch: Batch, losses: list[float]) -> Probes | None:
        """Write the probe examples; None where they are more than tensors and plain values."""
        try:
            structure, tensors = flattened(batch)
        except DataError as error:
            logger.info("the store keeps no probe examples: %s", error)
            return None
        return Probes(self.tensors("probes.safetensors", tensors), structure, losses)

    def finish(self, manifest: Manifest) -> Store:
        """Write the manifest, and open what is now a store."""
        text = json.dumps(manifest.to_json(), indent=1, allow_nan=False)
        write(self.path / "manifest.json", lambda path: path.write_text(text))
        self.close()
        store = Store(self.path)
        if self._temporary:  # a temporary folder lives as long as its store
            weakref.finalize(store, shutil.rmtree, self.path, ignore_errors=True)
        return store

    def close(self) -> None:
        """The store is complete: what served its making goes."""
        for leftover in (*self.path.rglob(".*.tmp"), *self.path.rglob("snapshot.safetensors"), self.path / JOURNAL):
            leftover.unlink(missing_ok=True)
        self._lock.release()

    def stop(self) -> bool:
        """Leave the folder after an error: whether it holds work to go on with; if not, it is as it was before."""
        worth = not self._temporary and any(self.path.rglob("*.safetensors"))
        self._lock.release()
        if not worth:
            shutil.rmtree(self.path, ignore_errors=True)
            if self._found:
                self.path.mkdir(exist_ok=True)
        return worth

    def _file(self, name: str, rows: tuple[int, int] | None = None) -> File:
        place = self.path / name
        return File(name, sha256(place), place.stat().st_size, rows)


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """What two requests differ in first, in words."""
    for key, what in (("plan", "the plan's"), ("parameters", "the selected parameters'")):
        for name in {**before[key], **now[key]}:
            was, value = before[key].get(name), now[key].get(name)
            if was != value:
                return f"{what} {name} was {was}, is {value}"
    if before["n"] != now["n"]:
        return f"the training data had {before['n']} examples, has {now['n']}"
    if before["dtype"] != now["dtype"]:
        return f"imprints were kept as {before['dtype']}, now as {now['dtype']}"
    if len(before["states"]) != len(now["states"]):
        return f"there were {len(before['states'])} checkpoints, are {len(now['states'])}"
    for index, (was, value) in enumerate(zip(before["states"], now["states"], strict=True)):
        if was != value:
            return f"the weights of checkpoint {index} changed"
    if before["sources"] != now["sources"]:
        return "the sources changed (their ids, names or members)"
    if before["data"] != now["data"]:
        return "the training data changed"
    if difference := changed_loss(before["losses"], now["losses"]):
        return f"{difference}: the loss function changed"
    return None
