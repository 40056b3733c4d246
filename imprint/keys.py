"""Ed25519 keys, which sign stores and the heads of logs.

A private key is a file of its own, away from what it signs. Keys are PEM files, as other tools write them: `openssl
pkey -in credit.key -pubout` prints the public one.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from imprint.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PrivateKey: TypeAlias = Union["Ed25519PrivateKey", str, os.PathLike[str]]
"""A private key, or the file that it is in."""
PublicKey: TypeAlias = Union["Ed25519PublicKey", str, os.PathLike[str]]
"""A public key, or the file that it is in."""
PASSPHRASE = "IMPRINT_KEY_PASSPHRASE"
"""The environment variable with the passphrase of an encrypted private key."""
_LONGEST = 1 << 16  # bytes of a key file
_MAKE = "`imprint keys` makes a pair."


def make_keys(place: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Make a private key in a new file that only its owner can read, and the public one beside it, with .pub added.

    The private key is encrypted if the environment variable IMPRINT_KEY_PASSPHRASE is set.
    """
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    if not isinstance(place, str | os.PathLike) or not Path(place).name:
        raise ConfigurationError(f"a key is made in a new file, such as credit.key; got {place!r}.")
    key, phrase, file = Ed25519PrivateKey.generate(), os.environ.get(PASSPHRASE), Path(place)
    protection = BestAvailableEncryption(phrase.encode()) if phrase else NoEncryption()
    public = file.with_name(f"{file.name}.pub")
    _write_new(public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    try:
        _write_new(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, protection), 0o600)
    except BaseException:
        public.unlink()
        raise
    return file, public


def load_private_key(key: PrivateKey) -> "Ed25519PrivateKey":
    """Read a private key from its file; return one that was read before as it is."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    if isinstance(key, Ed25519PrivateKey):
        return key
    _require_path(key, "private")
    phrase, content = os.environ.get(PASSPHRASE), _read(key)
    encrypted = b"ENCRYPTED" in content
    try:
        found = load_pem_private_key(content, phrase.encode() if phrase and encrypted else None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        reason = f"{PASSPHRASE} is not its passphrase" if encrypted else "it is not a private key in PEM format"
        raise ConfigurationError(f"{os.fspath(key)} cannot be used: {reason}. {_MAKE}") from error
    if not isinstance(found, Ed25519PrivateKey):
        raise ConfigurationError(f"{os.fspath(key)} is not an Ed25519 key. {_MAKE}")
    return found


def load_public_key(key: PublicKey) -> "Ed25519PublicKey":
    """Read a public key from its file; return one that was read before as it is."""
    _require_cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if isinstance(key, Ed25519PublicKey):
        return key
    _require_path(key, "public")
    content = _read(key)
    try:
        found = load_pem_public_key(content)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{os.fspath(key)} is not a public key in PEM format. {_MAKE}") from error
    if not isinstance(found, Ed25519PublicKey):
        raise ConfigurationError(f"{os.fspath(key)} is not an Ed25519 key. {_MAKE}")
    return found


def load_public_keys(keys: "PublicKey | Sequence[PublicKey] | None") -> "list[Ed25519PublicKey]":
    """Read one public key, several, or none."""
    if keys is None:
        return []
    if isinstance(keys, Sequence) and not isinstance(keys, str | bytes):
        return [load_public_key(key) for key in keys]
    return [load_public_key(keys)]


def identify_key(key: "Ed25519PublicKey") -> str:
    """Return the name of a public key: the first 32 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def is_signed(key: "Ed25519PublicKey", signature: bytes, content: bytes) -> bool:
    """Check whether the owner of a key has signed some bytes."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, content)
    except InvalidSignature:
        return False
    return True


def _require_path(key: object, kind: str) -> None:
    if not isinstance(key, str | os.PathLike):
        raise ConfigurationError(f"a {kind} key is an Ed25519 key or the path of one, got a {type(key).__name__}.")


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingExtra("signing", "serve") from error


def _write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file that must not exist yet."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path} already exists, and keys are never overwritten: choose another file."
        ) from error
    except (OSError, ValueError) as error:  # such as a name with a null character
        raise ConfigurationError(f"could not write {path}: {getattr(error, 'strerror', None) or error}.") from error


def _read(place: str | os.PathLike[str]) -> bytes:
    path = Path(place)
    try:
        if not path.is_file():
            raise ConfigurationError(f"there is no key file {path}. {_MAKE}")
        if path.stat().st_size > _LONGEST:
            raise ConfigurationError(f"{path} is too large to be a key.")
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"could not read {path}: {error.strerror or error}.") from error
