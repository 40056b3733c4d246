"""Keeps queries beside the log for as long as they are wanted, and erases them for good."""

import warnings
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from sqlalchemy import Connection, Engine, delete, insert, select

from imprint.attribution.result import Attribution
from imprint.credit import log, tables
from imprint.credit.drafting import Draft
from imprint.credit.leaves import compose
from imprint.credit.log import format_time, now_or_last
from imprint.credit.payloads import Payloads
from imprint.credit.requests import forget_requests
from imprint.errors import CreditError, ReliabilityWarning

_ERASED_AT_ONCE = 10_000  # payloads, by one leaf


def require_payloads(
    result: Attribution, payloads: Sequence[bytes] | None, retention: timedelta | None
) -> list[bytes | None]:
    """Return the payload of each query; refuse what cannot be kept, and the queries of another result."""
    if payloads is None and retention is not None:
        raise CreditError("retention= says how long to keep payloads, and there are none: give payloads=.")
    if payloads is None:
        return [None] * len(result)
    known = result.labels.fingerprints.get("queries")
    if isinstance(payloads, Payloads) and known is not None and known != payloads.fingerprint:
        raise CreditError("these payloads are not the queries of this result, in their order.")
    if isinstance(payloads, bytes | str) or not isinstance(payloads, Sequence):
        raise CreditError(f"payloads are a list of bytes, one for each query; got a {type(payloads).__name__}.")
    if not all(isinstance(each, bytes) for each in payloads):
        raise CreditError("payloads are bytes, one for each query: imprint.credit.encode_queries makes them.")
    return list(payloads)


def find_expiry(retention: timedelta | None) -> str | None:
    """Return when payloads are to be erased."""
    if retention is None:
        return None
    try:
        if retention <= timedelta(0):
            raise OverflowError
        return format_time(datetime.now(UTC) + retention)
    except (OverflowError, TypeError) as error:
        raise CreditError(f"retention is a positive timedelta of some years at most, got {retention!r}.") from error


def keep_payloads(connection: Connection, first: int, drafts: Sequence[Draft], expires: str | None) -> None:
    """Write the queries of entries from `first` on, with the salts of their hashes."""
    rows = [
        {"sequence": first + at, "salt": draft.payload[0], "payload": draft.payload[1], "expires": expires}
        for at, draft in enumerate(drafts)
        if draft.payload is not None
    ]
    if rows:
        connection.execute(insert(tables.payloads), rows)


def require_places(sequences: Sequence[int]) -> list[int]:
    """Return the places of entries in their order, each once."""
    if isinstance(sequences, str | bytes) or not isinstance(sequences, Iterable):
        raise CreditError(f"entries are named by a list of numbers, got a {type(sequences).__name__}.")
    return sorted({log.require_place(each) for each in sequences})


def erase_queries(engine: Engine, sequences: Sequence[int], reason: str) -> int:
    """Erase the queries of some entries, with the salts of their hashes; return how many there were."""
    if not isinstance(reason, str):
        raise CreditError(f"the reason of an erasure is a text, got a {type(reason).__name__}.")
    count, table = 0, tables.payloads
    for start in range(0, len(sequences), _ERASED_AT_ONCE):
        chosen = table.c.sequence.in_(sequences[start : start + _ERASED_AT_ONCE])
        with tables.writing(engine) as (connection, frontier, last):
            there = sorted(connection.execute(select(table.c.sequence).where(chosen)).scalars())
            if not there:
                continue
            connection.execute(delete(table).where(chosen))
            forget_requests(connection, there)
            about = {"erased": there, "reason": reason}
            log.append(connection, frontier, [compose("erasure", frontier.size, now_or_last(last), about)])
        count += len(there)
    return count


def erase_expired_queries(engine: Engine, until: str) -> int:
    """Erase the queries whose retention ended before a time; return how many there were."""
    count, table = 0, tables.payloads
    query = select(table.c.sequence).where(table.c.expires <= until).order_by(table.c.sequence)
    while True:
        with tables.reading(engine) as connection:
            found = list(connection.execute(query.limit(_ERASED_AT_ONCE)).scalars())
        if not found:
            return count
        count += erase_queries(engine, found, "retention ended")


def vacuum(engine: Engine) -> None:
    """Rewrite a SQLite file without the traces that erased queries may have left in free space."""
    if tables.is_sqlite(engine):
        with tables.translated_errors(engine, "writing"), engine.connect() as connection:
            connection.connection.cursor().execute("VACUUM")
        truncate_wal(engine)


def truncate_wal(engine: Engine) -> None:
    """Remove what was erased from the write-ahead log of SQLite, unless another process is reading."""
    if not tables.is_sqlite(engine):
        return
    with tables.translated_errors(engine, "writing"), engine.connect() as connection:
        cursor = connection.connection.cursor()
        cursor.execute("PRAGMA busy_timeout=2000")
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        busy = bool((cursor.fetchone() or (0,))[0])
    if busy:
        warnings.warn(
            "the queries are erased, but another connection is reading the ledger, so its write-ahead log still holds "
            "them: call erase_expired() again once that has ended.",
            ReliabilityWarning,
            stacklevel=4,
        )
