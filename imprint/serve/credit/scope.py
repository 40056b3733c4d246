"""What somebody may see of the ledger: everything, or the lines of some sources alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from imprint.serve.access.roles import Identity


@dataclass(frozen=True)
class Scope:
    """Which sources' lines may be shown; None for all of them.

    Of an entry, everybody may see the header: what a query paid, by which rule, and what stayed unattributed. That is
    what statements show too.
    """

    sources: frozenset[str] | None = None

    @classmethod
    def of(cls, identity: Identity) -> "Scope":
        """Return what a key may see."""
        return cls(None if identity.may("see_credit") else frozenset(identity.sources))

    @property
    def is_all(self) -> bool:
        return self.sources is None

    def sees(self, source: str) -> bool:
        """Tell whether the line of a source may be shown."""
        return self.sources is None or source in self.sources

    def choose(self, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the lines that may be shown."""
        return [row for row in rows if self.sees(row["source"])]

    def narrow(self, wanted: Sequence[str] = ()) -> frozenset[str] | None:
        """Return the sources to look for, of those that are wanted; None for all there are."""
        if not wanted:
            return self.sources
        return frozenset(name for name in wanted if self.sees(name))
