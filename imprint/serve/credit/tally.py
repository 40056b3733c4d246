"""Running totals of a log, per source and day, so that nobody waits until a long log is added up again.

The log only grows, so each entry is read once, compared with its hash, and added. What was changed is left out and
named. A tally knows how far it has come: totals of half a log are refused, not shown.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from sqlalchemy import Connection

from imprint.credit import log, tables
from imprint.credit.contradictions import find_unpayable
from imprint.credit.leaves import Leaf
from imprint.credit.ledger import Ledger
from imprint.credit.periods import Account, Totals
from imprint.credit.policy import Policy
from imprint.serve.credit.faults import find_wrong, read_policy
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

    waiting: queries that the pot of their period pays.
    size: its training examples, by the latest entry.
    """

    earned: int = 0
    clear: int = 0
    judged: int = 0
    waiting: int = 0
    size: int = 0

    def merge(self, other: "Signs") -> None:
        """Add the queries of a later time."""
        self.earned, self.clear = self.earned + other.earned, self.clear + other.clear
        self.judged, self.waiting = self.judged + other.judged, self.waiting + other.waiting
        self.size = other.size or self.size


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
            signs.waiting += about["pot"] is None
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
        self._days, self._months, self._newest = dict[str, Sums](), dict[str, Sums](), ""
        self._running, self._again = Sums(), range(0)
        self._sources = set[str]()
        self._left_out = dict[int, None]()
        self._disputes = list[int]()
        self._policies = dict[str, Policy]()

    def catch_up(self, most: int = AT_ONCE) -> None:
        """Read what was written since; refuse if more is left after so many entries."""
        with self._lock:
            size = self._advance(most)
            if self._again or self._read < size:
                raise Counting(self._again.start if self._again else self._read, size)

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
            size, left = log.read_size(connection), most
            while left and (self._again or self._read < size):
                places = self._again or range(self._read, size)
                left -= self._read_on(connection, places[:left])
        return size

    def _read_on(self, connection: Connection, places: range) -> int:
        """Add entries, up to one that closes a period; return how many were read."""
        is_again = bool(self._again)
        for count, entry in enumerate(read_chunk(connection, places.start, places.stop), 1):
            if entry.leaf is None or not self._add(entry.leaf, is_again):
                self._left_out[entry.sequence] = None
            if is_again:
                self._again = range(entry.sequence + 1, self._again.stop)
            else:
                self._read = entry.sequence + 1
                if self._again:
                    return count
        return len(places)

    def _add(self, leaf: Leaf, is_again: bool) -> bool:
        """Add an entry; False if it cannot be. is_again: whether it was added before, to another period."""
        if leaf.kind == "policy" and not is_again:
            self._policies |= read_policy(leaf)
        if leaf.kind == "credit":
            if find_wrong(leaf, self._policies):
                return False
            self._running.add(leaf)
            if not is_again:
                self._add_to_day(leaf)
        elif leaf.kind == "period" and not is_again:
            # What was written between the end of the period and its closing belongs to the next one.
            self._running, self._first = Sums(), leaf.about["stop"]
            self._again = range(self._first, leaf.sequence)
        elif leaf.kind == "dispute" and not is_again:
            self._disputes.append(leaf.sequence)
        return True

    def _add_to_day(self, leaf: Leaf) -> None:
        """Add a query to its day; and to its month, which has all days but the newest one."""
        day = leaf.about["time"][:10]
        self._sources.update(row["source"] for row in leaf.rows)
        if day > self._newest:
            if self._newest:
                self._months.setdefault(self._newest[:7], Sums()).merge(self._days[self._newest])
            self._newest = day
        elif day < self._newest:
            self._months.setdefault(day[:7], Sums()).add(leaf)
        self._days.setdefault(day, Sums()).add(leaf)

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
            totals = Totals()
            totals.merge(self._running.totals)
            return self._first, self._read, totals

    def running_of(self, source: str) -> tuple[Account, Signs]:
        """Return what is known of a source in the period that is not closed yet."""
        with self._lock:
            sums = self._running
            if source not in sums.totals.sources:
                return Account(), Signs()
            return replace(sums.totals.sources[source]), replace(sums.signs[source])

    def between(self, since: str | None = None, until: str | None = None) -> Sums:
        """Return the sums of the days from one on, and before another, in UTC; of whole months by their sums."""
        with self._lock:
            whole = {
                month
                for month in self._months
                if (since is None or f"{month}-01" >= since) and (until is None or f"{month}-31" < until)
            }
            days = (
                day
                for day in self._days
                if (day[:7] not in whole or day == self._newest)
                and (since is None or day >= since)
                and (until is None or day < until)
            )
            parts = {**{month: self._months[month] for month in whole}, **{day: self._days[day] for day in days}}
            sums = Sums()
            for name in sorted(parts):
                sums.merge(parts[name])
            return sums

    def days(self, source: str) -> Mapping[str, tuple[Account, Signs]]:
        """Return what is known of a source, of each day on which queries were divided among it and others."""
        with self._lock:
            return {
                day: (replace(sums.totals.sources[source]), replace(sums.signs[source]))
                for day, sums in sorted(self._days.items())
                if source in sums.totals.sources
            }

    def sources(self) -> set[str]:
        """Return the ids of all sources in the log."""
        with self._lock:
            return set(self._sources)
