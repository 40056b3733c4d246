"""Running totals of a log, per source and day, so that nobody waits until a long log is added up again.

The log only grows, so each entry is read once, compared with its hash, and added. What was changed is left out and
named. A tally knows how far it has come: totals of half a log are refused, not shown.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from imprint.credit import log, tables
from imprint.credit.contradictions import find_unpayable
from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.periods import Totals
from imprint.serve.credit.reading import read_chunk
from imprint.serve.errors import ApiError
from imprint.statistics import student_quantile

AT_ONCE = 4_000
"""Entries that one request reads at most to bring totals up to date."""
_CHUNK = 500
_MANY = 200  # degrees of freedom, beyond which quantiles hardly change


class Counting(ApiError):
    """Totals are not ready: some of the log is still to be read."""

    def __init__(self, read: int, size: int) -> None:
        text = f"the log is being added up: {read:,} of {size:,} entries so far. Try again in a moment."
        super().__init__(503, "counting", text, {"Retry-After": "2"})


@dataclass
class Signs:
    """How many queries credited a source, and how many effects of it can be told from chance, of those that are known.

    size: its training examples, by the latest entry.
    """

    earned: int = 0
    clear: int = 0
    judged: int = 0
    size: int = 0

    def merge(self, other: "Signs") -> None:
        """Add the queries of a later time."""
        self.earned, self.clear = self.earned + other.earned, self.clear + other.clear
        self.judged, self.size = self.judged + other.judged, other.size or self.size


@dataclass
class Sums:
    """Totals of some entries, and what else is known of each source."""

    totals: Totals = field(default_factory=Totals)
    signs: defaultdict[str, Signs] = field(default_factory=lambda: defaultdict(Signs))

    def add(self, leaf: Leaf) -> None:
        """Add a credited query."""
        about = leaf.about
        self.totals.add_lines(about, leaf.rows)
        for row in leaf.rows:
            signs = self.signs[row["source"]]
            signs.earned += row["share"] > 0
            signs.size = row["size"]
            if row["error"] is not None:
                signs.judged += 1
                signs.clear += is_clear(row["helps"], row["error"], about["freedom"])

    def merge(self, other: "Sums") -> None:
        """Add those of a later time."""
        self.totals.merge(other.totals)
        for name, signs in other.signs.items():
            self.signs[name].merge(signs)


def is_clear(helps: float, error: float, freedom: int | None) -> bool:
    """Tell whether the 95% interval of an effect leaves out 0."""
    return abs(helps) > _find_quantile(min(freedom or _MANY, _MANY)) * error


@cache
def _find_quantile(freedom: int) -> float:
    return student_quantile(freedom, 0.95)


def is_payable(leaf: Leaf) -> bool:
    """Tell whether a credited query can be paid; one that was written by hand, with its hash, may not."""
    return not any(find_unpayable(leaf.about, leaf.rows))


class Tally:
    """Adds up a log as it grows. For several threads.

    left_out: places of entries that were changed, and are in no total.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._lock = ledger, threading.Lock()
        self._read, self._first = 0, 0
        self._days = dict[str, Sums]()
        self._running = Sums()
        self._left_out = dict[int, None]()
        self._disputes = list[int]()

    def catch_up(self, most: int = AT_ONCE) -> None:
        """Read what was written since; refuse if more is left after so many entries."""
        with self._lock:
            size = self._advance(most)
            if self._read < size:
                raise Counting(self._read, size)

    def read_all(self, stop: Callable[[], bool]) -> None:
        """Read the whole log, in turn with requests that wait for it, until told to stop."""
        while not stop():
            try:
                self.catch_up(_CHUNK)
                return
            except Counting:
                continue

    def _advance(self, most: int) -> int:
        with tables.reading(self._ledger.engine) as connection:
            size = log.read_size(connection)
            end = min(size, self._read + most)
            for found in read_chunk(connection, self._read, end):
                if found.leaf is None or not self._add(connection, found.leaf):
                    self._left_out[found.sequence] = None
                self._read = found.sequence + 1
        return size

    def _add(self, connection: Any, leaf: Leaf) -> bool:
        """Add an entry; False if it cannot be."""
        if leaf.kind == "credit":
            if not is_payable(leaf):
                return False
            self._days.setdefault(leaf.about["time"][:10], Sums()).add(leaf)
            self._running.add(leaf)
        elif leaf.kind == "period":
            self._begin_period(connection, leaf.about["stop"], leaf.sequence)
        elif leaf.kind == "dispute":
            self._disputes.append(leaf.sequence)
        return True

    def _begin_period(self, connection: Any, first: int, closing: int) -> None:
        """Begin the totals of the next period, with what was written between the end of the last and its closing."""
        self._running, self._first = Sums(), first
        for found in read_chunk(connection, first, closing):
            if found.leaf is not None and found.leaf.kind == "credit" and found.sequence not in self._left_out:
                self._running.add(found.leaf)

    @property
    def left_out(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._left_out)

    @property
    def disputes(self) -> tuple[int, ...]:
        """The places of entries that note disputes."""
        with self._lock:
            return tuple(self._disputes)

    def running(self) -> tuple[int, int, Totals]:
        """Return the first entry of the period that is not closed yet, how far it goes, and its totals."""
        with self._lock:
            found = Totals()
            found.merge(self._running.totals)
            return self._first, self._read, found

    def between(self, since: str | None = None, until: str | None = None) -> Sums:
        """Return the sums of the days from one on, and before another, in UTC."""
        with self._lock:
            found = Sums()
            for day in sorted(self._days):
                if (since is None or day >= since) and (until is None or day < until):
                    found.merge(self._days[day])
            return found

    def days(self, source: str) -> Mapping[str, tuple[int, int, int, int]]:
        """Return the queries of each day, how many credited a source, its amount, and what a rule by size would pay."""
        with self._lock:
            found = {}
            for day in sorted(self._days):
                sums = self._days[day]
                if source in sums.totals.sources:
                    account = sums.totals.sources[source]
                    found[day] = (account.entries, sums.signs[source].earned, account.amount, account.by_size)
            return found

    def sources(self) -> set[str]:
        """Return the ids of all sources in the log."""
        with self._lock:
            return {name for sums in self._days.values() for name in sums.totals.sources}
