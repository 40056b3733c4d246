"""Merges stores of one base into a new one: the same data, checkpoints and plan, simulated alike, of other sources."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from imprint.about import About
from imprint.errors import SourcesError, StoreError
from imprint.runtime.progress import Advance
from imprint.simulation.concluding import conclude
from imprint.simulation.revising import EARLIER, assemble, describe_change
from imprint.store.assembling import Assembly, Origin, Row
from imprint.store.checkpoint import Checkpoint
from imprint.store.comparison import compare_losses, compare_training_data, describe_other_end, difference
from imprint.store.describing import warn_of_others
from imprint.store.folder import locked
from imprint.store.manifest import MANIFEST, SOURCES, Manifest, add_costs, find_other_circumstance
from imprint.store.merging import refuse_other_files
from imprint.store.parts import place_file
from imprint.store.reading import Store
from imprint.store.request import Probed, Request
from imprint.store.table import Table
from imprint.store.workspace import describe_file
from imprint.store.writing import write_manifest

logger = logging.getLogger(__name__)
_CHOICES = ("epsilon", "directions", "layers", "noise_rows")  # on which imprints depend
_INSTEAD = "Simulate its sources into the first store instead (imprint.update)."


def merge_stores(folders: Sequence[Path], out: Path, progress: bool | Advance) -> Store:
    """Merge stores into a new one, in the order in which they are given; those stay as they are."""
    stores = [Store(folder) for folder in folders]
    for store in stores:
        if not store.table.members:
            raise StoreError(f"{store.path} {EARLIER}.")
    for store in stores[1:]:
        _refuse_other_base(stores[0], store)
    table, rows = _unite_sources(stores)
    before = tuple(store.sha256 for store in stores)
    if (out / MANIFEST).is_file():
        return _describe(_return_merged(out, before), stores)
    refuse_other_files(out, "the merged store")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        first, origins = stores[0].manifest, [Origin.of_store(store) for store in stores]
        _copy_shared(origins[0], first, out)
        table.write(out / SOURCES)
        manifest = replace(
            first,
            request=replace(first.request, sources=table.sha256, members=table.sha256),
            sources=describe_file(out, SOURCES),
            shared=None,
            cost=add_costs([store.manifest.cost for store in stores]),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            warnings=tuple(dict.fromkeys(_collect_warnings(stores))),
            history=(describe_change("merged", before, table.ids, ()),),
            forgotten=0,
        )
        manifest, figures = assemble(Assembly(out, origins), manifest, rows, progress)
        past = [(store.manifest, origin.files) for store, origin in zip(stores, origins, strict=True)]
        write_manifest(out, conclude(manifest, figures, past))
    return _describe(Store(out), stores)


def _describe(merged: Store, stores: Sequence[Store]) -> Store:
    """Describe the sources as the first of the stores that knows one does, unless they are described already."""
    known: dict[str, About] = {}
    if merged.description_sha256 is not None:
        return merged
    for store in stores:
        warn_of_others(merged.path, known, store.description.about, f"what {store.path} says")
        known = {**store.description.about, **known}
    if known:
        merged.describe(known)
    return merged


def _return_merged(out: Path, before: tuple[str, ...]) -> Store:
    """Return the store in a folder, if it was merged from stores with these checksums."""
    found = Store(out)
    merges = [revision.kind == "merged" and revision.before == before for revision in found.manifest.history]
    if not any(merges):
        raise StoreError(f"{out} already holds a store, made otherwise: give another folder.")
    if not merges[-1]:
        raise StoreError(
            f"{out} holds these stores merged, and was changed since: open it, or give another folder to merge them "
            "again."
        )
    return found


def _collect_warnings(stores: Sequence[Store]) -> Iterator[str]:
    """Return the warnings of all stores, and one if they were not simulated alike."""
    for store in stores:
        yield from store.warnings
    for store in stores[1:]:
        if (other := find_other_circumstance(stores[0].manifest, store.manifest)) is not None:
            yield (
                f"the stores that were merged were made under different circumstances ({other}): imprints agree with "
                "those of one simulation up to rounding."
            )
            return


def _refuse_other_base(first: Store, other: Store) -> None:
    """Refuse to merge stores whose imprints cannot be read side by side."""
    where = f"{other.path} is not of the base of {first.path}"
    was, now = _with_same_probes(first.manifest.request, other.manifest.request)
    now = replace(now, sources=was.sources, members=was.members)
    if different := difference(was, now, lambda examples: now.probes.values):
        raise StoreError(f"{where}: {different}.")
    likeness = compare_training_data(was, now)
    if likeness.by == "none" and (different := compare_losses(was.probes.values, now.probes.values)):
        raise StoreError(
            f"{where}: {different}. The training data was not hashed: it is other data, or differs at each reading, "
            f"which nothing tells apart. {_INSTEAD}"
        )
    likeness.warn()
    choices = _CHOICES if first.removes else ("lr", *_CHOICES)  # a recorded run has its own learning rates
    for index, (one, two) in enumerate(zip(first.checkpoints, other.checkpoints, strict=True)):
        if one.decided is None or two.decided is None:
            continue
        for name in choices:
            if (a := getattr(one.decided, name)) != (b := getattr(two.decided, name)):
                raise StoreError(
                    f"{where}: at checkpoint {index}, {name} was {a}, is {b}. Add its sources by an update."
                )
        if (one.basis and one.basis.sha256) != (two.basis and two.basis.sha256):
            raise StoreError(
                f"{where}: at checkpoint {index} the basis of the curvature differs, and coefficients on two bases do "
                f"not mix. {_INSTEAD}"
            )
        _refuse_other_end(first, other, index, where)


def _with_same_probes(*requests: Request) -> list[Request]:
    """Return requests with the probes that all of them have; which ones those are may depend on rounding."""
    common = set.intersection(*(set(request.probes.examples) for request in requests))
    if all(len(request.probes.examples) == len(common) for request in requests):
        return list(requests)
    return [replace(request, probes=_keep_probes(request.probes, sorted(common))) for request in requests]


def _keep_probes(probes: Probed, examples: list[int]) -> Probed:
    """Return some of the probes, with their losses; other values depend on which probes there are."""
    losses = [probes.values.losses[probes.examples.index(example)] for example in examples]
    return Probed(examples, replace(probes.values, losses=losses, moved=[], outputs=None, gradients=[]))


def _refuse_other_end(first: Store, other: Store, index: int, where: str) -> None:
    """Refuse read-out points that differ by more than rounding."""
    one, two = first.checkpoints[index].base, other.checkpoints[index].base
    if one is None or two is None or one.sha256 == two.sha256:
        return
    ours, theirs = (store.base(index, torch.device("cpu")) for store in (first, other))
    if different := describe_other_end(ours, theirs):
        raise StoreError(f"{where}: at checkpoint {index} {different}.")


def _unite_sources(stores: Sequence[Store]) -> tuple[Table, list[Row]]:
    """Return the table of all sources, each once, and where their rows are."""
    rows, places = list[Row](), dict[str, Row]()
    for number, store in enumerate(stores):
        for place, identity in enumerate(store.source_ids):
            if (known := places.get(identity)) is None:
                places[identity] = (number, place)
                rows.append((number, place))
            elif not store.table.is_same(place, stores[known[0]].table, known[1]):
                raise SourcesError(
                    f"source {identity!r} has other members in {store.path} than in {stores[known[0]].path}: drop it "
                    "from one of them (imprint.drop)."
                )
    if twice := sum(map(len, stores)) - len(rows):
        logger.info("%d sources are in several of the stores, and come from the first of them", twice)
    columns = [
        tuple(getattr(stores[number].table, name)[place] for number, place in rows)
        for name in ("ids", "names", "sizes", "members")
    ]
    return Table(*columns), rows


def _copy_shared(origin: Origin, manifest: Manifest, out: Path) -> None:
    """Copy what all sources share."""
    checkpoints: Sequence[Checkpoint] = manifest.checkpoints
    shared = [file for c in checkpoints for file in (c.base, c.basis, c.noise) if file is not None]
    for file in (*shared, *([manifest.probes.file] if manifest.probes else [])):
        origin.files.check(file)
        place_file(origin.files.folder / file.path, out / file.path, link=False)
