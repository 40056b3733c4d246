"""Keys, sessions and one-time links, in a database that several processes share."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from imprint.serve.access.roles import Identity, Role


@dataclass(frozen=True)
class NewKey:
    """A key that was just made: its secret is shown once."""

    name: str
    secret: str


class Access:
    """Keys and sessions."""

    def __init__(self, place: str) -> None:
        self.place, self._keys = place, dict[str, Identity]()

    def probe(self) -> None:
        """Fail if the database cannot be reached."""

    def create(self, name: str, role: Role, *, sources: Sequence[str] = (), expires: datetime | None = None) -> NewKey:
        """Make a key."""
        secret = "imprint_" + secrets.token_urlsafe(32)
        self._keys[secret] = Identity(name, role, tuple(sources))
        return NewKey(name, secret)

    def identify(self, secret: str) -> Identity | None:
        """Return whose key this is."""
        return self._keys.get(secret)

    def make_link(self, name: str) -> str:
        """Return a token that opens one session."""
        return secrets.token_urlsafe(32)

    def close(self) -> None:
        """Close the database."""
