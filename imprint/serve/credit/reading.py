"""Reads entries of a log for people: from the newest on, by filters, in bounded work, and never past a changed one.

Nearly all entries have all sources, so filters go through the log from its end, a window at a time. The database looks
for the bytes that an entry which matches must have; what it finds is compared with its hash, and filtered exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, func, literal, or_, select

from imprint.credit import log, tables
from imprint.credit.canonical import encode
from imprint.credit.leaves import Leaf
from imprint.errors import CreditError
from imprint.serve.credit.shapes import has_shape

WINDOW, UNSEARCHED = 100_000, 2_000
"""How many places of the log one page of filtered entries may go through; and if the database cannot look for the
sources, so that each entry is read."""
_SEARCHED = 100  # sources that the database looks for; SQLite has a limit of about 1,000


@dataclass(frozen=True)
class Found:
    """An entry as the database has it; without its content where that was changed."""

    sequence: int
    leaf: Leaf | None


@dataclass(frozen=True)
class Filters:
    """Which credited queries are wanted; times are texts as entries have them.

    sources: one of them has a line.
    since, until: from a time on, and before one.
    """

    sources: frozenset[str] | None = None
    since: str | None = None
    until: str | None = None
    rule: str | None = None
    query: str | None = None

    def match(self, leaf: Leaf) -> bool:
        """Tell whether an entry is wanted."""
        about = leaf.about
        return (
            leaf.kind == "credit"
            and (self.since is None or about["time"] >= self.since)
            and (self.until is None or about["time"] < self.until)
            and self.rule in (None, about["rule"])
            and self.query in (None, about["query"])
            and (self.sources is None or any(row["source"] in self.sources for row in leaf.rows))
        )


@dataclass(frozen=True)
class Page:
    """Some entries, the newest first. before: where the next page begins; None at the beginning of the log."""

    entries: tuple[Found, ...]
    before: int | None


def read_page(connection: Connection, filters: Filters, before: int | None, limit: int) -> Page:
    """Return the newest wanted entries before some place.

    A page may have fewer than `limit` although there are more: it ends where so many places were searched. An entry
    that was changed matches every filter.
    """
    size = log.read_size(connection)
    stop = size if before is None else min(before, size)
    if filters.until is not None:
        stop = min(stop, find_place(connection, filters.until, size))
    begin = 0 if filters.since is None else find_place(connection, filters.since, size)
    start = max(begin, stop - (WINDOW if _can_search(filters) else UNSEARCHED))
    entries = list[Found]()
    at = stop
    while at > start and len(entries) < limit:
        rows = _read_rows_before(connection, filters, start, at, limit - len(entries))
        for row in rows:
            one = check_row(row)
            if one.leaf is None or filters.match(one.leaf):
                entries.append(one)
        at = rows[-1].sequence if rows else start
    return Page(tuple(entries), at if at > begin else None)


def _read_rows_before(connection: Connection, filters: Filters, start: int, stop: int, limit: int) -> list[Any]:
    table = tables.leaves
    query = select(table).where(table.c.sequence >= start, table.c.sequence < stop, table.c.kind == "credit")
    wanted = {name: value for name, value in (("rule", filters.rule), ("query", filters.query)) if value is not None}
    for name, value in wanted.items():
        query = query.where(_contains(connection, table.c.header, {name: value}))
    if filters.sources is not None and _can_search(filters):
        query = query.where(
            or_(False, *(_contains(connection, table.c.lines, {"source": each}) for each in sorted(filters.sources)))
        )
    return list(connection.execute(query.order_by(table.c.sequence.desc()).limit(limit)).all())


def _can_search(filters: Filters) -> bool:
    return len(filters.sources or ()) <= _SEARCHED


def _contains(connection: Connection, column: ColumnElement[Any], value: dict[str, str]) -> ColumnElement[bool]:
    """Return the condition that some bytes contain a field of a canonical object."""
    part = literal(encode(value)[1:-1])
    if tables.is_sqlite(connection.engine):
        return func.instr(column, part) > 0
    return func.position(part.op("IN")(column)) > 0


def check_row(row: Any) -> Found:
    """Return an entry; without its content if that differs from its hash or its row, or lacks what its kind has."""
    try:
        with log.translated_damage(f"entry {row.sequence}"):
            leaf = log.make_leaf(row)
            is_whole = log.is_unchanged(row, leaf) and has_shape(leaf)
    except CreditError:
        return Found(row.sequence, None)
    return Found(row.sequence, leaf if is_whole else None)


def read_one(connection: Connection, sequence: int) -> Found | None:
    """Return the entry at a place; None if there is none."""
    rows = list(log.read_rows(connection, sequence, sequence + 1))
    return check_row(rows[0]) if rows else None


def read_chunk(connection: Connection, start: int, stop: int) -> Iterator[Found]:
    """Iterate over entries in their order; one that is missing comes without its content."""
    expected = start
    for row in log.read_rows(connection, start, stop):
        for missing in range(expected, row.sequence):
            yield Found(missing, None)
        expected = row.sequence + 1
        yield check_row(row)
    for missing in range(expected, stop):
        yield Found(missing, None)


def find_place(connection: Connection, time: str, size: int) -> int:
    """Return the place of the first entry from a time on, by bisection: entries are in the order of their times."""
    low, high, table = 0, size, tables.leaves
    while low < high:
        middle = (low + high) // 2
        known = connection.execute(select(table.c.time).where(table.c.sequence == middle)).scalar_one_or_none()
        if known is not None and known >= time:
            high = middle
        else:
            low = middle + 1
    return low
