"""Writes a part of a store: the imprints of some chunks of sources, in a folder of its own.

What is simulated, and how each checkpoint is, all parts share (`parts`): learning rate, ε, basis, and how many sources
are in a file. The files of a part are those of the store, by the same names; the record of a part is written last.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from imprint.errors import StoreError
from imprint.store.checkpoint import Checkpoint, Decided, File
from imprint.store.comparison import Evaluate, compare_training_data, difference
from imprint.store.draws import Draws, refuse_other_draws
from imprint.store.folder import write_sealed
from imprint.store.manifest import JOURNAL, LONGEST, MANIFEST, SCHEMA, SOURCES, Manifest
from imprint.store.parts import PART, PLAN, REQUEST, Part, PartsFolder, Share, place_file, read_division, refuse_damaged
from imprint.store.records import read
from imprint.store.request import Request
from imprint.store.values import OtherVersionError, Value, advised, parsed, read_json
from imprint.store.workspace import CHECKPOINTS, CheckChoices, Remarks, Workspace
from imprint.store.writing import open_same
from imprint.task import Parameters

SETTLED = "settled.json"
_TRUTH = "truth.json"  # in its place, where the parts are of a ground truth (`imprint.evaluation.parts`)


@dataclass(frozen=True)
class SharedRequest:
    """What the parts in a folder are parts of.

    draws: what the dropout of all parts is drawn with; None for a plan without.
    """

    schema: int
    of: Annotated[int, read_division]
    request: Request
    draws: Draws | None

    @classmethod
    def find(cls, folder: PartsFolder) -> "SharedRequest | None":
        """Read what parts are of; None where no part has come so far."""
        with folder.mending(REQUEST):
            value, place = folder.read(REQUEST, f"{REQUEST}.json"), folder.shared / REQUEST
            if value is not None:
                return read(cls, require_this_version(value))
            if place.exists() and not (place / _TRUTH).exists():
                raise StoreError(f"{place} does not say what the parts are of: {REQUEST}.json is missing.")
        if place.exists():
            raise StoreError(
                f"{folder.path} has parts of a ground truth, which imprint.evaluation.merge_truth merges, or `imprint "
                "merge`. To simulate, give another folder."
            )
        return None


@dataclass(frozen=True)
class SharedCheckpoint:
    """How all parts simulate a checkpoint.

    files: what all sources share, such as a basis; in the same folder.
    remarks: what the engine that settled it has to say (`Engine.remark`).
    """

    schema: int
    checkpoint: Checkpoint
    files: tuple[File, ...]
    remarks: dict[str, str]

    @classmethod
    def find(cls, folder: PartsFolder, index: int) -> "tuple[SharedCheckpoint, Value] | None":
        """Read how a checkpoint is simulated, and where that stands; None where no part has settled it so far."""
        with folder.mending(name_checkpoint(index)):
            value = folder.read(name_checkpoint(index), SETTLED)
            if value is None:
                return None
            inner = require_this_version(value)
            return read(cls, inner), inner.mapping()["checkpoint"]


@dataclass(frozen=True)
class PartRecord:
    """A finished part: a manifest with the files of the part alone."""

    schema: int
    part: Share
    manifest: Manifest

    @classmethod
    def read(cls, folder: Path) -> "PartRecord":
        with advised(f"Delete {folder}, and make the part again."):
            return cls._read(folder)

    @classmethod
    def _read(cls, folder: Path) -> "PartRecord":
        values = require_this_version(read_json(folder / PART, LONGEST)).record(*cls.__dataclass_fields__)
        part = Share.from_json(values["part"])
        if part.folder != folder.name:
            raise StoreError(f"{folder} holds part {part}: folders of parts are not renamed.")
        manifest = values["manifest"].record(*Manifest.__dataclass_fields__)
        return cls(SCHEMA, part, read(Manifest, Value({k: v.content for k, v in manifest.items()}, folder / PART)))

    def write(self, folder: Path) -> None:
        """Write the record, which makes the part complete; refuse one that could not be read again."""
        values = {"schema": self.schema, "part": str(self.part), "manifest": asdict(self.manifest)}
        parsed(json.dumps(values, allow_nan=False).encode(), folder / PART)
        write_sealed(folder / PART, values)


def require_this_version(value: Value) -> Value:
    """Return what a file that parts share holds; refuse one of another version."""
    schema = value.mapping().get("schema")
    if schema is not None and schema.content != SCHEMA:
        raise OtherVersionError(f"{value.file} was written by another version of imprint: use that one for all parts.")
    return value.unsealed()


def name_checkpoint(index: int) -> str:
    """Name the folder of a checkpoint."""
    return f"checkpoint-{index:03}"


def compare_choices(before: Decided, now: Decided) -> str | None:
    """Describe the first difference between two ways to simulate a checkpoint; None if there is none."""
    was, value = asdict(before), asdict(now)
    return next((f"{name} was {was[name]}, is {value[name]}" for name in was if was[name] != value[name]), None)


class PartWriter(Workspace[Part]):
    """The folder of a part that is being written.

    out: the folder that the store will be in once the parts are merged.
    sources: how many there are in all.
    draws: what dropout along the path is drawn with; None for a plan without.
    """

    record = PART
    content = "a part of the store"
    is_whole = False
    keeps_ends = True

    def __init__(
        self,
        out: str | os.PathLike[str],
        share: Share,
        request: Request,
        evaluate: Evaluate,
        check: CheckChoices,
        sources: int,
        draws: Draws | None,
    ) -> None:
        self.folder, self.share, self._sources, self._draws = PartsFolder(out), share, sources, draws
        self._check, self._evaluate = check, evaluate
        self._kept: dict[str, File] = {}  # files without rows of sources, which the part has written or found
        self._sound: set[str] = set()  # shared files that were compared with their checksums
        self._out_found = self.folder.out.exists() and not (self.folder.shared / PLAN).exists()
        if (self.folder.out / MANIFEST).is_file():
            open_same(self.folder.out, request, evaluate)
            self.finished = Part(share, self.folder.out, sources, sources, "source", share.of)
            return
        self.folder.refuse_other_use("the store", JOURNAL)
        self.folder.refuse_other_number(share)
        self.request = self._find_request() or request
        self._compare(self.request, request)
        self._refuse_lost_record(self.folder.of(share))
        super().__init__(self.folder.of(share), self.request, evaluate, check, draws=draws)

    def _refuse_lost_record(self, path: Path) -> None:
        """Refuse a part that says neither that it is finished nor that it is under way."""
        inside = any(path.glob(CHECKPOINTS)) or (path / SOURCES).exists()
        if inside and not (path / PART).exists() and not (path / JOURNAL).exists():
            raise StoreError(f"{path} has lost its record, {PART}: delete {path}, and make the part again.")

    def _find_request(self) -> Request | None:
        """Return what the parts are of, if one has shared it; losses in it may differ from ours in the last digit."""
        shared = SharedRequest.find(self.folder)
        if shared is not None and shared.of != self.share.of:
            raise StoreError(
                f"{self.folder.out} is divided into {shared.of} parts, not {self.share.of}: give one of those."
            )
        if shared is None:
            return None
        otherwise = f"give another folder, or delete {self.folder.path}"
        refuse_other_draws(shared.draws, self._draws, shared.request.n, f"{self.folder.out} holds parts", otherwise)
        return shared.request

    def _compare(self, before: Request, now: Request) -> None:
        """Refuse a request that is not that of the other parts, or of what the part has made before."""
        if before is now:
            return
        if different := difference(before, now, self._evaluate):
            raise StoreError(
                f"{self.folder.out} holds parts of something else: {different}. Give another folder, or delete "
                f"{self.folder.path}."
            )
        compare_training_data(before, now).warn()

    def _open_finished(self) -> Part:
        record = PartRecord.read(self.path)
        self._compare(record.manifest.request, self.request)
        if any(checkpoint.decided for checkpoint in record.manifest.checkpoints):
            if self._draws is not None:  # those of the part, whatever is asked for now
                made = record.manifest.execution
                self._draws = Draws(made.batch_size, torch.device(made.device).type)
            self._share_request()  # where that was lost
        return self._describe(record.manifest)

    def _describe(self, manifest: Manifest) -> Part:
        files = next((checkpoint.imprints for checkpoint in manifest.checkpoints if checkpoint.imprints), ())
        count = sum(file.rows[1] - file.rows[0] for file in files if file.rows)
        finished = self.folder.count_finished(self.share, PART)
        return Part(self.share, self.path, count, self._sources, "source", finished)

    def finish(self, manifest: Manifest) -> Part:
        """Write the record, which makes the part complete."""
        PartRecord(SCHEMA, self.share, manifest).write(self.path)
        self.close()
        return self._describe(manifest)

    def stop(self, interrupted: bool = False) -> bool:
        resumable = super().stop(interrupted)
        if not resumable:
            if not self.folder.find(self.share.of):  # no other part relies on the plan that this one has chosen
                self.folder.withdraw(PLAN)
            self.folder.remove_empty(out=not self._out_found)
        return resumable

    # --- what the parts share

    def chunks(self, count: int) -> range:
        return self.share.of_chunks(count)

    def bound(self, decided: Decided, sources: int) -> Decided:
        """Return choices with files of at most an N-th of the sources, rounded up, where there are N parts."""
        rows = min(decided.rows_per_file, max(1, -(-sources // self.share.of)))
        return replace(decided, rows_per_file=rows, rows_at_once=min(decided.rows_at_once, rows))

    def settled(self, index: int) -> Checkpoint | None:
        """Return how all parts simulate a checkpoint; before any has shared that, how this one began to."""
        own, found = super().settled(index), SharedCheckpoint.find(self.folder, index)
        if found is None:
            return own
        agreed, value = found[0].checkpoint, found[1]
        self._check(agreed, index, self.request, value)
        begun = own is not None and any((self.path / name_checkpoint(index)).glob("imprints-*"))
        if begun and own and (different := compare_choices(own.choices, agreed.choices)):
            raise StoreError(
                f"{self.path} started with other choices than {self.folder.shared / name_checkpoint(index)} records: "
                f"{different}. Delete {self.path}, and make the part again."
            )
        return agreed

    def agree(self, index: int, checkpoint: Checkpoint, remarks: Remarks) -> Checkpoint:
        """Share how a checkpoint is simulated; where another part has been first, return what that has shared."""
        mine = [file for name, file in self._kept.items() if Path(name).parent.name == name_checkpoint(index)]
        found = SharedCheckpoint.find(self.folder, index)
        if found is None or not (self.folder.shared / REQUEST).exists():
            self._share_request()
        if found is None:
            own = {"checkpoint": asdict(checkpoint), "files": [asdict(file) for file in mine], "remarks": {**remarks()}}
            self.folder.publish(name_checkpoint(index), lambda place: self._fill_checkpoint(place, mine, own))
            found = SharedCheckpoint.find(self.folder, index)
            assert found is not None
        shared, own_choices = found[0], super().settled(index)
        if own_choices is None or own_choices.choices != shared.checkpoint.choices:
            self.settle(index, replace(shared.checkpoint, basis=None))
        same = shared.checkpoint.choices == checkpoint.choices and {*mine} <= {*shared.files}
        return checkpoint if same else shared.checkpoint

    def _share_request(self) -> None:
        values = {"schema": SCHEMA, "of": self.share.of, "request": asdict(self.request)}
        values["draws"] = None if self._draws is None else asdict(self._draws)
        if not self.folder.publish(REQUEST, lambda place: write_sealed(place / f"{REQUEST}.json", values)):
            ours, self.request = self.request, self._find_request() or self.request
            self._compare(self.request, ours)

    def _fill_checkpoint(self, place: Path, files: list[File], values: dict[str, Any]) -> None:
        for file in files:
            place_file(self.path / file.path, place / Path(file.path).name, link=True)
        write_sealed(place / SETTLED, {"schema": SCHEMA, **values})

    # --- files without rows of sources: those that are shared, and the part's own

    def tensors(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        file = super().tensors(name, tensors, rows, about)
        if rows is None:
            self._kept[name] = file
        return file

    def _locate(self, name: str, rows: tuple[int, int] | None) -> tuple[Path, File] | None:
        if rows is None and (shared := self._find_shared(name)) is not None:
            return self.folder.shared / name, shared
        found = super()._locate(name, rows)
        if rows is None and found is not None:
            self._kept[name] = found[1]
        return found

    def _place(self, name: str) -> Path:
        return super()._place(name) if self._find_shared(name) is None else self.folder.shared / name

    def _find_shared(self, name: str) -> File | None:
        """Find a file that all parts share; refuse a damaged one."""
        folder = Path(name).parent.name
        index = int(folder.removeprefix("checkpoint-")) if folder else None
        found = None if index is None else SharedCheckpoint.find(self.folder, index)
        file = next((file for file in found[0].files if file.path == name), None) if found else None
        if file is not None and name not in self._sound:
            refuse_damaged(self.folder.shared / name, file, f"delete {self.folder.path}, and make all parts again")
            self._sound.add(name)
        return file
