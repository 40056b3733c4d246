"""The record of a recording, `recording.json`: everything about the run but its steps."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from imprint.errors import StoreError
from imprint.recorder import MOMENTS
from imprint.recording.records import Circumstances
from imprint.store.checkpoint import File
from imprint.store.fingerprint import of_each, of_tensors
from imprint.store.folder import write_sealed
from imprint.store.records import Checksum, Count, NotNegative, read
from imprint.store.values import Value, read_json

RECORD = "recording.json"
SCHEMA = 2
_LONGEST = 256 << 20  # bytes: a model with a million frozen parameters has as many
_INCIDENTAL = ("finished", "seconds", "versions")  # which a run that is repeated need not have again


@dataclass(frozen=True)
class Kept:
    """A checkpoint of the run: its files, and after how many steps it was written."""

    step: int
    state: File
    optimiser: File
    moments: File | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """The files of the checkpoint; the state last."""
        return tuple(file for file in (self.moments, self.optimiser, self.state) if file is not None)


@dataclass(frozen=True)
class Conditions:
    """`Circumstances` as the file has them."""

    device: str
    evaluating: tuple[str, ...]
    autocast: str | None
    matmul_precision: str

    @classmethod
    def of(cls, given: Circumstances) -> "Conditions":
        return cls(given.device, tuple(sorted(given.evaluating)), given.autocast, given.matmul_precision)

    def restore(self) -> Circumstances:
        return Circumstances(self.device, frozenset(self.evaluating), self.autocast, self.matmul_precision)


@dataclass(frozen=True)
class Header:
    """What is known of a run.

    n: the number of training examples; `data` holds hashes of them, where the recorder was given the data.
    every: after how many steps a checkpoint was asked for; None where the recorder chose.
    optimiser: the name of its class; `groups` are the parameters that it trains.
    buffers: the persistent buffers.
    frozen: the other parameters, whether the optimiser has them or not, of which only a hash is kept. Recordings of
        earlier versions have those of the optimiser in `groups`.
    frozen_sha256: see `hash_frozen`.
    settings, schedule: of the optimiser's groups and of a scheduler at the latest checkpoint, for resuming.
    """

    schema: int
    finished: bool
    n: Count
    seed: int
    every: Count | None
    optimiser: str
    groups: tuple[tuple[str, ...], ...]
    buffers: tuple[str, ...]
    frozen: tuple[str, ...]
    frozen_sha256: Checksum
    data: dict[str, str | None] | None
    circumstances: Conditions | None = None
    checkpoints: tuple[Kept, ...] = ()
    journal: File | None = None
    settings: tuple[dict[str, Any], ...] = ()
    schedule: dict[str, Any] | None = None
    seconds: NotNegative = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> tuple[str, ...]:
        """The parameters that the optimiser trains."""
        return tuple(name for group in self.groups for name in group)

    @property
    def sha256(self) -> str:
        """Identifies the recording, whenever and how fast it was made."""
        content = {name: value for name, value in asdict(self).items() if name not in _INCIDENTAL}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write the record of a folder; durable once this returns."""
        write_sealed(folder / RECORD, asdict(self))


def hash_frozen(tensors: Mapping[str, Tensor], schema: int = SCHEMA) -> str:
    """Hash the parameters that are not trained: since schema 2 each by itself, so that several are hashed at once."""
    if schema == 1:
        return of_tensors(tensors)
    return hashlib.sha256(json.dumps(of_each(tensors), sort_keys=True).encode()).hexdigest()


def read_header(folder: Path) -> Header:
    """Read the record of a folder, whatever is in it."""
    place = folder / RECORD
    if not place.exists():
        what = "is no recording" if folder.is_dir() else "does not exist"
        raise StoreError(f"{folder} {what}: it has no {RECORD}. Record a run with imprint.RunRecorder(folder, ...).")
    value = read_json(place, _LONGEST).unsealed()
    schema = value.mapping().get("schema", Value(None, place, "schema")).whole(1)
    if schema > SCHEMA:
        raise StoreError(
            f"{folder} was recorded by a later version (schema {schema}, this one reads {SCHEMA}): update."
        )
    header = read(Header, value)
    _check(header, value)
    return header


def _check(header: Header, value: Value) -> None:
    """Refuse a record that contradicts itself."""
    if not header.trained or len(set(header.trained)) < len(header.trained):
        value.fail("a parameter stands in its groups twice, or none does")
    steps = [kept.step for kept in header.checkpoints]
    if steps != sorted(set(steps)) or steps[:1] != [0]:
        value.fail("its checkpoints do not begin at 0, or are not in order")
    if len(header.settings) not in (0, len(header.groups)):
        value.fail("it has settings of other parameter groups")
    for kept in header.checkpoints:
        name = f"checkpoint-{kept.step:06}"
        expected = [f"{name}{MOMENTS}"] * (kept.moments is not None)
        expected += [f"{name}.optimiser.safetensors", f"{name}.safetensors"]
        if [file.path for file in kept.files] != expected:
            value.fail(f"the checkpoint of step {kept.step} is not in its files")
    if header.finished and (header.journal is None or len(steps) < 2 or header.circumstances is None):
        value.fail("it is finished without steps, an end or circumstances")
