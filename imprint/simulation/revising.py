"""Writes a new version of a store: other sources from rows that exist, in the folder that holds the version before.

The manifest is replaced last, and as a whole: whoever opens the store, and whatever is killed, finds one version or the
other. Files of the version before stay until the next change.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from imprint.about import About
from imprint.display import count_of, name_some
from imprint.errors import SourcesError, StoreError
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.concluding import conclude
from imprint.sources import find_source
from imprint.store.assembling import Assembly, Origin, Row, clear_unused
from imprint.store.checkpoint import ShardFigures
from imprint.store.describing import describe_changed
from imprint.store.folder import locked
from imprint.store.history import MOST, Kind, Revision, extend_history
from imprint.store.manifest import Manifest, versions
from imprint.store.parts import PartsFolder
from imprint.store.reading import Store
from imprint.store.signing import VALIDATION, warn_unsigned
from imprint.store.supplement import remove_supplement
from imprint.store.table import Table
from imprint.store.workspace import describe_file
from imprint.store.writing import write_manifest

logger = logging.getLogger(__name__)
EARLIER = (
    "was made by a version that did not record which examples each source has: call imprint.update with all of its "
    "sources first, or `imprint update`, which adds that"
)


@dataclass(frozen=True)
class Next:
    """The next version of a store, in the same folder; made under the lock of the store.

    store: the version that is there.
    """

    store: Store

    @property
    def origin(self) -> Origin:
        """The imprints that the store has."""
        return Origin.of_store(self.store)

    @property
    def suffix(self) -> str:
        """What the names of new files end with: no earlier version has used it."""
        manifest = self.store.manifest
        return f"-r{len(manifest.history) + manifest.forgotten + 1}"

    def clear(self) -> int:
        """Remove what changes before have left, before anything of this version is written; count the files."""
        return clear_unused(self.store.path, self.store.manifest)

    def write(
        self,
        manifest: Manifest,
        origins: Sequence[Origin],
        rows: Sequence[Row],
        table: Table,
        kind: Kind,
        about: Mapping[str, About] | None = None,
        progress: bool | Advance = True,
    ) -> Store:
        """Put rows together, and replace the manifest by one of these sources; return the new version.

        manifest: of the new version, but for the files of imprints, the figures, the table and the history.
        rows: the sources, as rows of the origins, of which the store is the first.
        about: what is known of sources that were added.
        """
        path, before = self.store.path, self.store.manifest
        assembled, figures = assemble(Assembly(path, origins, self.suffix), manifest, rows, progress)
        file = before.sources
        if table != self.store.table:
            table.write(path / f"sources{self.suffix}.json")
            file = describe_file(path, f"sources{self.suffix}.json")
        added, dropped = _compare(self.store.table, table)
        more = len(manifest.checkpoints) - len(before.checkpoints)
        entry = describe_change(kind, (self.store.sha256,), added, dropped, more)
        history, forgotten = extend_history(before.history, before.forgotten, entry)
        assembled = replace(assembled, sources=file, history=history, forgotten=forgotten)
        write_manifest(path, conclude(assembled, figures, [(before, origins[0].files)]))
        describe_changed(path, table.ids, about or {})
        warn_unsigned(path, "it was changed")
        if (path / VALIDATION).exists():
            logger.warning("%s was validated before it was changed: validate it again (`imprint validate`)", path)
        return Store(path)


def assemble(
    assembly: Assembly, manifest: Manifest, rows: Sequence[Row], progress: bool | Advance
) -> tuple[Manifest, list[Sequence[ShardFigures]]]:
    """Put rows together at all checkpoints; return the manifest with their files, and what these say."""
    done, figures = list(manifest.checkpoints), list[Sequence[ShardFigures]]()
    used = sum(checkpoint.decided is not None for checkpoint in done)
    with closing(Progress("writing", len(rows) * used, "rows", progress)) as bar:
        for index, checkpoint in enumerate(done):
            figures.append([])
            if checkpoint.decided is not None:
                imprints, midpoints, figures[-1] = assembly.put_together(index, rows, bar.advance)
                done[index] = replace(checkpoint, imprints=imprints, midpoints=midpoints)
    return replace(manifest, checkpoints=tuple(done)), figures


def _compare(before: Table, now: Table) -> tuple[list[str], list[str]]:
    """Return the ids that were added and dropped; one whose members are others was both."""
    was, found = before.by_id(), now.by_id()
    added = [name for name in now.ids if not now.is_same(found[name], before, was.get(name))]
    dropped = [name for name in before.ids if not now.is_same(found.get(name), before, was[name])]
    return added, dropped


def describe_change(
    kind: Kind, before: tuple[str, ...], added: Sequence[str], dropped: Sequence[str], checkpoints: int = 0
) -> Revision:
    """Return the entry of the history for a change that is made now."""
    return Revision(
        *(datetime.now(UTC).isoformat(timespec="seconds"), kind, before, len(added), len(dropped)),
        *(tuple(added[:MOST]), tuple(dropped[:MOST]), checkpoints, versions()),
    )


@contextmanager
def changing(store: Store | str | os.PathLike[str]) -> Iterator[Next]:
    """Keep other processes from changing a store."""
    opened = Store.of(store)
    if opened.mirror is not None:
        raise StoreError(
            f"{opened.place} is in a bucket, where stores are not changed: simulate its sources at another address."
        )
    with locked(opened.path):
        yield Next(Store(opened.path))  # another process may have changed it since it was opened


def drop(
    store: Store | str | os.PathLike[str],
    sources: str | Iterable[str],
    *,
    erase: bool = False,
    progress: bool | Advance = True,
) -> Store:
    """Drop sources from a store; return its new version.

    sources: their ids, or names that only one has.
    erase: whether to remove the files of the version before at once, with all that unfinished updates and merges have
        left in the folder. By default they stay until the next change, so that whoever has the store open can go on
        reading.

    Neither the task nor the data is needed. The training data stays what it was: a dropped source was trained on, and
    gets no more credit. Sources that were dropped before are gone already, which the log says: so the same call again
    completes one that was killed.
    """
    with changing(store) as version:
        made, past = _drop(version, sources, progress)
        erased = _erase(made) if erase else 0
        if past:
            _log_past(past, erased)
    if isinstance(store, Store):
        made.origin = {**store.origin, "before": store}  # a temporary folder lives as long as its first store
        if (known := made.origin.get("sources")) is not None:
            places = {identity: place for place, identity in enumerate(known.ids)}
            made.origin["sources"] = known.select([places[identity] for identity in made.source_ids])
    return made


def _erase(store: Store) -> int:
    """Remove everything that does not belong to this version of a store; count the files."""
    before = _count_files(store.path)
    clear_unused(store.path, store.manifest)
    remove_supplement(store.path)
    PartsFolder(store.path).remove()
    return before - _count_files(store.path)


def _count_files(folder: Path) -> int:
    return sum(place.is_file() for place in folder.rglob("*"))


def _drop(version: Next, sources: str | Iterable[str], progress: bool | Advance) -> tuple[Store, list[str]]:
    """Drop sources; return the new version, and which of the sources it did not have any more."""
    before, table = version.store, version.store.table
    if not table.members:
        raise StoreError(f"{before.path} {EARLIER}.")
    if not (given := _read_given(sources)):
        raise SourcesError("there are no sources to drop: give their ids.")
    past = _find_past(given, before)
    gone = {find_source(each, table.ids, table.names) for each in given if each not in past}
    if not gone:
        describe_changed(before.path, table.ids, {})  # a killed process may not have come to it
        return before, past
    kept = [place for place in range(len(table)) if place not in gone]
    if not kept:
        raise SourcesError(f"these are all {len(table)} sources of {before.path}: delete the folder instead.")
    left = table.select(kept)
    request = replace(before.manifest.request, sources=left.sha256, members=left.sha256)
    shared = before.manifest.shared and None  # how many of those that are left overlap, only their members tell
    manifest = replace(before.manifest, request=request, shared=shared)
    version.clear()
    rows = [(0, each) for each in kept]
    return version.write(manifest, [version.origin], rows, left, "dropped", None, progress), past


def _read_given(sources: str | Iterable[str]) -> list[str]:
    """Return the ids or names of sources as texts, which sources have: those of numbers are written as such."""
    if not isinstance(sources, Iterable):
        raise SourcesError(f"sources must be ids of sources, such as ['times'], got {sources!r}.")
    return [sources] if isinstance(sources, str) else [str(each) for each in sources]


def _find_past(given: Sequence[str], store: Store) -> list[str]:
    """Find those of the sources given that the store had before: it has no others that are called so."""
    known = {*store.source_ids, *store.source_names}
    past = {identity for revision in store.manifest.history for identity in revision.dropped_ids}
    return [each for each in dict.fromkeys(given) if each in past and each not in known]


def _log_past(past: Sequence[str], files: int) -> None:
    """Say what a repeated call finds done, and what it has completed."""
    erased = f"; {count_of(files, 'file')} of earlier versions erased now" if files else ""
    logger.warning(
        "%s %s dropped before%s: nothing of %s is in this version of the store",
        *(name_some(past), "was" if len(past) == 1 else "were", erased, "it" if len(past) == 1 else "them"),
    )
