"""What the log is made of: leaves, each with a header that is hashed into the tree, and lines for single sources.

The header of a leaf names the root of a small tree over its lines. So a publisher who holds the header and its own line
can check both without seeing anybody else's line: the hashes of the other lines are salted, and tell nothing.
Everything is stored, hashed and sent as the same bytes.
"""

import hmac
import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast, get_args

from imprint.credit.canonical import decode, encode
from imprint.credit.merkle import Node, hash_leaf, hash_tree, nodes_of, prove_inclusion
from imprint.errors import DamagedLog

Kind = Literal["log", "tariff", "policy", "credit", "period", "erasure", "dispute"]
SALT_BYTES = 32
LINE_SALT = 16
"""Bytes of the salt of one line."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of the log, as the bytes that are stored.

    header: what is hashed into the tree.
    lines: one for each source, in the order of their ids; none where a leaf is not about sources.
    salt: from which the salts of the lines are derived; empty where there are none.
    """

    header: bytes
    lines: tuple[bytes, ...] = ()
    salt: bytes = b""

    @cached_property
    def hash(self) -> bytes:
        """The hash of the header, as the tree has it."""
        return hash_leaf(self.header)

    @cached_property
    def about(self) -> dict[str, Any]:
        """The header as values."""
        about = decode(self.header)
        if not isinstance(about, dict):
            raise DamagedLog("an entry is damaged: it is no object.")
        return about

    @property
    def kind(self) -> Kind:
        kind: Any = self.about.get("kind")
        if kind not in get_args(Kind):
            raise DamagedLog(f"an entry has an unknown kind, {kind!r}: upgrade imprint.")
        return cast(Kind, kind)

    @property
    def sequence(self) -> int:
        """Its place in the log, from 0 on."""
        return int(self.about["sequence"])

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The lines as values."""
        return [decode(line) for line in self.lines]

    @cached_property
    def line_hashes(self) -> list[bytes]:
        return [hash_line(derive_salt(self.salt, place), line) for place, line in enumerate(self.lines)]

    @property
    def has_its_lines(self) -> bool:
        """Whether its lines are those that the header vouches for."""
        about = self.about.get("lines")
        if about is None or not self.lines:
            return about is None and not self.lines and not self.salt
        same = about["count"] == len(self.lines) and about["root"] == hash_tree(self.line_hashes).hex()
        return same and len(self.salt) == SALT_BYTES

    @cached_property
    def line_nodes(self) -> Node:
        """The nodes of the tree over its lines."""
        return nodes_of(self.line_hashes)

    def find_line(self, source: str) -> int | None:
        """Return the place of a source's line; None if it has none. Lines are in the order of their sources."""
        place = bisect_left(self.lines, source, key=lambda line: decode(line)["source"])
        there = place < len(self.lines) and decode(self.lines[place])["source"] == source
        return place if there else None

    def prove_line(self, place: int) -> dict[str, Any]:
        """Return a line, its salt, and the proof that the header vouches for it, as plain values."""
        path = prove_inclusion(place, len(self.lines), self.line_nodes)
        return {
            "line": self.lines[place].decode(),
            "salt": derive_salt(self.salt, place).hex(),
            "place": place,
            "path": [node.hex() for node in path],
        }


@dataclass(frozen=True)
class Lines:
    """The lines of a leaf, ready to be written: in bytes, with their salt and the root of their tree."""

    content: tuple[bytes, ...]
    salt: bytes
    root: bytes

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]]) -> "Lines":
        """Encode and hash rows, which must be in the order of their sources' ids."""
        salt, content = secrets.token_bytes(SALT_BYTES), tuple(map(encode, rows))
        hashes = [hash_line(derive_salt(salt, place), line) for place, line in enumerate(content)]
        return cls(content, salt, hash_tree(hashes))


def compose(kind: Kind, sequence: int, time: str, about: dict[str, Any], lines: Lines | None = None) -> Leaf:
    """Make a leaf from plain values, and from lines where it has some."""
    header = {"kind": kind, "sequence": sequence, "time": time, **about}
    if lines is None:
        leaf = Leaf(encode(header))
    else:
        header["lines"] = {"count": len(lines.content), "root": lines.root.hex()}
        leaf = Leaf(encode(header), lines.content, lines.salt)
    vars(leaf)["about"] = header  # so that it need not be read again
    return leaf


def derive_salt(salt: bytes, place: int) -> bytes:
    """Return the salt of one line."""
    return hmac.digest(salt, place.to_bytes(8), "sha256")[:LINE_SALT]


def hash_line(salt: bytes, line: bytes) -> bytes:
    """Return the hash of a line, as the tree of its leaf has it."""
    return hash_leaf(salt + line)


def join_lines(lines: Sequence[bytes]) -> bytes | None:
    """Join lines for the database; JSON has no line breaks outside of escapes."""
    return b"\n".join(lines) if lines else None


def split_lines(joined: bytes | None) -> tuple[bytes, ...]:
    """Split what `join_lines` joined, into the same bytes."""
    return () if joined is None else tuple(joined.split(b"\n"))
