"""How a store was changed after it was made: a list in its manifest, to which every change adds an entry.

The manifest is replaced as a whole, with its checksum, so that a change and its entry come together or not at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from imprint.display import count_of, name_some
from imprint.store.records import Checksum
from imprint.store.values import Value

MOST = 100  # changes that are kept, and ids that each of them names
_NAMED = 4  # ids in a line

Kind = Literal["updated", "dropped", "merged"]


def _read_ids(value: Value) -> tuple[str, ...]:
    if len(ids := value.texts()) > MOST:
        value.refuse(f"at most {MOST} ids")
    return ids


_Ids = Annotated[tuple[str, ...], _read_ids]


@dataclass(frozen=True)
class Revision:
    """One change of a store.

    before: the checksums of the stores that it was made from: the one that it replaced, or those that were merged.
    added, dropped: how many sources; `added_ids`, `dropped_ids` are the first of them.
    checkpoints: how many were added.
    versions: of everything that imprints simulated with the change depend on.
    """

    time: str
    kind: Kind
    before: tuple[Checksum, ...]
    added: int
    dropped: int
    added_ids: _Ids
    dropped_ids: _Ids
    checkpoints: int
    versions: dict[str, str]

    def __str__(self) -> str:
        parts = [
            f"{count_of(count, 'source')} {what} ({name_some(list(ids), _NAMED)})"
            for count, what, ids in (
                (self.dropped, "dropped", self.dropped_ids),
                (self.added, "added", self.added_ids),
            )
            if count and self.kind != "merged"
        ]
        if self.kind == "merged":
            parts.append(f"{len(self.before)} stores merged, {count_of(self.added, 'source')}")
        parts += [f"{count_of(self.checkpoints, 'checkpoint')} added"] * bool(self.checkpoints)
        return f"{self.time}: {', '.join(parts) or 'the table of sources was written anew'}"


def extend_history(history: Sequence[Revision], forgotten: int, new: Revision) -> tuple[tuple[Revision, ...], int]:
    """Add a change; return how many are no longer kept, too."""
    every = (*history, new)
    return every[-MOST:], forgotten + max(0, len(every) - MOST)
