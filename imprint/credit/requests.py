"""Makes requests idempotent, so that a caller can try again without paying twice.

A request is known by its caller and its key. The same request again returns the entries that the first one wrote;
another request with the same key is a conflict. A request that is still being written makes the next one wait. Entries
carry a salted hash of their request, so that nobody can remove, change or redirect one unnoticed: who asked by which
key, the hash of what was asked, and that of the secret which went into it.

What was asked is described from the result and the policy, or given by the caller: a service gives what it was sent,
which no restart changes, so that it knows a repeated request before it computes anything.
"""

import hashlib
import re
import secrets
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from sqlalchemy import Connection, insert, select, update

from imprint.attribution.result import Attribution
from imprint.credit import log, tables
from imprint.credit.canonical import encode
from imprint.credit.leaves import Leaf
from imprint.credit.policy import Policy
from imprint.errors import ConflictError, CreditError

PLAIN_NAME = re.compile(r"[!-~]{1,200}")
"""Names of callers and keys: printable ASCII without spaces."""
_SALT = 32
_LARGEST = 100_000  # queries of one request


def require_name(name: str, what: str) -> str:
    """Return the name of a caller or a key; refuse one that is not plain."""
    if not isinstance(name, str) or not PLAIN_NAME.fullmatch(name):
        raise CreditError(f"a {what} has 1 to 200 printable ASCII characters without spaces, got {name!r}.")
    return name


def spread_pots(pot: int | Sequence[int] | None, count: int) -> list[int | None]:
    """Return the pot of each query."""
    if count > _LARGEST:
        raise CreditError(f"a request has at most {_LARGEST:,} queries, got {count:,}: credit them in parts.")
    if pot is None or (isinstance(pot, Integral) and not isinstance(pot, bool)):
        return [None if pot is None else int(pot)] * count
    if isinstance(pot, bool | float | str | bytes) or not isinstance(pot, Sequence):
        raise CreditError(f"a pot is a whole number of micro-units, or one for each query; got {pot!r}.")
    return [int(each) if isinstance(each, Integral) and not isinstance(each, bool) else each for each in pot]


def describe_request(
    result: Attribution,
    policy: Policy,
    pots: Sequence[int | None],
    ids: Sequence[str] | None,
    payloads: Sequence[bytes] | None,
    model: str | None,
) -> bytes:
    """Return what the caller asked for, in bytes.

    If payloads are given, scores are left out, because recomputed scores may differ in the last digit.
    """
    labels = result.labels
    asked = None if payloads is None else [hashlib.sha256(each).hexdigest() for each in payloads]
    scores = None if asked is not None else hashlib.sha256(result.scores.double().cpu().numpy().tobytes()).hexdigest()
    return encode(
        {
            "store": labels.fingerprints.get("store"),
            "sources": list(labels.source_ids),
            "measure": labels.measure,
            "policy": policy.sha256,
            "pots": list(pots),
            "ids": None if ids is None else list(ids),
            "asked": asked,
            "scores": scores,
            "model": model,
        }
    )


def require_asked(asked: bytes) -> bytes:
    """Return what a caller asked for in its own words, so marked that no description is the same."""
    if not isinstance(asked, bytes):
        raise CreditError(f"what was asked is given in bytes, got a {type(asked).__name__}.")
    return b"asked:" + asked


def find_request(connection: Connection, caller: str, key: str) -> Any:
    """Return the row of a request; None if it is new."""
    table = tables.requests
    return connection.execute(select(table).where(table.c.caller == caller, table.c.key == key)).one_or_none()


def find_entries(connection: Connection, caller: str, key: str, content: bytes, count: int) -> tuple[Leaf, ...] | None:
    """Return the entries that the same request wrote before, `count` of them; None if it is new.

    Another request with its key is refused, and so are entries that do not know this request by its hash.
    """
    row = find_request(connection, caller, key)
    if row is None:
        return None
    if row.secret is None:
        raise ConflictError(
            f"the key {key!r} of caller {caller!r} was used for queries that were erased since: {row.count} entries "
            f"from {row.first} on. They stay credited: use a new key for another request."
        )
    if tables.read_bytes(row.digest) != _hash_content(tables.read_bytes(row.secret), content):
        raise ConflictError(
            f"the key {key!r} of caller {caller!r} was used for another request: use a new key for each request, and "
            "reuse one only to try again."
        )
    if row.count != count or not isinstance(row.first, int):
        raise _report_change(caller, key)
    entries, bound = tuple(log.read_leaves(connection, row.first, row.first + count)), bind_request(row._mapping)
    if len(entries) != count or any(entry.about.get("request") != bound for entry in entries):
        raise _report_change(caller, key)
    return entries


def _report_change(caller: str, key: str) -> CreditError:
    return CreditError(
        f"the entries of the request with key {key!r} of caller {caller!r} are not where the database says: it was "
        "changed. Run `imprint credit verify`."
    )


def make_request(caller: str, key: str, content: bytes) -> dict[str, Any]:
    """Return a request as a row of the database, but for its entries."""
    salt, secret = secrets.token_bytes(_SALT), secrets.token_bytes(_SALT)
    hashes = {"sealed": seal_secret(secret), "digest": _hash_content(secret, content)}
    return {"caller": caller, "key": key, "salt": salt, "secret": secret, **hashes}


def _hash_content(secret: bytes, content: bytes) -> bytes:
    return hashlib.sha256(b"content" + secret + content).digest()


def seal_secret(secret: bytes) -> bytes:
    """Return the hash by which a request knows its secret."""
    return hashlib.sha256(b"secret" + secret).digest()


def keep_request(connection: Connection, request: dict[str, Any], first: int, count: int) -> None:
    """Write a request, and where its entries are."""
    connection.execute(insert(tables.requests).values(**request, first=first, count=count))


def forget_requests(connection: Connection, sequences: Sequence[int]) -> None:
    """Erase what was asked in the requests of some entries, so that nobody can test guesses against it."""
    table = tables.requests
    for sequence in sequences:
        holds = (table.c.first <= sequence) & (table.c.first + table.c.count > sequence)
        near = table.c.first > sequence - _LARGEST  # so that the index finds it
        connection.execute(update(table).where(near, holds, table.c.secret.is_not(None)).values(secret=None))


def bind_request(request: Mapping[str, Any]) -> str:
    """Return the salted hash by which an entry knows its request, and which tells nobody else who asked."""
    salt, sealed, digest = (tables.read_bytes(request[name]) for name in ("salt", "sealed", "digest"))
    known = encode([request["caller"], request["key"], sealed.hex(), digest.hex()])
    return hashlib.sha256(b"request" + salt + known).hexdigest()
