"""Signed heads: the size and the root of the log at some time, signed with the ledger's key.

Whoever holds a signed head can prove later that the log was rewritten: nothing that was in it can be changed, removed
or moved without changing the root. Publish heads where those who are paid can see them.
"""

import base64
import binascii
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imprint.credit.canonical import decode, encode
from imprint.errors import CreditError, DamagedLog, StoreError
from imprint.keys import identify_key, is_signed
from imprint.store.files import append
from imprint.store.values import parsed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_KIND = "imprint log head"
_LONGEST = 64 << 20  # bytes of a file of heads


@dataclass(frozen=True)
class Head:
    """A signed head of a log.

    content: the bytes that were signed.
    """

    content: bytes
    signature: bytes

    @property
    def about(self) -> dict[str, Any]:
        found = decode(self.content)
        if not isinstance(found, dict) or found.get("kind") != _KIND:
            raise DamagedLog("this is not the head of a log.")
        return found

    @property
    def log(self) -> str:
        """The name of the log."""
        return str(self.about["log"])

    @property
    def size(self) -> int:
        """How many leaves the log had."""
        return int(self.about["size"])

    @property
    def root(self) -> bytes:
        return bytes.fromhex(self.about["root"])

    @property
    def time(self) -> str:
        return str(self.about["time"])

    @property
    def key(self) -> str:
        """The name of the key that signed it, as the signer says."""
        return str(self.about["key"])

    def check(self, *keys: "Ed25519PublicKey") -> None:
        """Refuse a head that the owner of none of these keys has signed."""
        if not any(is_signed(key, self.signature, self.content) for key in keys):
            known = " or ".join(map(identify_key, keys))
            raise CreditError(
                f"the head of size {self.size} was not signed with key {known}: it is forged, or another key signed it."
            )

    @classmethod
    def of(cls, content: bytes, signature: bytes) -> "Head":
        """Make a head of what a database or a file holds; refuse what cannot be one."""
        try:
            head = cls(content, signature)
            _ = head.log, head.size, head.root, head.time, head.key
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedLog("a head is damaged: it lacks a part of what was signed.") from error
        return head

    def to_json(self) -> dict[str, str]:
        return {"head": self.content.decode(), "signature": base64.b64encode(self.signature).decode()}

    @classmethod
    def from_json(cls, values: Any) -> "Head":
        """Read what `to_json` returned."""
        try:
            content, signature = values["head"].encode(), base64.b64decode(values["signature"], validate=True)
        except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
            raise CreditError("this is not a signed head of a log.") from error
        return cls.of(content, signature)


def sign_head(key: "Ed25519PrivateKey", log: str, size: int, root: bytes, time: str) -> Head:
    """Sign the head of a log."""
    about = {"kind": _KIND, "log": log, "size": size, "root": root.hex(), "time": time}
    content = encode({**about, "key": identify_key(key.public_key())})
    return Head(content, key.sign(content))


def require_heads(heads: Iterable[Head]) -> list[Head]:
    """Return signed heads; refuse anything else."""
    found = list(heads) if isinstance(heads, Iterable) else [heads]
    if not all(isinstance(head, Head) for head in found):
        raise CreditError("heads are signed heads of a log: `imprint.credit.heads.read_heads` reads a file of them.")
    return found


def publish_head(place: str | os.PathLike[str], head: Head) -> None:
    """Append a head to a file of heads, one per line; it is on disk when this returns.

    A last line that a crash has cut short is removed.
    """
    path = Path(place)
    _, whole = _read_lines(path) if os.path.lexists(path) else ([], 0)
    try:
        if path.is_file() and path.stat().st_size > whole:
            os.truncate(path, whole)
        is_open = whole > 0 and path.read_bytes()[-1:] != b"\n"
    except OSError as error:
        raise CreditError(f"could not write {path}: {error.strerror or error}.") from error
    append(path, "\n" * is_open + json.dumps(head.to_json()) + "\n")


def read_heads(place: str | os.PathLike[str]) -> list[Head]:
    """Read a file of heads, as `publish_head` writes it; a last line that a crash has cut short is left out."""
    found, _ = _read_lines(Path(place))
    if not found:
        raise CreditError(f"{place} has no signed head in it.")
    return found


def refuse_other_heads(place: str | os.PathLike[str], log: str, size: int, root: Callable[[int], bytes]) -> None:
    """Refuse to publish a head of a log, which has some size, that did not grow from the newest head in a file.

    root: returns the root that the log had when it had some size.
    """
    path = Path(place)
    known = _read_lines(path)[0] if os.path.lexists(path) else []
    if others := [head for head in known if head.log != log]:
        raise CreditError(f"{path} has heads of another log, {others[0].log}: publish to a file of its own.")
    newest = max((head.size for head in known), default=0)
    for head in known:
        if head.size == newest and (newest > size or root(newest) != head.root):
            raise CreditError(
                f"the log did not grow from the head of {head.size} entries in {path}, signed at {head.time}: it was "
                "rewritten. Run `imprint credit verify` with these heads before you sign it."
            )


def _read_lines(path: Path) -> tuple[list[Head], int]:
    """Return the heads in a file, and how many of its bytes they take: all but a last line without its end."""
    try:
        if not path.is_file() or path.stat().st_size > _LONGEST:
            raise CreditError(f"{path} is not a file of signed heads.")
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise CreditError(f"could not read {path}: {getattr(error, 'strerror', None) or error}.") from error
    found, lines = [], content.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Head.from_json(parsed(line, path).content))
        except (StoreError, CreditError) as error:
            if number == len(lines):
                return found, len(content) - len(line)
            raise CreditError(f"{path} is not a file of signed heads: line {number}: {error}") from error
    return found, len(content)
