"""Opens and makes the database of a ledger, and refuses what is none."""

import os
from shlex import quote

from sqlalchemy import Connection, Engine, inspect, select

from imprint.credit import tables
from imprint.errors import CreditError


def check_schema(connection: Connection) -> None:
    """Refuse a database without a ledger, with one of another version, or with objects that no ledger has."""
    if not inspect(connection).has_table(tables.log.name):
        raise CreditError(
            f"{tables.describe(connection.engine)} does not contain a ledger: `imprint credit create` makes one."
        )
    tables.refuse_foreign_objects(connection)
    schema = connection.execute(select(tables.log.c.schema).where(tables.log.c.id == 1)).scalar_one_or_none()
    if schema != tables.SCHEMA:
        raise CreditError(
            f"{tables.describe(connection.engine)} has schema {schema}, this version reads {tables.SCHEMA}: upgrade "
            "imprint."
        )


def refuse_tables(connection: Connection) -> None:
    """Refuse a database that has some of the tables."""
    place, there = tables.describe(connection.engine), set(inspect(connection).get_table_names())
    if tables.log.name in there:
        raise CreditError(f"{place} already contains a ledger. Open it with Ledger(...).")
    if both := there & set(tables.metadata.tables):
        raise CreditError(f"{place} has another table called {min(both)}: use another database.")


def refuse_missing_file(engine: Engine) -> None:
    """Refuse to open a SQLite file that does not exist; connecting would make one."""
    if tables.is_sqlite(engine) and not tables.find_file(engine).is_file():
        file = tables.find_file(engine)
        raise CreditError(f"there is no ledger {file}: `imprint credit create -l {quote(str(file))}` makes one.")


def make_private_file(engine: Engine) -> None:
    """Make the file of a new SQLite ledger, which will hold queries, readable to its owner alone."""
    if not tables.is_sqlite(engine):
        return
    place = tables.find_file(engine)
    try:
        if place.exists() and place.stat().st_size == 0:
            place.chmod(0o600)
        os.close(os.open(place, os.O_WRONLY | os.O_CREAT, 0o600))
    except OSError as error:
        raise CreditError(f"could not write {place}: {error.strerror or error}.") from error
