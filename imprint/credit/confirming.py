"""Compares a log with signed heads, says which entries they vouch for, and narrows down where a change lies.

A head vouches for all entries before it at once. One that still holds bounds a change from below, one that does not
bounds it from above. A head that only the database has counts if its signature was checked: whoever writes to the
database can put one there.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from imprint.credit.auditing import UNREADABLE, Audit, Problem
from imprint.credit.heads import Head

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey


def compare_heads(
    audit: Audit, heads: Collection[Head], published: Collection[Head], keys: "Sequence[Ed25519PublicKey]"
) -> int:
    """Compare a log with signed heads; return how many entries, from the beginning, they vouch for.

    published: those that do not come from the database.
    """
    vouched, broken = set[int](), list[Head]()
    for head in sorted(heads, key=lambda head: head.size):
        try:
            if keys:
                head.check(*keys)
            if head.log != audit.name:
                audit.add(f"{_describe(head)}, of another log: {head.log}")
            elif head.size > audit.frontier.size:
                why = "entries are missing" if audit.broken else f"there are {audit.frontier.size}"
                audit.add(f"{_describe(head)}, and {why}: the log was cut short")
            elif head.size < 0:
                audit.add(f"{_describe(head)}, which no log has")
            elif head.size and audit.roots.get(head.size) != head.root:
                broken.append(head)
            elif keys or head in published:
                vouched.add(head.size)
        except UNREADABLE as error:
            audit.add(f"a head does not hold: {error}")
    if not broken:
        return max(vouched, default=0)
    confirmed = max((size for size in vouched if size < broken[0].size), default=0)
    _report(audit, broken, confirmed)
    return confirmed


def _report(audit: Audit, broken: Sequence[Head], confirmed: int) -> None:
    """Note heads that the log does not lead to any more; the first of them bounds what was changed."""
    span = (confirmed, broken[0].size - 1)
    among = f"one of entries {span[0]} to {span[1]} was" if span[0] < span[1] else f"entry {span[0]} was"
    still = f"; the head of {confirmed} entries still holds" if confirmed else ""
    audit.add(
        f"{_describe(broken[0])}, with another root: {among} changed, removed or inserted since{still}", span=span
    )
    for head in broken[1:]:
        audit.add(f"{_describe(head)}, with another root: it covers the same entries")


def _describe(head: Head) -> str:
    return f"a head of {head.size} entries was signed at {head.time}"


def narrow(problem: Problem, confirmed: int) -> Problem:
    """Leave out of the entries among which something was changed those that a signed head vouches for."""
    if problem.span is None or problem.span[0] >= confirmed:
        return problem
    first, last = max(problem.span[0], confirmed), problem.span[1]
    suspects = tuple(place for place in problem.suspects if place >= confirmed)
    return replace(problem, span=(first, last) if first <= last else None, suspects=suspects)
