"""Keys in the database: made, found by their secrets, listed and revoked."""

import hmac
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

from sqlalchemy import Connection, Row, and_, or_, select

from imprint.display import count_of, suggest_names
from imprint.errors import ConfigurationError
from imprint.serve.access import tables
from imprint.serve.access.roles import Role
from imprint.serve.access.secret import find_prefix, hash_secret, make_key

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_SOURCES = 10_000
_COARSE = 600  # seconds by which `last_used` may lag behind, so that not every request is a write


@dataclass(frozen=True)
class NewKey:
    """A key that was just made; its secret is shown once, and stored nowhere."""

    name: str
    role: Role
    secret: str = field(repr=False)


@dataclass(frozen=True)
class KeyRecord:
    """What is known of a key. prefix: the first characters of its secret."""

    name: str
    prefix: str
    role: Role
    sources: tuple[str, ...]
    created: datetime
    expires: datetime | None
    revoked: datetime | None
    last_used: datetime | None

    def is_valid(self, now: float) -> bool:
        """Tell whether the key opens anything: it is neither revoked nor expired."""
        return self.describe_state(now) == "valid"

    def describe_state(self, now: float) -> Literal["valid", "revoked", "expired"]:
        """Return what became of the key."""
        if self.revoked is not None:
            return "revoked"
        return "valid" if self.expires is None or now < self.expires.timestamp() else "expired"


def read_record(row: Row[Any]) -> KeyRecord:
    """Return the key that a row describes."""
    times = {name: _read_time(getattr(row, name)) for name in ("created", "expires", "revoked", "last_used")}
    return KeyRecord(row.name, row.prefix, row.role, tuple(json.loads(row.sources)), **times)  # type: ignore[arg-type]


def _read_time(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def check_key(
    name: str, role: str, sources: Sequence[str], expires: datetime | None, now: float, known: Collection[str] | None
) -> None:
    """Refuse a key that makes no sense. known: ids of the sources that there are, if the store is at hand."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"the name of a key has 1 to 64 letters, digits, dots, dashes and underscores, and begins with a letter or "
            f"a digit; got {name[:80]!r}."
        )
    if role not in get_args(Role):
        raise ConfigurationError(f"a role is one of {', '.join(get_args(Role))}; got {role[:40]!r}.")
    if role == "publisher" and not sources:
        raise ConfigurationError("a publisher needs the ids of its sources: it sees the numbers of these alone.")
    if role != "publisher" and sources:
        raise ConfigurationError(f"only publishers have sources; the role {role} is not limited to some.")
    if len(sources) > _MOST_SOURCES or len(set(sources)) < len(sources) or not all(sources):
        raise ConfigurationError(
            f"name each source once, and at most {_MOST_SOURCES:,}; got {count_of(len(sources), 'source')}."
        )
    if known is not None and (unknown := [each for each in sources if each not in known]):
        raise ConfigurationError(f"the store has no source {unknown[0][:80]!r}{suggest_names(unknown[0], known)}")
    if expires is not None and expires.timestamp() <= now:
        raise ConfigurationError(f"the key would have expired already, at {expires.isoformat()}.")


def insert_key(
    connection: Connection, name: str, role: Role, sources: Sequence[str], expires: datetime | None, now: float
) -> NewKey:
    """Make a key. A name is never used again, not even that of a revoked key: the ledger knows callers by it."""
    if connection.execute(select(tables.keys.c.name).where(tables.keys.c.name == name)).first() is not None:
        raise ConfigurationError(f"there is, or was, a key called {name!r}: choose another name.")
    made = NewKey(name, role, make_key())
    connection.execute(
        tables.keys.insert().values(
            name=name,
            prefix=find_prefix(made.secret),
            hash=hash_secret(made.secret),
            role=role,
            sources=json.dumps(list(sources)),
            created=int(now),
            expires=None if expires is None else int(expires.timestamp()),
        )
    )
    return made


def find_key(connection: Connection, secret: str) -> KeyRecord | None:
    """Return the key with a secret; None if there is none."""
    prefix, digest = find_prefix(secret), hash_secret(secret)
    if prefix is None:
        return None
    rows = connection.execute(select(tables.keys).where(tables.keys.c.prefix == prefix)).all()
    same = [row for row in rows if hmac.compare_digest(bytes(row.hash), digest)]
    return read_record(same[0]) if same else None


def list_hashes(connection: Connection) -> set[bytes]:
    """Return what is stored of the secrets of all keys that were not revoked."""
    rows = connection.execute(select(tables.keys.c.hash).where(tables.keys.c.revoked.is_(None)))
    return {bytes(each) for each in rows.scalars()}


def find_named(connection: Connection, name: str) -> KeyRecord | None:
    """Return the key with a name."""
    row = connection.execute(select(tables.keys).where(tables.keys.c.name == name)).one_or_none()
    return None if row is None else read_record(row)


def list_keys(connection: Connection) -> list[KeyRecord]:
    """Return all keys by name, revoked ones too."""
    return [read_record(row) for row in connection.execute(select(tables.keys).order_by(tables.keys.c.name))]


def revoke_key(connection: Connection, name: str, now: float) -> None:
    """Revoke a key, with its sessions and links; does nothing to one that is revoked already."""
    if find_named(connection, name) is None:
        names = [key.name for key in list_keys(connection)]
        raise ConfigurationError(f"there is no key {name[:80]!r}{suggest_names(name, names)}")
    table = tables.keys
    connection.execute(table.update().where(and_(table.c.name == name, table.c.revoked.is_(None))).values(revoked=now))
    for each in (tables.sessions, tables.links):
        connection.execute(each.delete().where(each.c.key == name))


def is_use_due(record: KeyRecord, now: float) -> bool:
    """Tell whether it should be noted again that a key is used."""
    return record.last_used is None or now - record.last_used.timestamp() >= _COARSE


def note_use(connection: Connection, name: str, now: float) -> None:
    """Note that a key is used, unless another process has just done so."""
    table = tables.keys
    lately = or_(table.c.last_used.is_(None), table.c.last_used <= int(now) - _COARSE)
    connection.execute(table.update().where(and_(table.c.name == name, lately)).values(last_used=int(now)))
