"""Carries descriptions of sources from the parts of a store to the merged one."""

from collections.abc import Sequence
from pathlib import Path

from imprint.about import About
from imprint.errors import StoreError
from imprint.sources import Sources
from imprint.store.describing import read_description, write_description
from imprint.store.parts import PartsFolder

_DESCRIPTION = "description"


def share_description(folder: PartsFolder, sources: Sources) -> None:
    """Share what is known of the sources, as the first part to be done knows it."""
    if not any(sources.about) or not folder.shared.is_dir():
        return
    about = dict(zip(sources.ids, sources.about, strict=True))

    def fill(place: Path) -> None:
        write_description(place, sources.ids, sources.names, about)

    folder.publish(_DESCRIPTION, fill)


def read_shared_descriptions(folders: Sequence[PartsFolder], ids: Sequence[str]) -> tuple[About, ...]:
    """Read what the parts know of the sources with these ids; refuse folders that say different things of them.

    The result is empty where nothing is known of any.
    """
    found: dict[Path, tuple[About, ...]] = {}
    for folder in folders:
        place = folder.shared / _DESCRIPTION
        if about := read_description(place, ids)[0].of(ids):
            found[place] = about
    for place, about in found.items():
        first, expected = next(iter(found.items()))
        if about != expected:
            which = next(identity for identity, *both in zip(ids, expected, about, strict=True) if both[0] != both[1])
            raise StoreError(
                f"{place} describes source {which!r} otherwise than {first}: delete the one that is wrong, and merge "
                "again."
            )
    return next(iter(found.values()), ())
