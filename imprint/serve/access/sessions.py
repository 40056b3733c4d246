"""Sessions of pages, and the links that open one: tokens of which the database knows a hash.

A session ends when it expires, at logout, and with its key.
"""

from sqlalchemy import Connection, Table, and_, select

from imprint.serve.access import tables
from imprint.serve.access.keys import KeyRecord, read_record
from imprint.serve.access.secret import hash_secret, make_token

LINK_SECONDS = 15 * 60
_MOST = 100  # sessions of a key, and links; the oldest are dropped


def open_session(connection: Connection, key: str, now: float, seconds: float) -> str:
    """Return the token of a new session of a key."""
    return _insert(connection, tables.sessions, key, now, seconds)


def find_session(connection: Connection, token: str, now: float) -> tuple[KeyRecord, float] | None:
    """Return the key of a session, and when it ends; None without such a session."""
    mine = tables.sessions
    joined = select(tables.keys, mine.c.expires.label("ends")).join_from(
        mine, tables.keys, mine.c.key == tables.keys.c.name
    )
    row = connection.execute(joined.where(and_(mine.c.hash == hash_secret(token), mine.c.expires > now))).one_or_none()
    return None if row is None else (read_record(row), float(row.ends))


def list_hashes(connection: Connection, now: float) -> set[bytes]:
    """Return what is stored of the tokens of all sessions that have not expired."""
    mine = tables.sessions.c
    return {bytes(each) for each in connection.execute(select(mine.hash).where(mine.expires > now)).scalars()}


def end_session(connection: Connection, token: str) -> None:
    """End a session, if there is one."""
    connection.execute(tables.sessions.delete().where(tables.sessions.c.hash == hash_secret(token)))


def make_link(connection: Connection, key: str, now: float) -> str:
    """Return the token of a link that opens one session of a key."""
    return _insert(connection, tables.links, key, now, LINK_SECONDS)


def use_link(connection: Connection, token: str, now: float) -> str | None:
    """Use a link up, and return the name of its key; None if it was used, or has expired."""
    mine = tables.links
    row = connection.execute(select(mine).where(and_(mine.c.hash == hash_secret(token), mine.c.expires > now))).first()
    used = connection.execute(mine.delete().where(mine.c.hash == hash_secret(token)))
    return None if row is None or used.rowcount != 1 else str(row.key)  # of two that use it at once, one deletes it


def _insert(connection: Connection, table: Table, key: str, now: float, seconds: float) -> str:
    token = make_token()
    connection.execute(table.delete().where(table.c.expires <= now))
    connection.execute(table.insert().values(hash=hash_secret(token), key=key, expires=int(now + seconds)))
    mine = select(table.c.hash).where(table.c.key == key).order_by(table.c.expires.desc(), table.c.hash)
    old = connection.execute(mine.offset(_MOST)).scalars().all()
    if old:
        connection.execute(table.delete().where(table.c.hash.in_(old)))
    return token
