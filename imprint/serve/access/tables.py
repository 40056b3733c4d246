"""The database of keys: its tables, and how to reach it. A SQLite file, or PostgreSQL if several machines serve."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    inspect,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from imprint.credit.opening import make_private_file
from imprint.credit.tables import connect, describe, find_file, is_sqlite, write_ahead
from imprint.errors import AccessError, ConfigurationError, CreditError, first_line

SCHEMA = 1
_WAIT = 5  # seconds for a connection or a lock; a request waits for them
_LOCK = 0x696D7072  # an advisory lock of PostgreSQL, so that two processes do not both make the tables

# Times are seconds since 1970, in UTC. No name begins with "imprint_": a ledger in the same database refuses those.
metadata = MetaData()
about = Table("access_about", metadata, Column("schema", Integer, primary_key=True, autoincrement=False))
keys = Table(
    "access_keys",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("prefix", String(16), nullable=False, index=True),
    Column("hash", LargeBinary(32), nullable=False),
    Column("role", String(16), nullable=False),
    Column("sources", Text, nullable=False),
    Column("created", BigInteger, nullable=False),
    Column("expires", BigInteger),
    Column("revoked", BigInteger),
    Column("last_used", BigInteger),
)
sessions, links = (
    Table(
        name,
        metadata,
        Column("hash", LargeBinary(32), primary_key=True),
        Column("key", String(64), nullable=False, index=True),
        Column("expires", BigInteger, nullable=False),
    )
    for name in ("access_sessions", "access_links")
)


def open_database(place: str | os.PathLike[str], *, make: bool = True) -> Engine:
    """Return an engine for the database of keys, with its tables.

    make: make what is missing, readable to the owner alone; otherwise it is refused.
    """
    try:
        engine = connect(place, wait=_WAIT)
        if not make:
            _refuse_missing(engine)
        make_private_file(engine)
        write_ahead(engine)
    except CreditError as error:
        raise AccessError(f"the database of keys cannot be opened: {error}") from error
    with writing(engine) as connection:
        if not is_sqlite(engine):
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        _make_tables(connection)
    return engine


def _refuse_missing(engine: Engine) -> None:
    """Refuse a database without keys, such as a file that does not exist; connecting would make one."""
    if not is_sqlite(engine) or find_file(engine).is_file():
        with reading(engine) as connection:
            if about.name in inspect(connection).get_table_names():
                return
    raise ConfigurationError(
        f"there are no keys in {describe(engine)}: `imprint serve` prints where those of a service are."
    )


def _make_tables(connection: Connection) -> None:
    there = set(inspect(connection).get_table_names()) & set(metadata.tables)
    if not there:
        metadata.create_all(connection)
        connection.execute(about.insert().values(schema=SCHEMA))
        return
    found = connection.execute(select(about.c.schema)).scalars().all() if about.name in there else []
    if list(found) != [SCHEMA]:
        raise ConfigurationError(
            f"{describe(connection.engine)} holds keys of schema {', '.join(map(str, found)) or 'unknown'}, this "
            f"version reads {SCHEMA}: upgrade imprint."
        )


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Read the database."""
    with _translated_errors(engine), engine.connect() as connection, connection.begin():
        _limit_waiting(connection)
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Write the database: commits when the block ends, rolls back if it raises."""
    options: Any = {"writes": True} if is_sqlite(engine) else {}
    with _translated_errors(engine), engine.connect().execution_options(**options) as connection, connection.begin():
        _limit_waiting(connection)
        yield connection


def _limit_waiting(connection: Connection) -> None:
    """Let nothing in this transaction take long: requests wait for it. SQLite was told when connecting."""
    if not is_sqlite(connection.engine):
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = '{_WAIT}s'")


@contextmanager
def _translated_errors(engine: Engine) -> Iterator[None]:
    try:
        yield
    except SQLAlchemyError as error:
        reason = first_line(getattr(error, "orig", None) or error)
        raise AccessError(f"the database of keys {describe(engine)} cannot be used: {reason}.") from error
