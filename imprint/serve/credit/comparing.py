"""Divides the queries of a period again, by another policy: who would gain, and who would lose."""

import threading
from dataclasses import dataclass
from typing import Any

from imprint.credit import log, tables
from imprint.credit.drafting import read_evidence
from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.money import PARTS, apportion
from imprint.credit.periods import Totals
from imprint.credit.policy import Policy
from imprint.errors import DamagedLog
from imprint.serve.credit.reading import read_chunk
from imprint.serve.credit.tally import AT_ONCE, Counting, is_payable


@dataclass(frozen=True)
class Change:
    """What a source gets, and what it would get, in micro-units; None where the pot of the period is not known."""

    source: str
    amount: int | None
    other: int | None
    share: float
    other_share: float


@dataclass(frozen=True)
class Compared:
    """Some queries, as they were divided and by another policy.

    queries: those that were compared; of a pot for the whole period, amounts are what it pays for these alone.
    refused: queries that answer another question than the policy pays for; they are in neither column.
    left_out: entries that were changed, and are in neither column.
    """

    policy: Policy
    queries: int
    refused: int
    left_out: int
    rows: tuple[Change, ...]
    unattributed: Change


class Comparison:
    """Divides queries again, entry by entry, so that a request can stop and the next one goes on."""

    def __init__(self, ledger: Ledger, policy: Policy, first: int) -> None:
        self._ledger, self.policy, self.first = ledger, policy, first
        self._lock, self._read, self._refused, self._left_out = threading.Lock(), first, 0, 0
        self._before, self._after = Totals(), Totals()

    def passed(self, stop: int) -> bool:
        """Tell whether it went beyond a place, so that it cannot end there."""
        with self._lock:
            return self._read > stop

    def finish(self, stop: int, pot: int | None, waiting: int = 0, most: int = AT_ONCE) -> Compared:
        """Return the comparison of the entries up to a place; refuse if more is left after so many entries.

        pot: what the queries without a pot of their own share; None if the period is not closed.
        waiting: how many queries share it, by the entry that closed the period.
        """
        with self._lock, tables.reading(self._ledger.engine) as connection:
            end = min(stop, self._read + most)
            for found in read_chunk(connection, self._read, end):
                leaf = found.leaf
                if leaf is None or (leaf.kind == "credit" and not self._add(leaf)):
                    self._left_out += 1
                self._read = found.sequence + 1
            if self._read < stop:
                raise Counting(self._read - self.first, stop - self.first)
            with log.translated_damage("what was credited"):
                return self._compare(None if pot is None else self._find_part(pot, waiting))

    def _add(self, leaf: Leaf) -> bool:
        """Add a query; False if it was written by hand, so that it cannot be divided."""
        if not is_payable(leaf):
            return False
        if leaf.about["question"] != self.policy.question:
            self._refused += 1
            return True
        try:
            with log.translated_damage(f"entry {leaf.sequence}"):
                again = divide_again(leaf, self.policy)
        except DamagedLog:
            return False
        self._before.add_lines(leaf.about, leaf.rows)
        self._after.add_lines(*again)
        return True

    def _find_part(self, pot: int, waiting: int) -> int:
        """Return what a pot for the whole period pays for the queries that are compared: all have equal parts."""
        compared = self._before.without_pot
        return apportion(pot, [compared, max(0, waiting - compared)])[0] if compared else 0

    def _compare(self, pot: int | None) -> Compared:
        before, after = (_divide_pot(totals, pot) for totals in (self._before, self._after))
        is_known = pot is not None or not before.without_pot
        names = sorted({*before.sources, *after.sources})
        rows = tuple(
            _describe(name, before, after, before.sources[name], after.sources[name], is_known) for name in names
        )
        rest = _describe("", before, after, before.unattributed, after.unattributed, is_known)
        return Compared(self.policy, before.entries, self._refused, self._left_out, rows, rest)


def _divide_pot(totals: Totals, pot: int | None) -> Totals:
    """Return totals with the pot of their period in them, if they have queries that wait for one."""
    whole = Totals()
    whole.merge(totals)
    if pot is not None and whole.without_pot:
        whole.divide(pot)
    return whole


def _describe(name: str, before: Totals, after: Totals, one: Any, other: Any, is_known: bool) -> Change:
    return Change(
        name,
        one.amount if is_known else None,
        other.amount if is_known else None,
        find_share(before, one, is_known),
        find_share(after, other, is_known),
    )


def find_share(totals: Totals, account: Any, is_known: bool) -> float:
    """Return the share of an account, from 0 to 1: of what was paid, or of the queries that wait for a pot."""
    if is_known:
        return account.amount / totals.pot if totals.pot else 0.0
    return account.parts / (totals.without_pot * PARTS) if totals.without_pot else 0.0


def divide_again(leaf: Leaf, policy: Policy) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the lines of a query as they would be under another policy."""
    about, division = leaf.about, policy.divide(read_evidence(leaf))
    weights, pot = [*division.shares, division.unattributed], about["pot"]
    amounts: list[int | None] = [None] * len(weights) if pot is None else [*apportion(pot, weights)]
    rows = [
        {**row, "share": share, "amount": amount}
        for row, share, amount in zip(leaf.rows, division.shares, amounts, strict=False)
    ]
    rest = {"share": division.unattributed, "amount": amounts[-1]}
    return {**about, "rule": division.rule, "reason": division.reason, "unattributed": rest}, rows
