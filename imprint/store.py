"""The store: a folder with the imprints of all sources at all checkpoints, and what is needed to trust them.

Only safetensors and JSON. Every file is written beside its place, synced and renamed; the manifest comes last, so a
folder with a manifest is a complete store. `Writer` is used by the simulation, `Store` by everything after it.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from imprint.errors import StoreError
from imprint.simulation.plan import Plan
from imprint.sources import Sources
from imprint.task import Parameters, Task

SCHEMA = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class File:
    """A file of the store, relative to its folder; `rows` are the sources it holds, where it holds some."""

    path: str
    sha256: str
    bytes: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: how it was simulated, the figures measured on the way, and its files."""

    weight: float
    steps: int
    lr: float
    damping: float
    epsilon: float | None
    figures: dict[str, Any]
    base: File | None = None
    imprints: tuple[File, ...] = ()
    midpoints: tuple[File, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """Everything about a store but its tensors."""

    n: int
    dtype: str
    plan: Plan
    parameters: dict[str, dict[str, Any]]
    sources: File
    checkpoints: tuple[Checkpoint, ...]
    execution: dict[str, Any]
    versions: dict[str, str] = field(default_factory=lambda: _versions())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Manifest":
        schema = values.get("schema")
        if not isinstance(schema, int):
            raise StoreError("the manifest has no schema version.")
        if schema > SCHEMA:
            raise StoreError(f"the store has schema {schema}, this version reads up to {SCHEMA}: upgrade imprint.")
        try:
            fields = {name: value for name, value in values.items() if name != "schema"}
            fields["plan"] = Plan.from_json(fields["plan"])
            fields["sources"] = _file(fields["sources"])
            fields["checkpoints"] = tuple(_checkpoint(value) for value in fields["checkpoints"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the manifest cannot be read: {error}") from error


def _file(values: dict[str, Any]) -> File:
    rows, parts = values.get("rows"), Path(values["path"]).parts
    if not parts or Path(values["path"]).is_absolute() or ".." in parts:
        raise ValueError(f"{values['path']!r} is not inside the store")
    return File(values["path"], values["sha256"], values["bytes"], tuple(rows) if rows is not None else None)


def _checkpoint(values: dict[str, Any]) -> Checkpoint:
    fields = dict(values)
    fields["base"] = _file(fields["base"]) if fields["base"] is not None else None
    for kind in ("imprints", "midpoints"):
        fields[kind] = tuple(_file(value) for value in fields[kind])
    return Checkpoint(**fields)


def describe(task: Task) -> dict[str, dict[str, Any]]:
    """Shapes and dtypes of the selected parameters: what a store must be read with."""
    selected = {name: task.model.get_parameter(name) for name in task.names}
    return {name: {"shape": list(p.shape), "dtype": str(p.dtype)} for name, p in selected.items()}


class Writer:
    """Writes a store, file by file; nothing counts until `finish` has written the manifest."""

    def __init__(self, out: str | os.PathLike[str] | None) -> None:
        self._temporary = out is None
        self.path = Path(tempfile.mkdtemp(prefix="imprint-") if out is None else out)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file: give a folder for the store.")
        if (self.path / "manifest.json").exists():
            raise StoreError(f"{self.path} already holds a store: give another folder, or delete it first.")
        if self.path.exists() and any(self.path.iterdir()):
            raise StoreError(f"{self.path} is not empty: give a new folder for the store.")
        self._found = self.path.exists() and not self._temporary
        self.path.mkdir(parents=True, exist_ok=True)

    def tensors(self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None) -> File:
        """Write tensors under `name`, durably."""
        contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        return self._write(name, lambda path: save_file(contiguous, path), rows)

    def sources(self, sources: Sources) -> File:
        """Write the table of sources."""
        table = {"ids": sources.ids, "names": sources.names, "sizes": sources.sizes}
        return self._write("sources.json", lambda path: path.write_text(json.dumps(table)))

    def finish(self, manifest: Manifest) -> "Store":
        """Write the manifest, and open what is now a store."""
        text = json.dumps(manifest.to_json(), indent=1, allow_nan=False)
        self._write("manifest.json", lambda path: path.write_text(text))
        store = Store(self.path)
        if self._temporary:  # a temporary folder lives as long as its store
            weakref.finalize(store, shutil.rmtree, self.path, ignore_errors=True)
        return store

    def abandon(self) -> None:
        """Remove what was written, after an error."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._found:
            self.path.mkdir(exist_ok=True)

    def _write(self, name: str, write: Callable[[Path], object], rows: tuple[int, int] | None = None) -> File:
        place = self.path / name
        place.parent.mkdir(exist_ok=True)
        beside = place.with_name(f".{place.name}.tmp")
        try:
            write(beside)
            digest, size = _sha256(beside), beside.stat().st_size
            _sync(beside)
            beside.replace(place)
            _sync(place.parent)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)
            raise StoreError(f"could not write {place}: {error}") from error
        return File(name, digest, size, rows)


class Store:
    """Imprints on disk, opened for reading. Files are checked against their checksums on first use.

    `imprint.simulate` returns one; `Store(path)` opens one made earlier.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._verified: set[str] = set()
        manifest = self.path / "manifest.json"
        if not manifest.is_file():
            raise StoreError(f"{self.path} holds no store: there is no manifest.json (was the simulation finished?).")
        self.manifest = Manifest.from_json(_read_json(manifest))
        self._check(self.manifest.sources)
        table = _read_json(self.path / self.manifest.sources.path)
        self.source_ids = tuple(table["ids"])
        self.source_names = tuple(table["names"])
        self.source_sizes = tuple(table["sizes"])

    def __repr__(self) -> str:
        plan, used = self.manifest.plan, sum(c.weight > 0 for c in self.checkpoints)
        return (
            f"Store({str(self.path)!r}: {len(self)} sources, {used} checkpoints, {plan.engine}, {self.bytes:,} bytes)"
        )

    def __len__(self) -> int:
        return len(self.source_ids)

    @property
    def n(self) -> int:
        """N, the number of training examples."""
        return self.manifest.n

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return self.manifest.checkpoints

    @property
    def bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(file.bytes for file in self._files())

    def check_task(self, task: Task) -> None:
        """Refuse a task whose selected parameters are not those of the store."""
        mine, theirs = self.manifest.parameters, describe(task)
        if mine == theirs:
            return
        if extra := [name for name in theirs if name not in mine]:
            raise StoreError(f"the task selects parameter {extra[0]!r}, of which the store has no imprints.")
        if missing := [name for name in mine if name not in theirs]:
            raise StoreError(f"the store has imprints of parameter {missing[0]!r}, which the task does not select.")
        name = next(name for name in mine if mine[name] != theirs[name])
        raise StoreError(
            f"parameter {name!r} was {_shown(mine[name])} in the store, the task's is {_shown(theirs[name])}."
        )

    def base(self, checkpoint: int, device: torch.device) -> Parameters:
        """Every parameter and buffer at the read-out point of a checkpoint."""
        file = self.checkpoints[checkpoint].base
        assert file is not None
        with self._opened(file) as tensors:
            return {name: tensors.get_tensor(name).to(device) for name in tensors.keys()}  # noqa: SIM118

    def imprints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """u_b of the sources from `start` up to `stop`, in the precision of the parameters."""
        return self._rows(self.checkpoints[checkpoint].imprints, start, stop, device)

    def midpoints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """(θ⁺ + θ⁻)/2 − base of the sources from `start` up to `stop`."""
        return self._rows(self.checkpoints[checkpoint].midpoints, start, stop, device)

    def verify(self) -> None:
        """Check every file against its checksum."""
        self._verified.clear()
        for file in self._files():
            self._check(file)

    def _rows(self, files: tuple[File, ...], start: int, stop: int, device: torch.device) -> Parameters:
        pieces: dict[str, list[torch.Tensor]] = {}
        for file in files:
            assert file.rows is not None
            first, last = max(start, file.rows[0]), min(stop, file.rows[1])
            if first >= last:
                continue
            with self._opened(file) as tensors:
                for name in self.manifest.parameters:
                    part = tensors.get_slice(name)[first - file.rows[0] : last - file.rows[0]]
                    pieces.setdefault(name, []).append(part.to(device, self._dtype(name)))
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}

    def _dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, self.manifest.parameters[name]["dtype"].removeprefix("torch."))
        assert isinstance(dtype, torch.dtype)
        return dtype

    def _files(self) -> Iterator[File]:
        yield self.manifest.sources
        for checkpoint in self.checkpoints:
            if checkpoint.base is not None:
                yield checkpoint.base
            yield from checkpoint.imprints
            yield from checkpoint.midpoints

    def _check(self, file: File) -> None:
        if file.path in self._verified:
            return
        place = self.path / file.path
        if not place.is_file():
            raise StoreError(f"{place} is missing: the store is damaged{_which(file)}.")
        if _sha256(place) != file.sha256:
            raise StoreError(f"{place} is damaged: it differs from its checksum{_which(file)}.")
        self._verified.add(file.path)

    @contextlib.contextmanager
    def _opened(self, file: File) -> Iterator[Any]:
        self._check(file)
        with safe_open(self.path / file.path, framework="pt") as tensors:
            yield tensors


def _which(file: File) -> str:
    return f" (sources {file.rows[0]} to {file.rows[1] - 1})" if file.rows else ""


def _shown(parameter: dict[str, Any]) -> str:
    return f"{tuple(parameter['shape'])} of {parameter['dtype']}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise StoreError(f"{path} cannot be read: expected an object, found {type(values).__name__}.")
    return values


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("imprint-attribution", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
