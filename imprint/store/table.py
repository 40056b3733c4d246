"""The table of sources in a store, `sources.json`: ids, names, sizes, and by what their members are recognised."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from imprint.sources import Sources
from imprint.store.files import write
from imprint.store.fingerprint import digest_members, of_table
from imprint.store.values import Value, parsed

DIGEST = 32
"""Hexadecimal digits by which the members of a source are recognised."""


@dataclass(frozen=True)
class Table:
    """The sources of a store, in the order of their rows.

    members: digests of the members of each; empty in stores of versions that did not keep them.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    members: tuple[str, ...] = ()

    @classmethod
    def of(cls, sources: Sources) -> "Table":
        """Return the table of some sources."""
        return cls(sources.ids, sources.names, sources.sizes, digest_members(sources))

    @classmethod
    def read(cls, value: Value, n: int) -> "Table":
        """Read a table, each source with an id of its own; refuse sources of more than n examples."""
        kept = ("members",) if "members" in value.mapping() else ()
        columns = value.record("ids", "names", "sizes", *kept)
        ids, names, sizes = columns["ids"].texts(), columns["names"].texts(), columns["sizes"].wholes(1)
        members = columns["members"].texts() if kept else ()
        if not 0 < len(ids) == len(names) == len(sizes):
            value.fail(f"it has {len(ids)} ids, {len(names)} names and {len(sizes)} sizes, which must be equally many")
        if kept and (len(members) != len(ids) or any(len(each) != DIGEST for each in members)):
            value.fail(f"it must have a digest of {DIGEST} digits for each of its {len(ids)} sources")
        if len(set(ids)) < len(ids):
            value.fail("two sources have the same id")
        if max(sizes) > n:
            value.fail(f"a source has {max(sizes)} examples, more than the training data ({n})")
        return cls(ids, names, sizes, members)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sha256(self) -> str:
        """The hash that a request has of these sources."""
        return of_table(self.ids, self.names, self.sizes, self.members)

    def by_id(self) -> dict[str, int]:
        """Return the places of all sources by their ids."""
        return {identity: place for place, identity in enumerate(self.ids)}

    def is_same(self, place: int | None, other: "Table", there: int | None) -> bool:
        """Tell whether a source has the members of one in another table, which may not have kept by what to tell."""
        if place is None or there is None:
            return False
        known = not self.members or not other.members or self.members[place] == other.members[there]
        return known and self.sizes[place] == other.sizes[there]

    def select(self, places: Sequence[int]) -> "Table":
        """Select the sources at these places, in this order."""
        columns = (self.ids, self.names, self.sizes, self.members)
        return Table(*(tuple(column[i] for i in places) if column else () for column in columns))  # type: ignore[arg-type]

    def write(self, place: Path) -> None:
        """Write the table; refuse one that could not be read again."""
        text = json.dumps({name: column for name, column in asdict(self).items() if column})
        parsed(text.encode(), place)
        write(place, lambda path: path.write_text(text))
