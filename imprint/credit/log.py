"""The append-only log: one gapless sequence of leaves in a database, and a Merkle tree over it.

Of the tree, the nodes at levels 8, 16, 24 … are kept, one for every 256 leaves; the others are folded from them when a
proof needs them. Appending n leaves hashes about n nodes, whatever the size of the log.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, insert, select, update

from imprint.credit import tables
from imprint.credit.leaves import Kind, Leaf, join_lines, split_lines
from imprint.credit.merkle import Frontier, Node, fold
from imprint.errors import CreditError, DamagedLog, first_line

TILE = 8
"""Levels between the nodes that are kept."""
_LAST = 2**62  # beyond any place
_AHEAD = timedelta(minutes=5)  # by which clocks of several machines may differ
_AT_ONCE = 500  # leaves that are read together


def append(connection: Connection, frontier: Frontier, leaves: Sequence[Leaf]) -> None:
    """Append leaves within the transaction of `tables.writing`."""
    larger, completed = frontier.extend(leaf.hash for leaf in leaves)
    rows = [describe_row(leaf) for leaf in leaves]
    connection.execute(insert(tables.leaves), rows)
    if kept := [
        {"level": level, "index": index, "hash": node} for level, index, node in completed if level % TILE == 0
    ]:
        connection.execute(insert(tables.nodes), kept)
    if others := [{"kind": row["kind"], "sequence": row["sequence"]} for row in rows if row["kind"] != "credit"]:
        connection.execute(insert(tables.kinds), others)
    state = {"size": larger.size, "peaks": b"".join(larger.peaks), "time": rows[-1]["time"]}
    connection.execute(update(tables.log).where(tables.log.c.id == 1).values(**state))


def describe_row(leaf: Leaf) -> dict[str, Any]:
    """Return a leaf as a row of the database."""
    return {
        "sequence": leaf.sequence,
        "kind": leaf.kind,
        "time": leaf.about["time"],
        "hash": leaf.hash,
        "header": leaf.header,
        "lines": join_lines(leaf.lines),
        "salt": leaf.salt or None,
    }


def read_size(connection: Connection) -> int:
    """Return how many leaves the log has."""
    return read_state(connection).size


def read_state(connection: Connection) -> Frontier:
    """Return the tree as the row of the log describes it."""
    row = connection.execute(select(tables.log).where(tables.log.c.id == 1)).one_or_none()
    if row is None:
        raise CreditError(f"{tables.describe(connection.engine)} does not contain a ledger.")
    return tables.read_frontier(row.size, row.peaks)


def read_leaf(connection: Connection, sequence: int) -> Leaf:
    """Return one leaf."""
    for leaf in read_leaves(connection, require_place(sequence), sequence + 1):
        return leaf
    raise CreditError(f"there is no entry {sequence}: the log has {read_size(connection)}.")


def require_place(sequence: int) -> int:
    """Return the place of a leaf; refuse what cannot be one."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence < _LAST:
        raise CreditError(f"an entry is named by its number, from 0 on; got {sequence!r}.")
    return sequence


def read_leaves(connection: Connection, start: int, stop: int, kind: Kind | None = None) -> Iterator[Leaf]:
    """Iterate over the leaves from `start` up to `stop`, of one kind or of all; refuse one that was changed.

    What a leaf is, and of when, its hash vouches for; a row whose columns say otherwise is refused too. Credited
    queries, which are nearly all leaves, are chosen by that alone; the others by an index, the table of kinds.
    """
    indexed = None if kind == "credit" else kind
    for row in read_rows(connection, start, stop, indexed):
        leaf = make_leaf(row)
        if not is_unchanged(row, leaf) or indexed not in (None, leaf.kind):
            raise DamagedLog(f"entry {row.sequence} was changed since it was written: run `imprint credit verify`.")
        if kind in (None, leaf.kind):
            yield leaf


def is_unchanged(row: Any, leaf: Leaf) -> bool:
    """Return whether a leaf has its hash and its lines, and the columns of its row say what it says."""
    if tables.read_bytes(row.hash) != leaf.hash:
        return False
    with translated_damage(f"entry {row.sequence}"):
        said = (leaf.about["sequence"], leaf.about["kind"], leaf.about["time"])
        return said == (row.sequence, row.kind, row.time) and leaf.has_its_lines


@contextmanager
def translated_damage(what: str) -> Iterator[None]:
    """Turn the errors that values of a wrong type or name lead to into one line: only a changed entry has such."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise DamagedLog(
            f"{what} cannot be read ({type(error).__name__}: {first_line(error)}): run `imprint credit verify`."
        ) from error


def read_rows(connection: Connection, start: int, stop: int, kind: Kind | None = None) -> Iterator[Any]:
    """Iterate over rows in chunks, because a log may not fit into memory; of one kind by the table of kinds."""
    at, table = start, tables.leaves
    while True:
        query = select(table).where(table.c.sequence >= at, table.c.sequence < stop)
        if kind is not None:
            query = query.where(
                table.c.sequence.in_(select(tables.kinds.c.sequence).where(tables.kinds.c.kind == kind))
            )
        rows = connection.execute(query.order_by(table.c.sequence).limit(_AT_ONCE)).all()
        yield from rows
        if len(rows) < _AT_ONCE:
            return
        at = rows[-1].sequence + 1


def make_leaf(row: Any) -> Leaf:
    """Make a leaf of a row of the database."""
    lines = split_lines(None if row.lines is None else tables.read_bytes(row.lines))
    return Leaf(tables.read_bytes(row.header), lines, b"" if row.salt is None else tables.read_bytes(row.salt))


def read_nodes(connection: Connection) -> Node:
    """Return the nodes of the tree; each tile of 256 is read from the database once."""
    tiles: dict[tuple[int, int], list[bytes]] = {}

    def node(level: int, index: int) -> bytes:
        base = level // TILE * TILE
        first, count = index << level - base, 1 << level - base
        tile = (base, first >> TILE)
        if tile not in tiles:
            tiles[tile] = _read_tile(connection, *tile)
        start = first & (1 << TILE) - 1
        found = tiles[tile][start : start + count]
        if len(found) < count:
            raise DamagedLog(f"the log is damaged: its tree lacks nodes at level {base} from {first} on.")
        return fold(found)

    return node


def _read_tile(connection: Connection, level: int, tile: int) -> list[bytes]:
    """Return up to 256 nodes of a level that is kept, in their order and without a gap."""
    first = tile << TILE
    column, table = (tables.leaves.c.sequence, tables.leaves) if level == 0 else (tables.nodes.c.index, tables.nodes)
    query = select(column, table.c.hash).where(column >= first, column < first + (1 << TILE)).order_by(column)
    rows = connection.execute(query if level == 0 else query.where(tables.nodes.c.level == level)).all()
    if any(row[0] != first + place for place, row in enumerate(rows)):
        raise DamagedLog(f"the log is damaged: its tree has a gap at level {level}, from {first} to {first + 255}.")
    return [tables.read_bytes(row.hash) for row in rows]


def format_time(time: datetime) -> str:
    """Return a time as entries have it: in UTC, to the microsecond, so that texts are ordered as times are."""
    if not isinstance(time, datetime) or time.tzinfo is None:
        raise CreditError(f"pass a timezone-aware datetime, such as datetime.now(UTC); got {time!r}.")
    try:
        return time.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError as error:
        raise CreditError(f"{time} is before the year 1 or after the year 9999 in UTC.") from error


def now_or_last(last: str = "") -> str:
    """Return the time, or that of the last leaf if the clock was set back."""
    return max(format_time(datetime.now(UTC)), last)


def describe_clock(connection: Connection) -> str | None:
    """Say that the last entry lies in the future by the clock of this machine; None if it does not, within minutes."""
    row = connection.execute(select(tables.log.c.size, tables.log.c.time).where(tables.log.c.id == 1)).one_or_none()
    if row is None or str(row.time) <= format_time(datetime.now(UTC) + _AHEAD):
        return None
    time = str(row.time)
    return (
        f"The last entry, {row.size - 1}, is dated {time[:10]} {time[11:19]} UTC, which is in the future by the "
        "clock of this machine: either a clock was ahead when the entry was written, or this one is behind. Until the "
        "clock has passed that time, new entries and closed periods get that date."
    )
