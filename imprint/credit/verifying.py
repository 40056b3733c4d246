"""Verifies a ledger: that no entry was changed, removed, moved or inserted, and that every amount can be recomputed.

What the database says about itself is compared with the leaves, and the leaves with signed heads. Somebody who may
write to the database can rewrite the whole log, with every hash in it. Only a head that was signed before, and that
others hold, reveals that: pass such heads, and the public key of the ledger.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from imprint.credit import log, tables
from imprint.credit.auditing import Audit, Problem
from imprint.credit.confirming import compare_heads, narrow
from imprint.credit.heads import Head, require_heads
from imprint.credit.ledger import Ledger
from imprint.display import count_of
from imprint.keys import PublicKey, load_public_keys
from imprint.runtime.progress import Advance, Progress

if TYPE_CHECKING:
    pass

_MOST = 100  # problems that are listed
_AT_ONCE = 100  # rows that are checked together, with their queries
_UNSIGNED = (
    "No published head was compared: somebody who may write to the database could have rewritten all of it, with the "
    "heads that it keeps. Give the heads that were published, and the public key."
)
_UNCHECKED = "The signatures of heads were not checked: give the public key."


@dataclass(frozen=True)
class Verification:
    """What `verify` has found.

    heads: how many signed heads the log was compared with.
    remarks: what was not compared, or differs between versions.
    """

    entries: int
    heads: int
    problems: tuple[Problem, ...]
    remarks: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether everything is as it was written, as far as it was compared."""
        return not self.problems

    def __repr__(self) -> str:
        rate = f"{self.entries / self.seconds:,.0f} per second" if self.seconds > 0 else ""
        compared = f"{count_of(self.entries, 'entry', 'entries')} and {count_of(self.heads, 'signed head')}, {rate}"
        if self.holds:
            return "\n".join([f"verified: {compared}", *self.remarks])
        listed = [f"  {problem}" for problem in self.problems[:_MOST]]
        more = [f"  and {len(self.problems) - _MOST} more"] * (len(self.problems) > _MOST)
        title = f"verification failed: {count_of(len(self.problems), 'problem')} ({compared})"
        return "\n".join([title, *listed, *more, *self.remarks])


def verify(
    ledger: Ledger,
    *,
    heads: Sequence[Head] = (),
    key: PublicKey | Sequence[PublicKey] | None = None,
    progress: bool | Advance = True,
) -> Verification:
    """Compare every entry of a ledger with its hash, its neighbours, its policy and the signed heads.

    heads: those that were published, beside the ones that the database keeps.
    key: the public key that heads must be signed with, or several if it was exchanged.
    """
    began = time.monotonic()
    keys, heads = load_public_keys(key), require_heads(heads)
    with tables.reading(ledger.engine) as connection:
        audit = Audit(connection, ledger.name)
        audit.check_file()
        known = {(head.content, head.signature): head for head in (*audit.read_heads(), *heads)}.values()
        audit.sizes = {head.size for head in known}
        bar = Progress("verifying", log.read_size(connection), "entries", progress)
        try:
            for rows in _in_chunks(log.read_rows(connection, -(2**63), 2**63 - 1)):
                audit.check_chunk(rows)
                bar.advance(len(rows))
        finally:
            bar.close()
        audit.check_end()
        confirmed = compare_heads(audit, known, heads, keys)
        if (clock := log.describe_clock(connection)) is not None:
            audit.remarks[clock] = None
    problems = tuple(narrow(problem, confirmed) for problem in audit.problems)
    if not heads:
        audit.remarks[_UNSIGNED] = None
    elif audit.entries > confirmed:
        after = count_of(
            audit.entries - confirmed, *(("entry is", "entries are") if problems else ("entry was", "entries were"))
        )
        where = "after the head that still holds" if problems else "written after the newest head that holds"
        advice = "Find out what happened before you sign another one." if problems else "Sign a head."
        audit.remarks[f"{after} {where}: whoever writes to the database can still change them unnoticed. {advice}"] = (
            None
        )
    if audit.given:
        given = count_of(
            audit.given, "query pays a pot that its caller gave", "queries pay a pot that their caller gave"
        )
        audit.remarks[f"{given}: only the caller can say whether it is right."] = None
    if known and not keys:
        audit.remarks[_UNCHECKED] = None
    seconds = time.monotonic() - began
    return Verification(audit.entries, len(known), problems, tuple(audit.remarks), seconds)


def _in_chunks(rows: Iterator[Any]) -> Iterator[list[Any]]:
    chunk = list[Any]()
    for row in rows:
        chunk.append(row)
        if len(chunk) == _AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
