"""Keys, sessions and one-time links, in a database that several processes share.

What was found is remembered for a second, so that not every request asks the database; hence a key that is revoked
elsewhere stops working a second later.
"""

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import NamedTuple, ParamSpec, TypeVar

from sqlalchemy import select

from imprint.credit.tables import describe
from imprint.errors import AccessError, ConfigurationError
from imprint.serve.access import keys, sessions, tables
from imprint.serve.access.keys import KeyRecord, NewKey
from imprint.serve.access.roles import Identity, Role
from imprint.serve.access.secret import derive_csrf, find_prefix, hash_secret, is_token
from imprint.serve.batching import Closing, Overloaded
from imprint.serve.workers import Unanswered, Workers

__all__ = ["Access", "KeyRecord", "NewKey"]
logger = logging.getLogger("imprint.serve")
_REMEMBERED = 1.0  # seconds
_MOST = 10_000  # remembered at once
_THREADS = 4  # a look at a key takes milliseconds, and most keys are remembered
_WAITING = 200  # looks that may wait: more connections than a service has at its usual rate
_PATIENCE = 15.0  # seconds: a look waits 5 for the database, noting the use of a key 5 more, and then there is a queue
P = ParamSpec("P")
T = TypeVar("T")


class _Found(NamedTuple):
    """Who has a secret, until when it holds, and when that was looked up."""

    identity: Identity
    ends: float
    when: float


class Access:
    """Who may use a service. place: the path of a SQLite file, or the URL of a PostgreSQL database.

    make: make the file, or the tables, if they are missing; the file is readable to its owner alone.

    For several threads.
    """

    def __init__(
        self, place: str | os.PathLike[str], *, make: bool = True, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine, self._clock = tables.open_database(place, make=make), clock
        self._found, self._lock = OrderedDict[bytes, _Found](), threading.Lock()
        self._listed, self._when_listed = set[bytes](), -math.inf
        self._workers = Workers("keys", _THREADS, _WAITING)

    @property
    def place(self) -> str:
        """Where the keys are, without a password."""
        return describe(self._engine)

    async def run(self, method: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """Call a method of this in a thread that only keys use; fails if the database does not answer in time."""
        try:
            self._workers.require_room()
            return await self._workers.run(partial(method, *given, **named), timeout=_PATIENCE)
        except (Overloaded, Unanswered, Closing) as error:
            raise AccessError("the database of keys does not answer.") from error

    def probe(self) -> None:
        """Fail with an `AccessError` if the database cannot be reached."""
        with tables.reading(self._engine) as connection:
            connection.execute(select(tables.about)).all()

    def create(
        self,
        name: str,
        role: Role,
        *,
        sources: Sequence[str] = (),
        expires: datetime | None = None,
        known: Collection[str] | None = None,
    ) -> NewKey:
        """Make a key. sources: what a publisher may see. known: ids of all sources, if the store is at hand."""
        now = self._clock()
        keys.check_key(name, role, sources, expires, now, known)
        with tables.writing(self._engine) as connection:
            made = keys.insert_key(connection, name, role, sources, expires, now)
        self._when_listed = -math.inf
        return made

    def list(self) -> list[KeyRecord]:
        """Return all keys by name, revoked and expired ones too."""
        with tables.reading(self._engine) as connection:
            return keys.list_keys(connection)

    def revoke(self, name: str) -> None:
        """Revoke a key, and end its sessions."""
        with tables.writing(self._engine) as connection:
            keys.revoke_key(connection, name, int(self._clock()))
        self._forget()

    def identify_key(self, secret: str) -> Identity | None:
        """Return whose key this is; None if it is unknown, revoked or expired."""
        if find_prefix(secret) is None:
            return None
        if found := self.recall(secret):
            return found
        now = self._clock()
        with tables.reading(self._engine) as connection:
            record = keys.find_key(connection, secret)
        return self._remember(secret, record, now, float("inf"))

    def find_expiry(self, secret: str) -> datetime | None:
        """Return when a key expired; None if it holds, was revoked, or is none."""
        if find_prefix(secret) is None:
            return None
        with tables.reading(self._engine) as connection:
            record = keys.find_key(connection, secret)
        return None if record is None or record.describe_state(self._clock()) != "expired" else record.expires

    def identify_session(self, token: str) -> Identity | None:
        """Return whose session this is, with its CSRF token; None if it has ended, or its key has."""
        if not is_token(token):
            return None
        if found := self.recall(token):
            return found
        now = self._clock()
        with tables.reading(self._engine) as connection:
            record, ends = sessions.find_session(connection, token, now) or (None, 0.0)
        return self._remember(token, record, now, ends, derive_csrf(token))

    def recall(self, secret: str) -> Identity | None:
        """Return who has a key or a session, if that was looked up a moment ago. Never waits for the database."""
        now = self._clock()
        with self._lock:
            found = self._found.get(hash_secret(secret))
        if found is None or not 0 <= now - found.when < _REMEMBERED or now >= found.ends:
            return None
        return found.identity

    def lists(self, secret: str) -> bool | None:
        """Tell whether somebody has a secret; None if `list_secrets` must be called first. Never waits.

        For floods of secrets that nobody has: whoever sends them makes the database list all of them once a second, and
        look none of them up.
        """
        if hash_secret(secret) in self._listed:
            return True
        return False if 0 <= self._clock() - self._when_listed < _REMEMBERED else None

    def list_secrets(self) -> None:
        """Read of which secrets there are keys or sessions."""
        now = self._clock()
        with tables.reading(self._engine) as connection:
            self._listed = keys.list_hashes(connection) | sessions.list_hashes(connection, now)
        self._when_listed = now

    def _remember(
        self, secret: str, record: KeyRecord | None, now: float, ends: float, csrf: str | None = None
    ) -> Identity | None:
        if record is None or not record.is_valid(now):
            return None
        if keys.is_use_due(record, now):
            self._note_use(record, now)
        ends = ends if record.expires is None else min(ends, record.expires.timestamp())
        identity = Identity(record.name, record.role, record.sources, csrf)
        with self._lock:
            self._found[hash_secret(secret)] = _Found(identity, ends, now)
            self._found.move_to_end(hash_secret(secret))
            while len(self._found) > _MOST:
                self._found.popitem(last=False)
        return identity

    def _note_use(self, record: KeyRecord, now: float) -> None:
        try:
            with tables.writing(self._engine) as connection:
                keys.note_use(connection, record.name, now)
        except AccessError as error:  # whoever has a key is not refused because of this
            logger.warning("the last use of a key could not be noted: %s", error)

    def _forget(self) -> None:
        with self._lock:
            self._found.clear()

    def open_session(self, secret: str, seconds: float) -> str | None:
        """Exchange a key for the token of a new session; None if the key does not hold."""
        identity = self.identify_key(secret)
        return None if identity is None else self._open_session(identity.name, seconds)

    def make_link(self, name: str) -> str:
        """Return a token for the page /login/TOKEN, which opens one session of a key within a quarter of an hour."""
        now = self._clock()
        with tables.writing(self._engine) as connection:
            record = keys.find_named(connection, name)
            if record is None or not record.is_valid(now):
                raise ConfigurationError(f"there is no valid key {name[:80]!r} to log in with.")
            return sessions.make_link(connection, name, now)

    def use_link(self, token: str, seconds: float) -> str | None:
        """Use a link up, and return the token of a new session; None if it was used before, or has expired."""
        if not is_token(token):
            return None
        with tables.writing(self._engine) as connection:
            name = sessions.use_link(connection, token, self._clock())
        return None if name is None else self._open_session(name, seconds)

    def _open_session(self, name: str, seconds: float) -> str | None:
        """Open a session of a key that still holds; a key that was just revoked opens none."""
        now = self._clock()
        with tables.writing(self._engine) as connection:
            record = keys.find_named(connection, name)
            if record is None or not record.is_valid(now):
                return None
            token = sessions.open_session(connection, name, now, seconds)
        self._when_listed = -math.inf
        return token

    def end_session(self, token: str) -> None:
        """End a session, here at once and in other processes within a second."""
        with tables.writing(self._engine) as connection:
            sessions.end_session(connection, token)
        with self._lock, suppress(KeyError):
            del self._found[hash_secret(token)]

    def close(self) -> None:
        """Finish what was asked, and close the database."""
        self._workers.close()
        self._engine.dispose()
