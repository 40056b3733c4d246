"""The store: a folder with the imprints of all sources at all checkpoints, and what is needed to trust them.

Only safetensors and JSON. `writing` writes it, file by file, the manifest last: a folder with a manifest is a complete
store. Everything after the simulation reads it through `Store`.
"""

import contextlib
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from imprint.batches import is_columnar, map_tensors
from imprint.errors import StoreError, first_line
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.files import sha256
from imprint.store.fingerprint import of_tensors, sum_of_bits
from imprint.store.manifest import DTYPES, FINGERPRINTS, LONGEST, MANIFEST, SCHEMA, Manifest, Probes
from imprint.store.probing import SPREAD, Seen, other_loss, see, see_losses
from imprint.store.structure import rebuilt
from imprint.store.values import read_json, shown
from imprint.task import Functional, Parameters, Task
from imprint.tensors.rows import Rows, parameters_of

__all__ = [
    "DTYPES",
    "FINGERPRINTS",
    "LONGEST",
    "SCHEMA",
    "Checkpoint",
    "File",
    "Manifest",
    "Probes",
    "Store",
    "coefficients_dtype",
    "describe",
]

JOURNAL = "unfinished.json"
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}

_Seen = tuple[int, int, int, int]
_Layout = dict[str, tuple[list[int], tuple[torch.dtype | None, ...]]]
"""Shapes of tensors by name, and the dtypes they may have, today's first; None for one that parameters do not have."""


def coefficients_dtype(stored: torch.dtype) -> torch.dtype:
    """Of the coefficients beside factors: what both have along a sharp direction cancels, which takes digits."""
    return torch.promote_types(stored, torch.float32)


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
        self._folder = self.path.absolute()  # a relative path holds where it was given, wherever the process goes
        self._root = str(self._folder)
        self._verified: dict[str, _Seen] = {}
        self._recognised: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
        self._known_losses: WeakSet[Task] = WeakSet()  # of these tasks
        if not os.path.lexists(self.path):
            raise StoreError(f"there is no folder {self.path}.")
        if not _is_file(self.path / MANIFEST) and _is_file(self.path / JOURNAL):
            raise StoreError(f"{self.path} holds an unfinished simulation: make the same call again to finish it.")
        if not _is_file(self.path / MANIFEST):
            raise StoreError(f"{self.path} holds no store: there is no manifest.json (was the simulation finished?).")
        self.manifest = Manifest.read(self.path / MANIFEST)
        self.sha256 = _hash_of(self.path / MANIFEST)
        self._read_sources()

    @classmethod
    def of(cls, store: "Store | str | os.PathLike[str]") -> "Store":
        """A store as it is, or the one in a folder."""
        return store if isinstance(store, Store) else cls(store)

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
    def warnings(self) -> tuple[str, ...]:
        """What to know before believing the imprints."""
        return self.manifest.warnings

    @property
    def bytes(self) -> int:
        """The size of all files but the manifest."""
        return sum(file.bytes for file in self.manifest.files())

    def check_task(self, task: Task) -> None:
        """Refuse a task whose parameters are not those of the store, selected or not."""
        self._check_selected(describe(task))
        persistent = task.model.state_dict().keys()
        own = {name: p.shape for name, p in task.model.named_parameters()}
        own |= {name: b.shape for name, b in task.model.named_buffers() if name in persistent}
        self._check_fixed(task)
        expected = {name: shape for name, shape in own.items() if name not in self.manifest.fixed}
        for index, checkpoint in enumerate(self.checkpoints):
            if checkpoint.base is None:
                continue
            with self._opened(checkpoint.base, self._base_layout()) as tensors:
                stored = {name: torch.Size(shape) for name, (shape, _) in _layout(tensors).items()}
            for name in {**expected, **stored}:
                if (mine := expected.get(name)) != (theirs := stored.get(name)):
                    had, has = (f"shape {tuple(s)}" if s is not None else "no such tensor" for s in (theirs, mine))
                    raise StoreError(
                        f"the store was made with another model: at checkpoint {index} it has {had} for {name!r}, the "
                        f"task's model has {has}."
                    )

    def _check_fixed(self, task: Task) -> None:
        """Refuse a model whose parameters that the store does not keep are others.

        Once they are recognised, sums tell whether they have changed.
        """
        own = dict(task.model.named_parameters())
        for name in self.manifest.fixed:
            if name not in own:
                raise StoreError(f"the store was made with another base model: this one has no parameter {name!r}.")
        now = task.own(self.manifest.fixed)
        sums = {name: sum_of_bits(tensor) for name, tensor in now.items()}
        if self._recognised.get(task.model) == sums:
            return
        for name, known in self.manifest.fixed.items():
            if of_tensors({name: now[name]}) != known:
                raise StoreError(
                    f"the store was made with another base model: {name!r} has other values, or another precision, "
                    "than the parameter that was left alone in training."
                )
        self._recognised[task.model] = sums

    def _check_selected(self, theirs: dict[str, dict[str, Any]]) -> None:
        mine = self.manifest.parameters
        if extra := [name for name in theirs if name not in mine]:
            raise StoreError(f"the task selects parameter {extra[0]!r}, of which the store has no imprints.")
        if missing := [name for name in mine if name not in theirs]:
            raise StoreError(f"the store has imprints of parameter {missing[0]!r}, which the task does not select.")
        if changed := [name for name in mine if mine[name] != theirs[name]]:
            was, now = (f"{tuple(p['shape'])} of {p['dtype']}" for p in (mine[changed[0]], theirs[changed[0]]))
            raise StoreError(f"parameter {changed[0]!r} was {was} in the store, the task's is {now}.")

    def check_loss(self, functional: Functional, theta: Parameters) -> None:
        """Refuse a task whose loss on the probe examples, at and around the first base, is not what it was.

        All of them are looked at once for each task; after that the first few, at the base alone.
        """
        probes = self.manifest.probes
        if probes is None:
            return
        task, before, count = functional.task, probes.seen, len(probes.losses)
        with self._opened(probes.file) as tensors:
            batch = rebuilt(probes.structure, lambda name: tensors.get_tensor(name).to(task.device))
        known = task in self._known_losses and bool(before.moved)  # which says how exactly losses can be compared
        if known and is_columnar(batch, count):
            count = min(SPREAD, count)
            batch = map_tensors(lambda t: t[:count], batch)
        try:
            with task.evaluating():
                if known:
                    now = Seen(see_losses(functional, theta, batch, count), [], None, before.precision)
                else:
                    now = see(functional, theta, batch, count)
        except Exception as error:
            raise StoreError(
                f"the loss function fails on the store's probe examples ({first_line(error)}): it is not the one the "
                "store was made with."
            ) from error
        if difference := other_loss(replace(before, losses=before.losses[:count]), now):
            raise StoreError(f"{difference}: the loss function changed since the store was made.")
        self._known_losses.add(task)

    def base(self, checkpoint: int, device: torch.device) -> Parameters:
        """Parameters and buffers at the read-out point of a checkpoint, without those that training leaves alone."""
        file = self.checkpoints[checkpoint].base
        assert file is not None
        with self._opened(file, self._base_layout()) as tensors:
            return {name: tensors.get_tensor(name).to(device) for name in tensors.keys()}  # noqa: SIM118

    def state(self, checkpoint: int, task: Task) -> Parameters:
        """Every parameter and buffer at the read-out point of a checkpoint."""
        return {**task.own(self.manifest.fixed), **self.base(checkpoint, task.device)}

    def imprints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """u_b of the sources from `start` up to `stop`, in the precision of the parameters."""
        if self.checkpoints[checkpoint].basis is None:
            return self._dense(self.checkpoints[checkpoint].imprints, start, stop, device)
        rows = self.factored(checkpoint, start, stop, self.basis(checkpoint, device), device)
        return rows.multiplied_out({name: torch.empty(0) for name in self.manifest.parameters})

    def midpoints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """(θ⁺ + θ⁻)/2 − base of the sources from `start` up to `stop`."""
        return self._dense(self.checkpoints[checkpoint].midpoints, start, stop, device)

    def basis(self, checkpoint: int, device: torch.device) -> Parameters:
        """The directions that factored imprints are combinations of, stacked."""
        file = self.checkpoints[checkpoint].basis
        assert file is not None
        with self._opened(file, self._basis_layout(checkpoint)) as tensors:
            parameters = self.manifest.parameters.items()
            return {name: tensors.get_tensor(name).to(device, _dtype(about)) for name, about in parameters}

    def factored(self, checkpoint: int, start: int, stop: int, basis: Parameters, device: torch.device) -> Rows:
        """The imprints of some sources as they are kept, on the `basis` of their checkpoint."""
        about = self.checkpoints[checkpoint]
        dtype = _dtype(next(iter(self.manifest.parameters.values())))
        dtypes = dict.fromkeys(self._factored_layout(checkpoint, 1), dtype)
        return Rows.of(self._pieces(about.imprints, start, stop, device, dtypes), basis)

    def check_unchanged(self, checkpoint: int, start: int, stop: int) -> None:
        """Refuse damage that files have taken since they were read, of a checkpoint and the sources of these rows.

        Tensors are mapped from their files, and may change with them. A file is hashed again only if it looks another.
        """
        about = self.checkpoints[checkpoint]
        rows = (file for files in (about.imprints, about.midpoints) for file in _overlapping(files, start, stop))
        for file in (*(f for f in (about.base, about.basis) if f is not None), *rows):
            if file.path in self._verified and not self._is_unchanged(file):
                self._check(file)

    def verify(self) -> None:
        """Check every file against its checksum, and the tensors in it against the manifest."""
        self._verified.clear()
        for file in self.manifest.files():
            self._check(file)
        for index, checkpoint in enumerate(self.checkpoints):
            if checkpoint.base is not None:
                with self._opened(checkpoint.base, self._base_layout()):
                    pass
            if checkpoint.basis is not None:
                with self._opened(checkpoint.basis, self._basis_layout(index)):
                    pass
            for file in (*checkpoint.imprints, *checkpoint.midpoints):
                with self._opened(file, self._row_layout(file)):
                    pass

    def _read_sources(self) -> None:
        """The table of sources: as many as the shards have rows, each with an id of its own."""
        self._check(self.manifest.sources)
        table = read_json(self.path / self.manifest.sources.path)
        columns = table.record("ids", "names", "sizes")
        ids, names, sizes = columns["ids"].texts(), columns["names"].texts(), columns["sizes"].wholes(1)
        if not 0 < len(ids) == len(names) == len(sizes):
            table.fail(f"it has {len(ids)} ids, {len(names)} names and {len(sizes)} sizes, which must be equally many")
        if len(set(ids)) < len(ids):
            table.fail("two sources have the same id")
        if max(sizes) > self.n:
            table.fail(f"a source has {max(sizes)} examples, more than the training data ({self.n})")
        for checkpoint in self.checkpoints:
            for files in (checkpoint.imprints, checkpoint.midpoints):
                rows = files[-1].rows if files else None
                if rows is not None and rows[1] != len(ids):
                    table.fail(f"it has {len(ids)} sources, but {files[-1].path} ends with row {rows[1] - 1}")
        self.source_ids, self.source_names, self.source_sizes = ids, names, sizes

    def _dense(self, files: tuple[File, ...], start: int, stop: int, device: torch.device) -> Parameters:
        dtypes = {name: _dtype(about) for name, about in self.manifest.parameters.items()}
        return self._pieces(files, start, stop, device, dtypes)

    def _pieces(
        self, files: tuple[File, ...], start: int, stop: int, device: torch.device, dtypes: dict[str, torch.dtype]
    ) -> Parameters:
        """Rows of the tensors in `dtypes`, from all the files that have some."""
        pieces: dict[str, list[torch.Tensor]] = {}
        for file in _overlapping(files, start, stop):
            first, last = file.rows or (0, 0)
            with self._opened(file, self._row_layout(file)) as tensors:
                for name, dtype in dtypes.items():
                    part = tensors.get_slice(name)[max(start, first) - first : min(stop, last) - first]
                    pieces.setdefault(name, []).append(part.to(device, dtype))
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}

    def _row_layout(self, file: File) -> _Layout:
        first, last = file.rows or (0, 0)
        for index, checkpoint in enumerate(self.checkpoints):
            if checkpoint.basis is not None and file in checkpoint.imprints:
                return self._factored_layout(index, last - first)
        return self._stacked_layout(last - first)

    def _stacked_layout(self, rows: int) -> _Layout:
        dtype = (DTYPES[self.manifest.dtype],)
        return {name: ([rows, *about["shape"]], dtype) for name, about in self.manifest.parameters.items()}

    def _basis_layout(self, checkpoint: int) -> _Layout:
        return self._stacked_layout(self.checkpoints[checkpoint].choices.directions or 0)

    def _factored_layout(self, checkpoint: int, rows: int) -> _Layout:
        about, dtype = self.checkpoints[checkpoint], (DTYPES[self.manifest.dtype],)
        layout: _Layout = {"coefficients": ([rows, about.choices.directions or 0], dtype)}
        if self.manifest.plan.form == "projected":
            return layout
        layout["coefficients"] = (layout["coefficients"][0], (coefficients_dtype(*dtype), *dtype))  # once as the rest
        covered = set()
        for layer in about.choices.layers:
            weight = self.manifest.parameters.get(parameters_of(layer)[0], {"shape": []})["shape"]
            if len(weight) != 2:
                raise StoreError(f"{self.path} is damaged: {layer!r} is no linear layer of its parameters.")
            layout[f"inputs/{layer}"], layout[f"outputs/{layer}"] = (
                ([rows, weight[1]], dtype),
                ([rows, weight[0]], dtype),
            )
            covered |= set(parameters_of(layer))
        rest = {name: shape for name, (shape, _) in self._stacked_layout(rows).items() if name not in covered}
        return {**layout, **{f"dense/{name}": (shape, dtype) for name, shape in rest.items()}}

    def _base_layout(self) -> _Layout:
        return {name: (about["shape"], (_dtype(about),)) for name, about in self.manifest.parameters.items()}

    def _check(self, file: File) -> None:
        place = self._folder / file.path
        try:
            if file.path in self._verified and self._is_unchanged(file):
                return
            if not place.is_file():
                raise StoreError(f"{place} is missing: the store is damaged{self._which(file)}.")
            if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(self._folder)):
                raise StoreError(f"{place} is a link that leads out of the store{self._which(file)}.")
            seen = _seen(str(place))
            if (size := seen[0]) != file.bytes:
                raise StoreError(
                    f"{place} is damaged: it has {size:,} bytes, {file.bytes:,} were written{self._which(file)}."
                )
            if sha256(place) != file.sha256:
                raise StoreError(f"{place} is damaged: it differs from its checksum{self._which(file)}.")
        except OSError as error:
            raise StoreError(f"{place} cannot be read: {error.strerror or error}{self._which(file)}.") from error
        self._verified[file.path] = seen

    def _is_unchanged(self, file: File) -> bool:
        """Whether a file looks as it did when it was verified; one that is gone does not."""
        try:
            return self._verified[file.path] == _seen(f"{self._root}/{file.path}")
        except OSError:
            return False

    @contextlib.contextmanager
    def _opened(self, file: File, layout: _Layout | None = None) -> Iterator[Any]:
        """A file of tensors, checked; those in `layout` must be there as it says."""
        self._check(file)
        place = self._folder / file.path
        try:
            with safe_open(place, framework="pt") as tensors:
                found = _layout(tensors) if layout else {}
                for name, expected in (layout or {}).items():
                    if not _fits(found.get(name), expected):
                        was = f"{_shown(found[name])}" if name in found else "missing"
                        raise StoreError(
                            f"{place} does not fit the manifest: tensor {name!r} is {was}, not {_shown(expected)}"
                            f"{self._which(file)}."
                        )
                yield tensors
        except (OSError, SafetensorError, MemoryError) as error:
            raise StoreError(f"{place} cannot be read: {first_line(error)}{self._which(file)}.") from error

    def _which(self, file: File) -> str:
        """The sources in a file, in words."""
        if file.rows is None:
            return ""
        first, last = file.rows[0], file.rows[1] - 1
        if first == last:
            return f" (row {first}: source {self._source(first)})"
        return f" (rows {first} to {last}: sources {self._source(first)} to {self._source(last)})"

    def _source(self, row: int) -> str:
        identity, name = self.source_ids[row], self.source_names[row]
        return shown(identity) if name == identity else f"{shown(identity)}, {shown(name)}"


def _seen(place: str) -> _Seen:
    """What tells that a file is still the one that was looked at, without reading it."""
    about = os.stat(place)  # noqa: PTH116  (each query asks: a path would take longer to make than the answer)
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def _hash_of(manifest: Path) -> str:
    """The checksum of a manifest, which has those of all other files in it: that of the store."""
    try:
        return sha256(manifest)
    except OSError as error:
        raise StoreError(f"{manifest} cannot be read: {error.strerror or error}.") from error


def _overlapping(files: tuple[File, ...], start: int, stop: int) -> Iterator[File]:
    """Those of some files, in the order of their rows, that have rows from `start` up to `stop`."""
    for file in files[max(0, bisect_right(files, start, key=_first_row) - 1) :]:
        if _first_row(file) >= stop:
            break
        yield file


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:  # such as a folder that may not be looked into
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error


def _first_row(file: File) -> int:
    return file.rows[0] if file.rows else 0


def _dtype(parameter: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, parameter["dtype"].removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _layout(tensors: Any) -> _Layout:
    slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
    return {name: (piece.get_shape(), (_DTYPES.get(piece.get_dtype()),)) for name, piece in slices.items()}


def _fits(
    found: tuple[list[int], tuple[torch.dtype | None, ...]] | None,
    expected: tuple[list[int], tuple[torch.dtype | None, ...]],
) -> bool:
    return found is not None and found[0] == expected[0] and found[1][0] in expected[1]


def _shown(tensor: tuple[list[int], tuple[torch.dtype | None, ...]]) -> str:
    return f"{tuple(tensor[0])} of {tensor[1][0] or 'another dtype'}"
