"""The store: a folder with the imprints of all sources at all checkpoints, and what is needed to trust them.

Only safetensors and JSON. `writing` writes it, file by file, the manifest last: a folder with a manifest is a complete
store. Everything after the simulation reads it through `Store`.
"""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from imprint.about import About
from imprint.errors import StoreError
from imprint.keys import PublicKey
from imprint.plan import Question
from imprint.store.addresses import is_address
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.compatibility import Compatibility
from imprint.store.describing import read_description, write_description
from imprint.store.folder import PARTS
from imprint.store.layouts import base_layout, basis_layout, imprints_layout, noise_layout
from imprint.store.manifest import JOURNAL, LONGEST, MANIFEST, Manifest
from imprint.store.opening import Files
from imprint.store.remote import Mirror
from imprint.store.signing import Signed, check_signature, warn_changed, warn_unsigned
from imprint.store.table import Table
from imprint.store.uploading import editing
from imprint.store.values import read_hashed
from imprint.task import Functional, Parameters, Task
from imprint.tensors.rows import Rows

_ATTEMPTS = 10  # to open a store that other processes change meanwhile
_BESIDE = ("about.json", "signature.json", "validation.json")
_RECORDING = "recording.json"  # of `imprint.recording`, which lies above this package


class Store:
    """Imprints on disk, opened for reading. Files are checked against their checksums on first use.

    `imprint.simulate` returns one; `Store(path)` opens one made earlier.

    path: its folder, or the address of one in a bucket, such as s3://bucket/news, whose files are downloaded when they
        are needed. `place` is either as it was given, and `path` then the folder on this machine.
    within: the store in whose folder this one lies.
    signed_by: a public key, or its file: a store that its owner has not signed as it is (`imprint sign`) is refused.
    origin: what `simulate` made it from (task, data, sources, run), in the process that did; empty where it was opened.
    table: its sources as the store keeps them, with digests of their members.
    description: what is known of its sources, and what was known of them before; `about` has it in their order.
    """

    signed: Signed | None
    source_ids: tuple[str, ...]
    source_names: tuple[str, ...]
    source_sizes: tuple[int, ...]

    def __init__(
        self, path: str | os.PathLike[str], *, signed_by: PublicKey | None = None, within: "Store | None" = None
    ) -> None:
        self.mirror: Mirror | None = within.mirror if within else Mirror(path).open() if is_address(path) else None
        self.path = self.mirror.folder if self.mirror and not within else Path(path)
        self.place = str(self.mirror.address_of(self.path) if self.mirror else self.path)
        self._refuse_incomplete()
        self.origin: dict[str, Any] = {}
        self._open(signed_by)

    def _refuse_incomplete(self) -> None:
        """Refuse a folder that is no store, or not yet."""
        if not os.path.lexists(self.path):
            raise StoreError(f"there is no folder {self.path}.")
        try:
            complete, begun = ((self.path / name).is_file() for name in (MANIFEST, JOURNAL))
        except OSError as error:  # such as a folder that may not be looked into
            raise StoreError(f"{self.path} cannot be read: {error.strerror or error}.") from error
        if not complete and begun:
            raise StoreError(f"{self.place} holds an unfinished simulation: make the same call again to finish it.")
        if not complete and (self.path / PARTS).is_dir():
            raise StoreError(
                f"{self.path} holds parts of a store that are not merged: imprint.merge({str(self.path)!r}), or "
                f"`imprint merge {self.path}`, makes the store from them."
            )
        if not complete and (self.path / _RECORDING).is_file():
            raise StoreError(
                f"{self.place} is the recording of a training run, not a store: imprint.simulate(..., run=folder), or "
                "`imprint simulate TASK --run FOLDER`, makes a store from it."
            )
        if not complete:
            raise StoreError(f"{self.place} holds no store: there is no manifest.json (was the simulation finished?).")

    @classmethod
    def of(cls, store: "Store | str | os.PathLike[str]") -> "Store":
        """Return a store as it is, or open the one in a folder."""
        return store if isinstance(store, Store) else cls(store)

    def __repr__(self) -> str:
        plan, used = self.manifest.plan, sum(c.weight > 0 for c in self.checkpoints)
        return f"Store({self.place!r}: {len(self)} sources, {used} checkpoints, {plan.engine}, {self.bytes:,} bytes)"

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
    def question(self) -> Question:
        """What scores read from the store answer."""
        return self.manifest.question

    @property
    def removes(self) -> bool:
        """Whether imprints are finite removals, N(θ − θ₋b)."""
        return self.manifest.plan.rules.removes

    @property
    def model_sha256(self) -> str:
        """The checksum of the models that scores are read from: of the base of each checkpoint that counts."""
        bases = [checkpoint.base.sha256 for checkpoint in self.checkpoints if checkpoint.base is not None]
        return hashlib.sha256("".join(bases).encode()).hexdigest()

    @property
    def about(self) -> tuple[About, ...]:
        """What is known of the sources, in their order: owner, licence, address. Empty where no source is described."""
        return self._about

    def is_outdated(self) -> bool:
        """Tell whether the store was changed since it was opened."""
        return self._files.is_outdated()

    def describe(self, about: "Mapping[str, About | Mapping[str, str]]") -> None:
        """Set the owner, licence and address of some sources, by their ids or by names that only one has.

        An empty description removes what was known, and sources that are not named keep theirs. Imprints, validation
        and the checksum of the store stay as they are. A signature covers descriptions: sign the store again.
        """
        with self.editing():
            self._read_description()  # another process may have changed it
            if self.signed is None:
                warn_changed(self.path, self.description_sha256)
            changed = write_description(self.path, self.source_ids, self.source_names, about)
        self.signed = None if changed else self.signed
        self._read_description()
        if changed:
            warn_unsigned(self.path)

    def editing(self, *, replaced: str | None = None) -> "AbstractContextManager[None]":
        """Write to files beside those of the store, in `path`; what changed takes effect in its bucket, if any.

        replaced: a folder of which everything is written again.
        """
        return editing(self.mirror, *_BESIDE, replaced=replaced)

    def bring(self, file: Path) -> None:
        """Have a file that lies beside the store on this machine, if the store is in a bucket and has it."""
        if self.mirror is not None:
            self.mirror.bring_to(file)

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
        self._compatibility.check_task(task)

    def check_loss(self, functional: Functional, theta: Parameters) -> None:
        """Refuse a task whose loss on the probe examples, at and around the first base, is not what it was."""
        self._compatibility.check_loss(functional, theta)

    def base(self, checkpoint: int, device: torch.device) -> Parameters:
        """Load parameters and buffers at the read-out point of a checkpoint, without those training leaves alone."""
        file = self.checkpoints[checkpoint].base
        assert file is not None
        with self._files.open(file, base_layout(self.manifest)) as tensors:
            return {name: tensors.get_tensor(name).to(device) for name in tensors.keys()}  # noqa: SIM118

    def state(self, checkpoint: int, task: Task) -> Parameters:
        """Load every parameter and buffer at the read-out point of a checkpoint."""
        return {**task.own(self.manifest.fixed), **self.base(checkpoint, task.device)}

    def imprints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """Load u_b of the sources from `start` up to `stop`, in the precision of the parameters."""
        if self.checkpoints[checkpoint].basis is not None:
            rows = self.factored(checkpoint, start, stop, self.basis(checkpoint, device), device)
            return rows.multiplied_out({name: torch.empty(0) for name in self._dtypes})
        return self._load_rows(checkpoint, self.checkpoints[checkpoint].imprints, start, stop, device, self._dtypes)

    def midpoints(self, checkpoint: int, start: int, stop: int, device: torch.device) -> Parameters:
        """Load (θ⁺ + θ⁻)/2 − base of the sources from `start` up to `stop`."""
        return self._load_rows(checkpoint, self.checkpoints[checkpoint].midpoints, start, stop, device, self._dtypes)

    def noise(self, checkpoint: int, device: torch.device) -> Parameters | None:
        """Load N(θ − θ') of the runs whose start was perturbed, stacked; None where there are none."""
        file = self.checkpoints[checkpoint].noise
        if file is None:
            return None
        with self._files.open(file, noise_layout(self.manifest, checkpoint)) as tensors:
            return {name: tensors.get_tensor(name).to(device, dtype) for name, dtype in self._dtypes.items()}

    def basis(self, checkpoint: int, device: torch.device) -> Parameters:
        """Load the directions that factored imprints are combinations of, stacked."""
        file = self.checkpoints[checkpoint].basis
        assert file is not None
        with self._files.open(file, basis_layout(self.manifest, checkpoint)) as tensors:
            return {name: tensors.get_tensor(name).to(device, dtype) for name, dtype in self._dtypes.items()}

    def factored(self, checkpoint: int, start: int, stop: int, basis: Parameters, device: torch.device) -> Rows:
        """Load the imprints of some sources as they are kept, on the `basis` of their checkpoint."""
        dtype = next(iter(self._dtypes.values()))
        dtypes = dict.fromkeys(imprints_layout(self.manifest, checkpoint, 1), dtype)
        files = self.checkpoints[checkpoint].imprints
        return Rows.of(self._load_rows(checkpoint, files, start, stop, device, dtypes), basis)

    def check_unchanged(self, checkpoint: int, start: int, stop: int) -> None:
        """Refuse damage that files have taken since they were read, of a checkpoint and the sources of these rows.

        Tensors are mapped from their files, and may change with them.
        """
        about = self.checkpoints[checkpoint]
        rows = (file for files in (about.imprints, about.midpoints) for file in find_overlapping(files, start, stop))
        for file in (*(f for f in (about.base, about.basis, about.noise) if f is not None), *rows):
            self._files.check_again(file)

    def verify(self) -> None:
        """Check every file against its checksum and its tensors against the manifest; in a bucket, every object."""
        if self.mirror:
            files = {file.path: file.sha256 for file in self.manifest.files()}
            self.mirror.verify(self.path, {MANIFEST: self.sha256, **files})
        self._files.forget()
        for file in self.manifest.files():
            self._files.check(file)
        read_description(self.path, self.source_ids, changed=bool(self.manifest.history))
        for index, checkpoint in enumerate(self.checkpoints):
            if checkpoint.base is not None:
                self._files.check_layout(checkpoint.base, base_layout(self.manifest))
            if checkpoint.basis is not None:
                self._files.check_layout(checkpoint.basis, basis_layout(self.manifest, index))
            if checkpoint.noise is not None:
                self._files.check_layout(checkpoint.noise, noise_layout(self.manifest, index))
            for file in (*checkpoint.imprints, *checkpoint.midpoints):
                first, last = file.rows or (0, 0)
                self._files.check_layout(file, imprints_layout(self.manifest, index, last - first))

    def _open(self, signed_by: PublicKey | None) -> None:
        """Read what the store says of itself; begin anew where another process has changed it meanwhile."""
        for _ in range(_ATTEMPTS):
            value, self.sha256 = read_hashed(self.path / MANIFEST, LONGEST)
            fetch = self.mirror.fetch_into(self.path) if self.mirror else None
            self._files = Files(self.path, self.sha256, fetch)
            try:
                self.signed = None if signed_by is None else check_signature(self.path, self.sha256, signed_by)
                self.manifest = Manifest.from_json(value)
                self._compatibility = Compatibility(self.manifest, self._files)
                self._read_sources()
                self._read_description()
                return
            except StoreError:
                if not self._files.is_outdated():
                    raise
        raise StoreError(f"{self.path} is being changed again and again: open it once that is over.")

    def _read_sources(self) -> None:
        """Read the table of sources: as many as the shards have rows, each with an id of its own."""
        self._files.check(self.manifest.sources)
        table, digest = read_hashed(self.path / self.manifest.sources.path)
        if digest != self.manifest.sources.sha256:
            table.fail("it was changed while it was read")
        self.table = Table.read(table, self.n)
        ids, names = self.table.ids, self.table.names
        for checkpoint in self.checkpoints:
            for files in (checkpoint.imprints, checkpoint.midpoints):
                rows = files[-1].rows if files else None
                if rows is not None and rows[1] != len(ids):
                    table.fail(f"it has {len(ids)} sources, but {files[-1].path} ends with row {rows[1] - 1}")
        self.source_ids, self.source_names, self.source_sizes = ids, names, self.table.sizes
        self._files.sources = list(zip(ids, names, strict=True))

    def _read_description(self) -> None:
        """Read what is known of the sources, as it was signed if the store was opened with a key."""
        changed = bool(self.manifest.history)
        self.description, self.description_sha256 = read_description(self.path, self.source_ids, changed=changed)
        self._about = self.description.of(self.source_ids)
        if self.signed is not None:
            self.signed.check_description(self.path, self.description_sha256)

    @property
    def _dtypes(self) -> dict[str, torch.dtype]:
        dtypes = {name: about.torch_dtype for name, about in self.manifest.request.displaced.items()}
        if not self.removes:
            return dtypes
        return {name: torch.promote_types(dtype, torch.float32) for name, dtype in dtypes.items()}  # of differences

    def _load_rows(
        self,
        checkpoint: int,
        files: tuple[File, ...],
        start: int,
        stop: int,
        device: torch.device,
        dtypes: dict[str, torch.dtype],
    ) -> Parameters:
        """Load rows of the tensors in `dtypes`, from all the files that have some."""
        pieces: dict[str, list[torch.Tensor]] = {}
        for file in find_overlapping(files, start, stop):
            first, last = file.rows or (0, 0)
            with self._files.open(file, imprints_layout(self.manifest, checkpoint, last - first)) as tensors:
                for name, dtype in dtypes.items():
                    part = tensors.get_slice(name)[max(start, first) - first : min(stop, last) - first]
                    pieces.setdefault(name, []).append(part.to(device, dtype))
        return {name: torch.cat(parts) if len(parts) > 1 else parts[0] for name, parts in pieces.items()}


def find_overlapping(files: tuple[File, ...], start: int, stop: int) -> Iterator[File]:
    """Go through those of some files, in the order of their rows, that have rows from `start` up to `stop`."""
    for file in files[max(0, bisect_right(files, start, key=_first_row) - 1) :]:
        if _first_row(file) >= stop:
            break
        yield file


def _first_row(file: File) -> int:
    return file.rows[0] if file.rows else 0
