"""The database of a ledger: its tables, and connections that lose nothing.

`leaves` is the log. `payloads` and `requests` hold what leaves know by salted hashes alone, and `heads` what was
signed. `nodes` and `kinds` are derived from the leaves, for speed. `imprint.credit.verifying` compares all of them.
SQLite writes with a write-ahead log and waits for the disk at every commit; PostgreSQL does so by default.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, unquote

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
    create_engine,
    event,
    inspect,
    select,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from imprint.credit.merkle import HASH_BYTES, Frontier
from imprint.errors import CreditError, CreditUnavailable, DamagedLog, first_line

SCHEMA = 1
_PREFIX = "imprint_"
WAIT = 60
"""Seconds that a writer waits for another."""
# PostgreSQL over a network is given up once its machine is silent for half a minute. However long a query of a long log
# takes, the machine that works on it says that it is there.
_SILENCE = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 4, "tcp_user_timeout": 30_000}
_LONGEST_PAUSE = (
    "5min"  # of a writer, who holds the lock of the log: PostgreSQL would wait hours for a machine that is gone
)
_Place = BigInteger().with_variant(Integer, "sqlite")  # of which SQLite makes the key of its own tree
_PRAGMAS = ("synchronous=FULL", "secure_delete=ON", "trusted_schema=OFF")  # the last: no code in a hostile file

metadata = MetaData()
log = Table(  # one row: what it takes to append
    "imprint_log",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("schema", Integer, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("peaks", LargeBinary, nullable=False),
    Column("time", String(32), nullable=False),
)
leaves = Table(
    "imprint_leaves",
    metadata,
    Column("sequence", _Place, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("time", String(32), nullable=False),
    Column("hash", LargeBinary(HASH_BYTES), nullable=False),
    Column("header", LargeBinary, nullable=False),
    Column("lines", LargeBinary),
    Column("salt", LargeBinary),
)
kinds = Table(  # of every leaf but credited queries, among which it would be slow to find
    "imprint_kinds",
    metadata,
    Column("kind", String(16), primary_key=True),
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
)
nodes = Table(  # of the Merkle tree, at levels 8, 16, 24 …
    "imprint_nodes",
    metadata,
    Column("level", Integer, primary_key=True, autoincrement=False),
    Column("index", BigInteger, primary_key=True, autoincrement=False),
    Column("hash", LargeBinary(HASH_BYTES), nullable=False),
)
payloads = Table(  # the queries, kept apart so that they can be erased
    "imprint_payloads",
    metadata,
    Column("sequence", _Place, primary_key=True, autoincrement=False),
    Column("salt", LargeBinary, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("expires", String(32), index=True),
)
requests = Table(  # one for each call that credited something
    "imprint_requests",
    metadata,
    Column("caller", String(200), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("salt", LargeBinary, nullable=False),
    Column("secret", LargeBinary),  # erased with the queries: without it, nobody can test guesses against the digest
    Column("sealed", LargeBinary(HASH_BYTES), nullable=False),
    Column("digest", LargeBinary(HASH_BYTES), nullable=False),
    Column("first", BigInteger, nullable=False, index=True),
    Column("count", Integer, nullable=False),
)
heads = Table(
    "imprint_heads",
    metadata,
    Column("size", BigInteger, primary_key=True, autoincrement=False),
    Column("time", String(32), primary_key=True),
    Column("head", LargeBinary, nullable=False),
    Column("signature", LargeBinary, nullable=False),
)


def connect(place: str | os.PathLike[str], wait: int = WAIT) -> Engine:
    """Return an engine for a database: the path of a SQLite file, or a URL such as postgresql://user@host/name.

    wait: seconds to wait for a connection, or for another writer.
    """
    url = _read_url(place)
    pool: dict[str, Any] = {"pool_timeout": wait, "max_overflow": 50, "execution_options": {"wait": wait}}
    try:
        if url.get_backend_name() != "sqlite":
            given = {"connect_timeout": wait, **_SILENCE}
            arguments = {name: value for name, value in given.items() if name not in url.query}
            return create_engine(url, **pool, pool_pre_ping=True, connect_args=arguments)
        engine = create_engine(url, **pool, connect_args={"timeout": wait})
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise CreditError(f"{_hide(url)} cannot be opened as a database: {first_line(error)}.") from error
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _read_url(place: str | os.PathLike[str]) -> URL:
    text = os.fspath(place)
    if "://" not in text:
        return _make_sqlite_url(Path(text).absolute())
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise CreditError("this is not the URL of a database, such as postgresql://user@host/name.") from error
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in ("sqlite", "postgresql"):
        raise CreditError(f"a ledger is kept in SQLite or PostgreSQL, not in {url.get_backend_name()}.")
    return url


def _make_sqlite_url(path: Path) -> URL:
    """Return the URL of a file; where nothing can be written beside it, as for an auditor, it is only read.

    SQLite reads a write-ahead log there if its index is there too. It ignores the log of a file that it takes for
    immutable, so a file is opened as such only if it has none.
    """
    try:
        writable = not path.is_file() or os.access(path.parent, os.W_OK)
        log, index = (path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-shm"))
    except OSError:
        writable = True
    if writable:
        return URL.create("sqlite", database=str(path))
    if log and not index:
        raise CreditError(
            f"{path} has a write-ahead log that cannot be read where nothing can be written: copy the file and "
            f"{path.name}-wal to a folder of your own."
        )
    query = {"mode": "ro", "uri": "true"} if log else {"mode": "ro", "immutable": "1", "uri": "true"}
    return URL.create("sqlite", database=f"file:{quote(str(path))}", query=query)


def find_file(engine: Engine) -> Path:
    """Return the file of a SQLite database."""
    name = engine.url.database or ""
    return Path(unquote(name.removeprefix("file:")) if name.startswith("file:") else name)


def hide_password(place: str) -> str:
    """Name the place of a database, which is a path or a URL, without its password."""
    return _hide(make_url(place)) if "://" in place else place


def _hide(url: URL) -> str:
    return url.set(query={}).render_as_string(hide_password=True)  # the query may have passwords too


def describe(engine: Engine) -> str:
    """Name a database without its password."""
    return str(find_file(engine)) if is_sqlite(engine) else _hide(engine.url)


def is_sqlite(engine: Engine) -> bool:
    """Check whether a database is a SQLite file."""
    return engine.dialect.name == "sqlite"


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver must not begin transactions by itself
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def write_ahead(engine: Engine) -> None:
    """Give a new SQLite file a write-ahead log, so that readers do not wait for writers."""
    if is_sqlite(engine):
        with translated_errors(engine, "writing"), engine.connect() as connection:
            connection.connection.cursor().execute("PRAGMA journal_mode=WAL")


def _begin_sqlite(connection: Connection) -> None:
    """Begin as a writer where something will be written: two readers that become writers would deadlock."""
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Read one state of the database, whatever others write in the meantime."""
    options = {} if is_sqlite(engine) else {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    with (
        translated_errors(engine, "reading"),
        engine.connect().execution_options(**options) as connection,
        connection.begin(),
    ):
        yield connection


@contextmanager
def writing(engine: Engine) -> Iterator[tuple[Connection, Frontier, str]]:
    """Append as the only writer; yield the connection, the tree so far and the time of its last leaf.

    Commits when the block ends; rolls back if it raises.
    """
    with (
        translated_errors(engine, "writing"),
        engine.connect().execution_options(writes=True) as connection,
        connection.begin(),
    ):
        if not is_sqlite(engine):
            wait = int(engine.get_execution_options()["wait"])
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{wait}s'")
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{_LONGEST_PAUSE}'")
        row = connection.execute(select(log).where(log.c.id == 1).with_for_update()).one_or_none()
        if row is None:
            raise CreditError(f"{describe(engine)} does not contain a ledger.")
        yield connection, read_frontier(row.size, row.peaks), row.time


def read_frontier(size: Any, peaks: Any) -> Frontier:
    """Read the tree that the row of the log describes."""
    content = read_bytes(peaks)
    try:
        return Frontier(size, tuple(content[at : at + HASH_BYTES] for at in range(0, len(content), HASH_BYTES)))
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedLog(f"the log is damaged: {error}.") from error


def read_bytes(value: Any) -> bytes:
    """Return a value of the database that must be bytes: SQLite keeps values of other types in any column."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise DamagedLog(f"the ledger is damaged: it holds a {type(value).__name__} in place of bytes.")


class _Object(NamedTuple):
    """A table, index, view, trigger or rule of a database, and how it is defined as far as that is compared."""

    kind: str
    name: str
    definition: str


def refuse_foreign_objects(connection: Connection) -> None:
    """Refuse a database with triggers, with objects that no ledger has, or without those that every ledger has."""
    sqlite = is_sqlite(connection.engine)
    found, expected = (_list_sqlite(connection), _expect_sqlite()) if sqlite else _list_postgres(connection)
    place = describe(connection.engine)
    if found - expected:
        kind, name, _ = min(found - expected)
        raise DamagedLog(
            f"{place} has a {kind} {name!r} that no ledger has: it could change what is written. Find out who made it."
        )
    if expected - found:
        kind, name, _ = min(expected - found)
        raise DamagedLog(f"{place} lacks the {kind} {name!r} that every ledger has. Find out who removed it.")


def _list_sqlite(connection: Connection) -> frozenset[_Object]:
    """List all triggers, and whatever is called like an object of a ledger or belongs to one; SQLite ignores case."""
    rows = connection.exec_driver_sql("SELECT type, name, tbl_name, sql FROM sqlite_master").all()
    return frozenset(
        _Object(str(row.type), str(row.name), " ".join(f"{row.tbl_name} {row.sql}".split()))
        for row in rows
        if row.type == "trigger" or any(str(name).lower().startswith(_PREFIX) for name in (row.name, row.tbl_name))
    )


@cache
def _expect_sqlite() -> frozenset[_Object]:
    """List the tables and indexes of a new ledger in SQLite."""
    engine = create_engine("sqlite://")
    with engine.begin() as connection:
        metadata.create_all(connection)
        found = _list_sqlite(connection)
    engine.dispose()
    return found


def _list_postgres(connection: Connection) -> tuple[frozenset[_Object], frozenset[_Object]]:
    """List the tables, views, triggers and rules that a ledger in PostgreSQL has, and those it must have."""
    queries = {
        "trigger": "SELECT t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid "
        f"WHERE NOT t.tgisinternal AND c.relname LIKE '{_PREFIX}%%' AND pg_table_is_visible(c.oid)",
        "rule": "SELECT rulename FROM pg_rules "
        f"WHERE tablename LIKE '{_PREFIX}%%' AND schemaname = ANY(current_schemas(false))",
    }
    found = {_Object(kind, row[0], "") for kind in queries for row in connection.exec_driver_sql(queries[kind])}
    inspector, expected = inspect(connection), set[_Object]()
    found |= {_Object("view", name, "") for name in {*inspector.get_view_names()} & set(metadata.tables)}
    tables = set(inspector.get_table_names())
    for table in metadata.tables.values():
        expected.add(_describe_columns(table.name, table.columns.keys(), table.primary_key.columns.keys()))
        if table.name in tables:
            columns = [column["name"] for column in inspector.get_columns(table.name)]
            key = inspector.get_pk_constraint(table.name)["constrained_columns"]
            found.add(_describe_columns(table.name, columns, key))
    return frozenset(found), frozenset(expected)


def _describe_columns(table: str, columns: Sequence[str], key: Sequence[str]) -> _Object:
    return _Object("table", table, f"{', '.join(columns)} by {', '.join(key)}")


def find_damage(connection: Connection) -> list[str]:
    """Return what SQLite finds wrong with its own file, such as an index that lacks rows of its table."""
    if not is_sqlite(connection.engine):
        return []
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA integrity_check(10)")]
    return [] if found == ["ok"] else found


@contextmanager
def translated_errors(engine: Engine, doing: Literal["reading", "writing"]) -> Iterator[None]:
    """Turn errors of the database into one line that says what to do."""
    try:
        yield
    except SQLAlchemyError as error:
        reason = first_line(getattr(error, "orig", None) or error)
        advice = (
            " Nothing was written, or the confirmation was lost: try again, with the same key."
            if doing == "writing"
            else ""
        )
        raise CreditUnavailable(f"{doing} the database {describe(engine)} failed: {reason}.{advice}") from error
