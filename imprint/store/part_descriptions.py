"""Carries descriptions of sources from the parts of a store to the merged one."""

from collections.abc import Iterable
from pathlib import Path

from imprint.sources import Sources
from imprint.store.describing import describe_new, read_description, write_description
from imprint.store.parts import PartsFolder
from imprint.store.reading import Store

_DESCRIPTION = "description"


def share_description(folder: PartsFolder, sources: Sources) -> None:
    """Share what is known of the sources, as the first part to be done knows it."""
    if not any(sources.about) or not folder.shared.is_dir():
        return
    about = dict(zip(sources.ids, sources.about, strict=True))

    def fill(place: Path) -> None:
        write_description(place, sources.ids, sources.names, about)

    folder.publish(_DESCRIPTION, fill)


def describe_merged(store: Store, folders: Iterable[PartsFolder]) -> None:
    """Describe the sources of a merged store as the parts know them."""
    for folder in folders:
        about = read_description(folder.shared / _DESCRIPTION, store.source_ids)[0].of(store.source_ids)
        if about:
            describe_new(store, about)
            return
