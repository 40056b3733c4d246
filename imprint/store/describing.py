"""Keeps what is known of the sources of a store in its folder: `about.json`.

Owners and licences change while imprints stay what they are. So descriptions are no part of the manifest: changing one
leaves the store's checksum, and with it its validation and every log that names the store, as they were. A signature
does cover them. What the descriptions were before is kept in the same file, which is replaced as a whole.
"""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from imprint.about import FIELDS, NOTHING, About, read_about_values
from imprint.errors import SourcesError, StoreError
from imprint.sources import describe_sources
from imprint.store.folder import locked, write_sealed
from imprint.store.records import Count, read
from imprint.store.values import Value, read_hashed

if TYPE_CHECKING:
    from imprint.store.reading import Store

logger = logging.getLogger(__name__)
ABOUT = "about.json"
_SIGNATURE = "signature.json"  # of `imprint.store.signing`, which imports this module
SCHEMA = 1
_LONGEST = 64 << 20  # bytes
_KEPT = 100  # changes
_ROOM = 100  # bytes, for the checksum
_NAMED = 5  # differences in a warning
_HOW = "`imprint describe`, or store.describe, changes that"
_AGAIN = f"Delete {ABOUT}, and describe the store again."


def read_about_record(value: Value) -> About:
    """Read one description from a file."""
    value.mapping()
    try:
        return read_about_values(value.content, value.field)
    except SourcesError as error:
        value.fail(str(error).rstrip("."))


_Described = Annotated[About, read_about_record]


@dataclass(frozen=True)
class Revision:
    """What was known of some sources before their descriptions were changed at some time."""

    time: str
    before: dict[str, _Described]


@dataclass(frozen=True)
class Description:
    """What is known of the sources of a store, by id, and how it came about: the last changes, the latest at the end.

    forgotten: how many earlier changes are no longer kept.
    """

    about: dict[str, _Described]
    changes: tuple[Revision, ...] = ()
    forgotten: int = 0

    def of(self, ids: Sequence[str]) -> tuple[About, ...]:
        """Return the descriptions of the sources with these ids; empty where nothing is known of any."""
        found = tuple(self.about.get(identity, NOTHING) for identity in ids)
        return found if any(found) else ()


@dataclass(frozen=True)
class _File:
    schema: Count
    description: Description


def read_description(folder: Path, ids: Sequence[str], *, changed: bool = False) -> tuple[Description, str | None]:
    """Read the descriptions in the folder of a store, with the checksum of their file; None where there is none.

    changed: whether the store may have had other sources before: what is known of them is left aside.
    """
    whole, digest = _read_whole(folder)
    known = set(ids)
    if not changed and (unknown := [identity for identity in whole.about if identity not in known]):
        raise StoreError(
            f"{folder / ABOUT} cannot be read: it describes {unknown[0]!r}, which is no source of the store. {_AGAIN}"
        )
    return replace(whole, about={name: about for name, about in whole.about.items() if name in known}), digest


def _read_whole(folder: Path) -> tuple[Description, str | None]:
    """Read all descriptions, whichever sources the store has."""
    file = folder / ABOUT
    if not os.path.lexists(file):
        return Description({}), None
    if file.is_symlink():
        raise StoreError(f"{file} is a link, and descriptions are a plain file: remove it.")
    value, digest = read_hashed(file, _LONGEST)
    schema = value.mapping().get("schema")
    if schema is None or schema.whole(1) > SCHEMA:
        found = "none" if schema is None else schema.content
        raise StoreError(f"{file} has schema {found}, this version reads up to {SCHEMA}: upgrade imprint.")
    try:
        return read(_File, value.unsealed()).description, digest
    except StoreError as error:
        raise StoreError(f"{error} {_AGAIN}") from error


def write_description(
    folder: Path, ids: Sequence[str], names: Sequence[str], about: Mapping[str, About | Mapping[str, str]]
) -> bool:
    """Write new descriptions of some sources of a store beside the others; return whether any has changed.

    Killed at any moment, the folder holds the descriptions from before or those from after.
    """
    describe_sources(about, ids, names)  # what is wrong is refused before anything is touched
    with locked(folder):
        before, _ = read_description(folder, ids, changed=True)  # which another process may have changed meanwhile
        every = zip(ids, describe_sources(about, ids, names, before.of(ids)), strict=False)
        now = {identity: each for identity, each in every if each}
        changed = [name for name in {**before.about, **now} if before.about.get(name) != now.get(name)]
        if not changed:
            return False
        _change(folder, before, now, changed)
        return True


def describe_changed(folder: Path, ids: Sequence[str], about: Mapping[str, About]) -> None:
    """Describe the sources that a store has after a change, under its lock: what was known of others becomes past.

    about: what is said of the sources now. What the store says of a source stays, and a difference is logged.
    """
    whole, _ = _read_whole(folder)
    warn_of_others(folder, whole.about, about, "what was given for this change")
    now = {identity: found for identity in ids if (found := whole.about.get(identity) or about.get(identity))}
    changed = [name for name in {**whole.about, **now} if whole.about.get(name) != now.get(name)]
    if changed:
        _change(folder, whole, now, changed)


def warn_of_others(folder: Path, stays: Mapping[str, About], other: Mapping[str, About], whose: str) -> None:
    """Log where others describe sources otherwise than stays in a store: that decides who is paid.

    whose: where the other descriptions come from, in words.
    """
    known = {name: about for name, about in stays.items() if about}
    if differences := _name_differences(known, {name: about for name, about in other.items() if name in known}):
        logger.warning(
            "%s keeps what is said first of a source, and %s differs: %s. %s", folder, whose, differences, _HOW
        )


def _name_differences(stays: Mapping[str, About], other: Mapping[str, About]) -> str:
    """Name the sources, the fields and both values where descriptions differ; nothing where they only lack one."""
    found = [
        f"{field} of source {name!r} stays {getattr(known, field)!r}, not {value!r}"
        for name, about in other.items()
        for field in FIELDS
        if (value := getattr(about, field)) and value != getattr(known := stays.get(name, NOTHING), field)
    ]
    more = f"; and {len(found) - _NAMED:,} more" if len(found) > _NAMED else ""
    return "; ".join(found[:_NAMED]) + more


def describe_new(store: "Store", about: Sequence[About]) -> None:
    """Describe the sources of a store that has just been simulated, or found finished, as the sources given for it are.

    What a finished store says of its sources is left as it is: whoever described it last knew better than the script
    that made it. A difference is logged, and so is a folder that cannot be written to: the imprints are there.
    """
    if not any(about) or tuple(about) == store.about:
        return
    if store.description_sha256 is None and not (store.path / _SIGNATURE).exists():
        try:
            store.describe(dict(zip(store.source_ids, about, strict=True)))
        except StoreError as error:
            logger.warning("the sources of %s are not described: %s", store.path, error)
        return
    ids, here = store.source_ids, store.about or (NOTHING,) * len(store)
    differences = _name_differences(dict(zip(ids, here, strict=True)), dict(zip(ids, about, strict=True)))
    logger.warning(
        "%s is complete, and describes its sources otherwise than given here%s. %s",
        *(store.path, f": {differences}" if differences else "", _HOW),
    )


def _change(folder: Path, before: Description, now: dict[str, About], changed: Sequence[str]) -> None:
    was = {name: before.about.get(name, NOTHING) for name in changed}
    changes = (*before.changes, Revision(datetime.now(UTC).isoformat(timespec="seconds"), was))
    forgotten = before.forgotten + max(0, len(changes) - _KEPT)
    _write(folder, Description(now, changes[-_KEPT:], forgotten))


def _write(folder: Path, description: Description) -> None:
    """Write the file. Where it would become too long to be read again, the earliest changes go first."""
    while (size := _measure(description)) > _LONGEST:
        count = len(description.changes)
        if not count:
            raise StoreError(
                f"{folder / ABOUT} would have {size:,} bytes, and at most {_LONGEST:,} are allowed: describe fewer "
                "sources, or in fewer words."
            )
        kept = description.changes[(count + 1) // 2 :]
        description = replace(description, changes=kept, forgotten=description.forgotten + count - len(kept))
    write_sealed(folder / ABOUT, asdict(_File(SCHEMA, description)))


def _measure(description: Description) -> int:
    """Return how many bytes the file of a description has, at most."""
    return len(json.dumps(asdict(_File(SCHEMA, description)), indent=1)) + _ROOM
