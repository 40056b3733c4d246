"""Merges the parts of a store: compares them, puts their files together, and writes the manifest last.

A process that is killed meanwhile leaves the parts as they were, and a folder that is no store; the same call again
completes it. What follows from all imprints, such as how chaotic a run is, is concluded here.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from imprint.about import About
from imprint.errors import StoreError, first_line
from imprint.runtime.notices import Notices
from imprint.runtime.progress import Advance, Progress
from imprint.simulation import engines
from imprint.simulation.engines import Simulated
from imprint.simulation.figures import summarise
from imprint.simulation.guards import check_weights
from imprint.simulation.taking_over import check_choices
from imprint.simulation.uniting import merge_stores
from imprint.store.checkpoint import Checkpoint, File, ShardFigures, read_figures
from imprint.store.comparison import difference
from imprint.store.describing import describe_new
from imprint.store.layouts import find_misfit, imprints_layout
from imprint.store.manifest import MANIFEST, SOURCES, Manifest, add_costs, find_other_circumstance
from imprint.store.merging import find_finished, find_target, merging_into, refuse_mixture, tidy_up
from imprint.store.part_descriptions import read_shared_descriptions
from imprint.store.part_ends import refuse_other_ends
from imprint.store.part_writing import (
    PartRecord,
    SharedCheckpoint,
    SharedRequest,
    compare_choices,
    name_checkpoint,
)
from imprint.store.parts import (
    PART,
    REQUEST,
    PartsFolder,
    Share,
    is_sound,
    place_file,
    refuse_damaged,
)
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.store.table import Table
from imprint.store.values import parsed, read_json
from imprint.store.workspace import ABOUT, CHECKPOINTS
from imprint.store.writing import write_manifest

logger = logging.getLogger(__name__)
Places = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def merge(parts: Places, out: str | os.PathLike[str] | None = None, *, progress: bool | Advance = True) -> Store:
    """Merge the parts of a simulation into a store, or several stores of one base into a new one.

    parts: the folder given as `out=` to `simulate_part`, or several of them, if the parts were made on machines
        without a common file system. Or stores, by their folders or their addresses in buckets: of the same data,
        checkpoints and plan, simulated alike.
    out: the folder of the store; by default the one folder of the parts.
    progress: True for a line on standard error, False for none, or a function of (done, total), in bytes.

    The parts must be complete and of one simulation, and every file is compared with its checksum. Parts in `out` take
    no further space on file systems with hard links, and are removed once the store is complete; those in other
    folders are copied and stay. The same call again returns the store.

    A source that several stores have comes from the first of them, and so does its description, as a whole: where
    another store says otherwise, a warning names both. Effects of removals are never added: a union of sources is a
    source of its own, see `update`.
    """
    folders, target = find_target(parts, out)
    places = [folder.out for folder in folders]
    if target not in places and all((place / MANIFEST).is_file() for place in places):
        return merge_stores(places, target, progress)
    refuse_mixture(folders, target, MANIFEST)
    with merging_into(folders, target, MANIFEST, "a store") as merged:
        if merged:
            return _return_merged(folders, target)
        finished = find_finished(folders, _count_parts(folders))
        records = {number: (path, PartRecord.read(path)) for number, path in finished.items()}
        merging = _Merging(folders, target, _read_shared(folders), records)
        merging.compare()
        about = merging.read_descriptions()
        manifest = merging.put_together(progress)
        write_manifest(target, manifest)
    store = Store(target)
    describe_new(store, about)
    tidy_up(folders, target)
    return store


def _return_merged(folders: Sequence[PartsFolder], target: Path) -> Store:
    """Return a store that was merged before, and remove what a killed process has left of its parts."""
    store = Store(target)
    for folder in folders:
        shared = SharedRequest.find(folder)
        if shared is not None and (different := _compare_requests(store.manifest.request, shared.request)):
            raise StoreError(
                f"{target} already holds a store, made otherwise than the parts in {folder.path}: {different}. Give "
                "another folder with out=."
            )
    try:
        describe_new(store, read_shared_descriptions(folders, store.source_ids))
    except StoreError as error:  # the store is complete without it
        logger.warning("the sources of %s are not described: %s", target, error)
    tidy_up(folders, target)
    return store


def _compare_requests(before: Request, now: Request) -> str | None:
    return difference(before, now, lambda examples: now.probes.values)


@dataclass(frozen=True)
class _Shared:
    """What all parts share: the request, and how each checkpoint that counts is simulated."""

    folder: PartsFolder
    request: SharedRequest
    checkpoints: dict[int, SharedCheckpoint]


def _read_shared(folders: Sequence[PartsFolder]) -> _Shared:
    """Read what all parts share; refuse folders that differ in it."""
    found = [_read_one_shared(folder) for folder in folders]
    first, *others = found
    for other in others:
        where = f"the parts in {other.folder.path} are not of the same simulation as those in {first.folder.path}"
        if different := _compare_requests(first.request.request, other.request.request):
            raise StoreError(f"{where}: {different}.")
        for index, checkpoint in first.checkpoints.items():
            theirs = other.checkpoints[index]
            different = compare_choices(checkpoint.checkpoint.choices, theirs.checkpoint.choices)
            if different is None and checkpoint.files != theirs.files:
                different = "the basis of the curvature differs"
            if different:
                raise StoreError(
                    f"{where}: at checkpoint {index}, {different}. Copy {first.folder.shared} to every machine before "
                    "its first part begins."
                )
    return first


def _count_parts(folders: Sequence[PartsFolder]) -> int:
    """Return of how many parts the store is made."""
    counts = [_read_request(folder).of for folder in folders]
    if other := next((place for place, count in enumerate(counts) if count != counts[0]), 0):
        raise StoreError(
            f"{folders[0].path} holds parts of {counts[0]}, and {folders[other].path} parts of {counts[other]}: "
            "different divisions cannot be merged."
        )
    return counts[0]


def _read_request(folder: PartsFolder) -> SharedRequest:
    request = SharedRequest.find(folder)
    if request is None and any(any(path.glob(CHECKPOINTS)) for path in folder.begun() if (path / PART).is_file()):
        raise StoreError(f"{folder.shared / REQUEST} is missing: make any part again, which writes it, and merge then.")
    if request is None:
        raise StoreError(
            f"{folder.path} has no part that got far enough to be merged: finish the parts first (`imprint simulate "
            "--part`)."
        )
    return request


def _read_one_shared(folder: PartsFolder) -> _Shared:
    request = _read_request(folder)
    plan, checkpoints = request.request.plan, dict[int, SharedCheckpoint]()
    for index in range(count := len(request.request.states)):
        if plan.at(index, count).weight == 0:
            continue
        found = SharedCheckpoint.find(folder, index)
        if found is None:
            raise StoreError(
                f"{folder.shared / name_checkpoint(index)} is missing: delete {folder.path}, and make the parts again."
            )
        check_choices(found[0].checkpoint, index, request.request, found[1])
        checkpoints[index] = found[0]
    return _Shared(folder, request, checkpoints)


class _Remarks(dict[str, str]):
    """What the engine that settled a checkpoint has remarked, as the parts share it; what is missing is refused."""

    def __init__(self, place: Path, remarks: dict[str, str]) -> None:
        super().__init__(remarks)
        self._place = place

    def __missing__(self, name: str) -> str:
        raise StoreError(
            f"{self._place} lacks the remark {name!r}: delete {self._place.parent.parent}, and make the parts again."
        )


@dataclass(frozen=True)
class _Piece:
    """A file of the store, and where it lies before the parts are merged."""

    source: Path
    file: File
    part: Path


class _Merging:
    """The parts of one store, on the way into it."""

    def __init__(
        self,
        folders: Sequence[PartsFolder],
        target: Path,
        shared: _Shared,
        records: dict[int, tuple[Path, PartRecord]],
    ) -> None:
        self.folders, self.target, self.shared, self.records = folders, target, shared, records
        self.request = shared.request.request
        self.of = shared.request.of
        self.pieces: list[_Piece] = []

    @property
    def manifests(self) -> list[Manifest]:
        return [record.manifest for _, record in self.records.values()]

    def compare(self) -> None:
        """Refuse parts that are not of the same simulation, or were not simulated alike."""
        for number, (path, record) in self.records.items():
            if different := _compare_requests(self.request, record.manifest.request):
                raise StoreError(f"{path} is a part of something else: {different}. Delete it, and make it again.")
            refuse_damaged(path / SOURCES, record.manifest.sources, f"delete {path}, and make the part again")
            if record.manifest.sources.sha256 != self.manifests[0].sources.sha256:
                raise StoreError(f"{path} has another table of sources than part 1: delete it, and make it again.")
            checkpoints = record.manifest.checkpoints
            simulated = {index for index, checkpoint in enumerate(checkpoints) if checkpoint.decided is not None}
            if len(checkpoints) != len(self.request.states) or not simulated <= self.shared.checkpoints.keys():
                raise StoreError(f"{path} has other checkpoints than the request: delete it, and make it again.")
            for index, checkpoint in enumerate(checkpoints):
                if checkpoint.decided is None:
                    continue
                agreed = self.shared.checkpoints[index].checkpoint.choices
                if different := compare_choices(agreed, checkpoint.decided):
                    raise StoreError(
                        f"part {Share(number, self.of)} simulated checkpoint {index} otherwise than the others: "
                        f"{different}. Delete {path}, and make it again."
                    )
        refuse_other_ends(self.records, {i: c.checkpoint for i, c in self.shared.checkpoints.items()})

    def read_descriptions(self) -> tuple[About, ...]:
        """Read what the parts know of the sources."""
        table = Table.read(read_json(self.records[1][0] / SOURCES), self.request.n)
        return read_shared_descriptions(self.folders, table.ids)

    def put_together(self, progress: bool | Advance) -> Manifest:
        """Put all files in their places; return the manifest that describes them."""
        first_path, first = self.records[1]
        sources = self._collect(first_path, first.manifest.sources, SOURCES)
        if (probes := first.manifest.probes) is not None:
            self._collect(first_path, probes.file, "probes.safetensors")
        count = len(Table.read(read_json(first_path / sources.path), self.request.n))
        planned = [self._checkpoint(index, count) for index in range(len(self.request.states))]
        self._place(progress)
        notices = Notices(message for manifest in self.manifests for message in manifest.warnings)
        manifest = replace(
            first.manifest,
            request=self.request,
            checkpoints=tuple(planned),
            cost=add_costs([manifest.cost for manifest in self.manifests]),
        )
        done = tuple(self._conclude(manifest, index, notices) for index in range(len(planned)))
        if found := check_weights([c.weight for c in done], [c.measured.norms for c in done]):
            notices.add(str(found))
        if different := _compare_circumstances(self.manifests):
            notices.add(different)
        return replace(manifest, checkpoints=done, warnings=notices.messages)

    def _collect(self, part: Path, file: File, name: str, source: Path | None = None) -> File:
        """Note a file to be put in its place; refuse one that has another place than its name."""
        if file.path != name:
            raise StoreError(f"{part} has {file.path} in place of {name}: delete {part}, and make the part again.")
        self.pieces.append(_Piece(source or part / file.path, file, part))
        return file

    def _checkpoint(self, index: int, sources: int) -> Checkpoint:
        """Collect the files of a checkpoint from the parts; refuse it if some are missing."""
        settings = self.request.plan.at(index, len(self.request.states))
        if settings.weight == 0:
            return self.manifests[0].checkpoints[index]
        agreed = self.shared.checkpoints[index]
        own = [(number, record.manifest.checkpoints[index]) for number, (_, record) in self.records.items()]
        shards = partial(self._shards, index, own, sources)
        begin, folder = own[0][1], name_checkpoint(index)
        for what, file in (("base", begin.base), ("noise", begin.noise)):
            if file is not None:
                self._collect(self.records[1][0], file, f"{folder}/{what}.safetensors")
        if (basis := agreed.checkpoint.basis) is not None:
            place = self.shared.folder.shared / basis.path
            self._collect(self.shared.folder.path, basis, f"{folder}/basis.safetensors", place)
        fallen = (checkpoint.measured.one_by_one for _, checkpoint in own)  # a part may fall back on its way
        why = next(filter(None, fallen), agreed.checkpoint.measured.one_by_one)
        return replace(
            agreed.checkpoint,
            measured=replace(agreed.checkpoint.measured, one_by_one=why),
            base=begin.base,
            noise=begin.noise,
            imprints=shards("imprints"),
            midpoints=shards("midpoints") if self.request.plan.keep_pair else (),
        )

    def _shards(
        self, index: int, own: Sequence[tuple[int, Checkpoint]], sources: int, kind: Literal["imprints", "midpoints"]
    ) -> tuple[File, ...]:
        """Collect the files of all rows of a checkpoint, in order."""
        rows, found = self.shared.checkpoints[index].checkpoint.choices.rows_per_file, list[File]()
        for number, checkpoint in own:
            path = self.records[number][0]
            for chunk in Share(number, self.of).of_chunks(-(-sources // rows)):
                span = (chunk * rows, min((chunk + 1) * rows, sources))
                name = f"{name_checkpoint(index)}/{kind}-{chunk:05}.safetensors"
                file = next((f for f in getattr(checkpoint, kind) if f.path == name and f.rows == span), None)
                if file is None:
                    raise StoreError(
                        f"{path} has no file {name} of rows {span[0]} to {span[1] - 1}: delete {path}, and make the "
                        "part again."
                    )
                found.append(self._collect(path, file, name))
        return tuple(found)

    def _place(self, progress: bool | Advance) -> None:
        """Put all files into the folder of the store, each compared with its checksum."""
        bar = Progress("merging", sum(piece.file.bytes for piece in self.pieces), "bytes", progress)
        inside = {folder.path.absolute() for folder in self.folders if folder.out.absolute() == self.target.absolute()}
        for piece in self.pieces:
            place = self.target / piece.file.path
            if not is_sound(place, piece.file):
                advice = f"delete {piece.part}, and make it again"
                refuse_damaged(piece.source, piece.file, advice)
                own = any(piece.source.absolute().is_relative_to(path) for path in inside)
                if not place_file(piece.source, place, link=own):
                    refuse_damaged(place, piece.file, f"delete {place}, and merge again")
            bar.advance(piece.file.bytes)
        bar.close()

    def _conclude(self, manifest: Manifest, index: int, notices: Notices) -> Checkpoint:
        """Add to a checkpoint what its imprints say."""
        checkpoint = manifest.checkpoints[index]
        if checkpoint.decided is None:
            return checkpoint
        remarks = _Remarks(self.shared.folder.shared / name_checkpoint(index), self.shared.checkpoints[index].remarks)
        figures = [self._read_figures(manifest, index, file) for file in checkpoint.imprints]
        found = Simulated(
            *(index, manifest.plan, checkpoint.decided, checkpoint.measured, figures, notices.add), lambda: remarks
        )
        return replace(checkpoint, measured=summarise(engines.get(manifest.plan), found))

    def _read_figures(self, manifest: Manifest, index: int, file: File) -> ShardFigures:
        """Read what a file says about its imprints; refuse one that holds others than the store has there."""
        place, (first, last) = self.target / file.path, file.rows or (0, 0)
        try:
            with safe_open(place, framework="pt") as tensors:
                if misfit := find_misfit(tensors, imprints_layout(manifest, index, last - first), others=True):
                    raise StoreError(f"{place} does not fit the other parts: {misfit}.")
                about = parsed((tensors.metadata() or {}).get(ABOUT, "").encode(), place)
        except (OSError, SafetensorError, MemoryError) as error:
            raise StoreError(f"{place} cannot be read: {first_line(error)}.") from error
        return read_figures(about, last - first)


def _compare_circumstances(manifests: Sequence[Manifest]) -> str | None:
    """Say that parts were made under different circumstances, which rounding may show."""
    first, *others = manifests
    for number, manifest in enumerate(others, 2):
        if (other := find_other_circumstance(first, manifest)) is not None:
            return (
                f"parts were made under different circumstances (parts 1 and {number}: {other}): their imprints agree "
                "up to rounding, and repeating the store gives the same up to rounding."
            )
    return None
