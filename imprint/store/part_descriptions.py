"""Carries descriptions of sources from the parts of a store to the merged one."""

import logging
from collections.abc import Iterable
from pathlib import Path

from imprint.sources import Sources
from imprint.store.describing import describe_new, read_description, write_description
from imprint.store.parts import PartsFolder
from imprint.store.reading import Store

logger = logging.getLogger(__name__)
_DESCRIPTION = "description"
_AFTERWARDS = "`imprint describe`, or store.describe, changes that once the parts are merged"


def share_description(folder: PartsFolder, sources: Sources) -> None:
    """Share what is known of the sources, as the first part to be done knows it; log where another part differs."""
    if not any(sources.about) or not folder.shared.is_dir():
        return
    about = dict(zip(sources.ids, sources.about, strict=True))

    def fill(place: Path) -> None:
        write_description(place, sources.ids, sources.names, about)

    place = folder.shared / _DESCRIPTION
    if (
        not folder.publish(_DESCRIPTION, fill)
        and read_description(place, sources.ids)[0].of(sources.ids) != sources.about
    ):
        logger.warning("%s describes the sources otherwise than given here: %s", place, _AFTERWARDS)


def describe_merged(store: Store, folders: Iterable[PartsFolder]) -> None:
    """Describe the sources of a merged store as the parts know them, those of the first folder where they differ."""
    ids = store.source_ids
    found = [(folder, read_description(folder.shared / _DESCRIPTION, ids)[0].of(ids)) for folder in folders]
    known = [(folder, about) for folder, about in found if about]
    for folder, about in known[:1]:
        describe_new(store, about)
        for other in (other for other, theirs in known if theirs != about):
            logger.warning(
                "the parts in %s describe the sources otherwise than those in %s, which count: %s",
                *(other.path, folder.path, _AFTERWARDS),
            )
