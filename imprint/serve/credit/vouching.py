"""Tells which entries the signed heads of a ledger vouch for, as the log is now, without verifying all of it.

A head that the log still leads to vouches for every entry before it. Where the newest one does not hold any more, the
heads before it bound what was changed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from imprint.credit.heads import Head
from imprint.credit.merkle import Node, find_root
from imprint.errors import CreditError, CreditUnavailable


@dataclass(frozen=True)
class Vouched:
    """How far heads vouch for the log.

    size: of the newest head; 0 without one.
    holding: the newest head that the log leads to; None if there is none.
    broken: the oldest head that it does not lead to; None if it leads to all.
    """

    size: int = 0
    holding: Head | None = None
    broken: Head | None = None

    @property
    def confirmed(self) -> int:
        """How many entries, from the beginning, a head vouches for."""
        return 0 if self.holding is None else self.holding.size

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and the last of the entries among which one was changed; None if every head holds."""
        return None if self.broken is None else (self.confirmed, self.broken.size - 1)

    def judge(self, sequence: int, spans: Sequence[tuple[int, int]]) -> str:
        """Say whether a head vouches for an entry. spans: of entries among which something was found to be changed."""
        if any(first <= sequence <= last for first, last in spans):
            return "not confirmed"
        if sequence < self.confirmed:
            return "yes"
        return "not confirmed" if sequence < self.size else "not yet"


def find_vouched(heads: Sequence[Head], name: str, node: Node) -> Vouched:
    """Compare a log with its heads, in the order of their sizes: the newest one, or else as few as it takes."""
    known = [head for head in heads if head.size > 0]
    if not known:
        return Vouched()
    if _holds(known[-1], name, node):
        return Vouched(known[-1].size, known[-1])
    place = bisect_left(known, True, key=lambda head: not _holds(head, name, node))
    return Vouched(known[-1].size, known[place - 1] if place else None, known[min(place, len(known) - 1)])


def _holds(head: Head, name: str, node: Node) -> bool:
    """Tell whether the tree leads to a head; one with a gap, or that is too short, does not."""
    try:
        return head.log == name and find_root(head.size, node) == head.root
    except CreditUnavailable:
        raise
    except (CreditError, ValueError, IndexError):
        return False
