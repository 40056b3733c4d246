"""What somebody who may write to the database can do to a ledger."""

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from imprint.credit import Ledger, tables
from imprint.credit import log as credit_log
from imprint.credit.canonical import decode, encode
from imprint.credit.leaves import Leaf
from imprint.credit.merkle import Frontier, hash_leaf, hash_tree

L = tables.leaves


def run(ledger: Ledger, *statements: Any) -> None:
    with ledger.engine.connect().execution_options(writes=True) as connection, connection.begin():
        for statement in statements:
            if callable(statement):
                statement(connection)
            else:
                connection.execute(statement)


def rewrite(sequence: int, change: Callable[[dict[str, Any]], Any], *, rehash: bool = False) -> Any:
    """Change the header of an entry, and its hash too if asked."""

    def apply(connection: Connection) -> None:
        header = connection.execute(select(L.c.header).where(L.c.sequence == sequence)).scalar_one()
        about = decode(bytes(header))
        change(about)
        values: dict[str, Any] = {"header": encode(about)}
        if rehash:
            values["hash"] = hash_leaf(values["header"])
        connection.execute(update(L).where(L.c.sequence == sequence).values(**values))

    return apply


def change_line(sequence: int, old: bytes, new: bytes) -> Any:
    def apply(connection: Connection) -> None:
        lines = bytes(connection.execute(select(L.c.lines).where(L.c.sequence == sequence)).scalar_one())
        assert old in lines
        connection.execute(update(L).where(L.c.sequence == sequence).values(lines=lines.replace(old, new, 1)))

    return apply


def rebuild(connection: Connection) -> None:
    """Make every hash, node and peak fit the entries again, as an attacker with full access can."""
    frontier, rows = Frontier(), connection.execute(select(L).order_by(L.c.sequence)).all()
    connection.execute(delete(tables.nodes))
    for row in rows:
        hashed = hash_leaf(bytes(row.header))
        connection.execute(update(L).where(L.c.sequence == row.sequence).values(hash=hashed))
        frontier, completed = frontier.extend([hashed])
        for level, index, node in completed:
            if level % credit_log.TILE == 0:
                connection.execute(insert(tables.nodes).values(level=level, index=index, hash=node))
    state = {"size": frontier.size, "peaks": b"".join(frontier.peaks), "time": rows[-1].time}
    connection.execute(update(tables.log).values(**state))


def change_entry(sequence: int, change: Callable[[dict[str, Any], list[dict[str, Any]]], Any]) -> Any:
    """Change the header and the lines of an entry, so that one fits the other."""

    def apply(connection: Connection) -> None:
        leaf = credit_log.make_leaf(connection.execute(select(L).where(L.c.sequence == sequence)).one())
        about, rows = dict(leaf.about), [dict(each) for each in leaf.rows]
        change(about, rows)
        lines = tuple(map(encode, rows))
        root = hash_tree(Leaf(leaf.header, lines, leaf.salt).line_hashes).hex()
        header = encode({**about, "lines": {"count": len(lines), "root": root}})
        values = {"header": header, "lines": b"\n".join(lines)}
        connection.execute(update(L).where(L.c.sequence == sequence).values(**values))

    return apply
