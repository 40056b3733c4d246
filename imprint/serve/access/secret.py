"""Secrets of 256 random bits: how they are made, recognised, and stored.

Only a SHA-256 hash of each is stored. Slow, salted hashes are for passwords, which can be guessed: nobody can try 2²⁵⁶
secrets, however fast the hash is.
"""

import hashlib
import hmac
import re
import secrets
from base64 import urlsafe_b64encode

_KEY = re.compile(r"imprint_([A-Za-z0-9_-]{8})[A-Za-z0-9_-]{35}")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{43}")


def make_key() -> str:
    """Return the secret of a new key; its beginning says to people and to scanners of secrets what it is."""
    return f"imprint_{make_token()}"


def make_token() -> str:
    """Return a new secret for a session, or for a link."""
    return secrets.token_urlsafe(32)


def find_prefix(secret: str) -> str | None:
    """Return the characters by which a key is found and listed; None if this is no key."""
    found = _KEY.fullmatch(secret)
    return None if found is None else found[1]


def is_token(text: str) -> bool:
    """Check whether this may be the secret of a session or of a link."""
    return _TOKEN.fullmatch(text) is not None


def hash_secret(secret: str) -> bytes:
    """Return what is stored of a secret."""
    return hashlib.sha256(secret.encode()).digest()


def derive_csrf(session: str) -> str:
    """Return the token that forms of a session carry; it says nothing about the session's own secret."""
    return urlsafe_b64encode(hmac.digest(session.encode(), b"imprint csrf", "sha256")).decode().rstrip("=")


def is_same(given: str, expected: str) -> bool:
    """Compare two secrets in a time that does not depend on how much of them agrees."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode())
