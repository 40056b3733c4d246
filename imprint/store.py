"""The store: a folder with the imprints of all sources at all checkpoints, and what is needed to trust them.

Only safetensors and JSON. `imprint.writer` writes it, file by file, the manifest last: a folder with a manifest is a
complete store. Everything after the simulation reads it through `Store`.
"""

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from imprint.data import rebuilt
from imprint.errors import StoreError, first_line
from imprint.files import sha256
from imprint.fingerprint import changed_loss
from imprint.simulation.plan import Plan
from imprint.task import Functional, Parameters, Task

SCHEMA = 1
JOURNAL = "unfinished.json"
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
class Probes:
    """A few training examples, as a batch, and their losses at the first checkpoint's read-out point."""

    file: File
    structure: Any
    losses: list[float]


@dataclass(frozen=True)
class Manifest:
    """Everything about a store but its tensors."""

    n: int
    dtype: str
    plan: Plan
    parameters: dict[str, dict[str, Any]]
    fingerprints: dict[str, Any]
    sources: File
    probes: Probes | None
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
            if fields["probes"] is not None:
                fields["probes"] = Probes(**{**fields["probes"], "file": _file(fields["probes"]["file"])})
            fields["checkpoints"] = tuple(checkpoint_from_json(value) for value in fields["checkpoints"])
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"the manifest cannot be read: {error}") from error


def _file(values: dict[str, Any]) -> File:
    rows, parts = values.get("rows"), Path(values["path"]).parts
    if not parts or Path(values["path"]).is_absolute() or ".." in parts:
        raise ValueError(f"{values['path']!r} is not inside the store")
    return File(values["path"], values["sha256"], values["bytes"], tuple(rows) if rows is not None else None)


def checkpoint_from_json(values: dict[str, Any]) -> Checkpoint:
    """A checkpoint as a manifest or a journal describes it."""
    fields = dict(values)
    fields["base"] = _file(fields["base"]) if fields["base"] is not None else None
    for kind in ("imprints", "midpoints"):
        fields[kind] = tuple(_file(value) for value in fields[kind])
    return Checkpoint(**fields)


def describe(task: Task) -> dict[str, dict[str, Any]]:
    """Shapes and dtypes of the selected parameters: what a store must be read with."""
    selected = {name: task.model.get_parameter(name) for name in task.names}
    return {name: {"shape": list(p.shape), "dtype": str(p.dtype)} for name, p in selected.items()}


class Store:
    """Imprints on disk, opened for reading. Files are checked against their checksums on first use.

    `imprint.simulate` returns one; `Store(path)` opens one made earlier.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._verified: set[str] = set()
        manifest = self.path / "manifest.json"
        if not manifest.is_file() and (self.path / JOURNAL).is_file():
            raise StoreError(f"{self.path} holds an unfinished simulation: make the same call again to finish it.")
        if not manifest.is_file():
            raise StoreError(f"{self.path} holds no store: there is no manifest.json (was the simulation finished?).")
        self.manifest = Manifest.from_json(read_json(manifest))
        self._check(self.manifest.sources)
        table = read_json(self.path / self.manifest.sources.path)
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

    def check_loss(self, functional: Functional, theta: Parameters) -> None:
        """Refuse a task whose loss on the probe examples, at the first base, is not what it was."""
        probes = self.manifest.probes
        if probes is None:
            return
        task = functional.task
        with self._opened(probes.file) as tensors:
            batch = rebuilt(probes.structure, lambda name: tensors.get_tensor(name).to(task.device))
        try:
            with torch.no_grad(), task.evaluating():
                now = functional.losses(theta, batch, len(probes.losses)).double().tolist()
        except Exception as error:
            raise StoreError(
                f"the loss function fails on the store's probe examples ({first_line(error)}): it is not the one the "
                "store was made with."
            ) from error
        if difference := changed_loss(probes.losses, now):
            raise StoreError(f"{difference}: the loss function changed since the store was made.")

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
        if self.manifest.probes is not None:
            yield self.manifest.probes.file
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
        if sha256(place) != file.sha256:
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


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise StoreError(f"{path} cannot be read: expected an object, found {type(values).__name__}.")
    return values


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("imprint-attribution", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
