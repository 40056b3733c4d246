"""The list of the files in a bucket's folder, `contents.json`: what a reader opens first, and nothing is ever listed.

It is replaced as a whole after the files that it names are there, and only by whoever has seen its latest version. So a
reader finds the folder as it was before some files were written or as it is after, and of two writers one is refused.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated

from imprint.store.bucket import Known
from imprint.store.checkpoint import INSIDE
from imprint.store.records import Checksum, read
from imprint.store.values import Value, parsed, sealed

CONTENTS = "contents.json"
LONGEST = 256 << 20  # bytes
_SCHEMA = 1
_TAGGED = 12  # characters of a checksum in the name of an object whose file has another version


def _read_inside(value: Value) -> str:
    if not INSIDE.fullmatch(path := value.text()) or path == CONTENTS:
        value.refuse("a path inside the folder, of letters, digits, '_', '-', '.' and '/'")
    return path


@dataclass(frozen=True)
class Entry:
    """A file of the folder, and the object that holds it: of the same name, unless an earlier version has that."""

    path: Annotated[str, _read_inside]
    sha256: Checksum
    bytes: int
    object: Annotated[str, _read_inside]

    @property
    def known(self) -> Known:
        return Known(self.sha256, self.bytes)


@dataclass(frozen=True)
class Contents:
    """What a folder holds, and who writes there.

    number: how often the list was written.
    writer: identifies the cache folder of whoever wrote it last; who: the same, for people.
    held: whether that one is still at work, unless it has been silent for too long.
    """

    schema: int
    number: int
    writer: str
    who: str
    held: bool
    files: tuple[Entry, ...] = ()

    @classmethod
    def begin(cls) -> "Contents":
        """Return the list of an empty folder."""
        return cls(_SCHEMA, 0, "", "", False)

    @classmethod
    def parse(cls, content: bytes, place: str) -> "Contents":
        """Read a list, which is not trusted: `place` is where it was found."""
        value = parsed(content, Path(place))
        schema = value.mapping().get("schema")
        if schema is None or schema.content != _SCHEMA:
            value.fail(f"it must be a list of schema {_SCHEMA}, of this version of imprint")
        found = read(cls, value.unsealed())
        for names in ([entry.path for entry in found.files], [entry.object for entry in found.files]):
            if len(set(names)) < len(names):
                value.fail("two entries stand for the same file")
        return found

    def to_bytes(self) -> bytes:
        return json.dumps(sealed(asdict(self)), indent=1).encode()

    def find(self, path: str) -> Entry | None:
        """Return the entry of a file."""
        return self.entries.get(path)

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """The entries by path."""
        return {entry.path: entry for entry in self.files}

    def plan(self, path: str, known: Known, taken: Collection[str] = ()) -> Entry:
        """Return the entry of a file that is now this. No object of the list is overwritten, nor one of those `taken`.

        A file in another version than the list has goes to an object of another name.
        """
        now = self.find(path)
        if now is not None and now.known == known:
            return now
        is_free = path not in taken and all(entry.object != path for entry in self.files)
        name = path if is_free else f"{path}.{known.sha256[:_TAGGED]}"
        return Entry(path, known.sha256, known.bytes, name)

    def having(self, entries: Iterable[Entry], *, only: bool = False) -> "Contents":
        """Return the list with some files in their new version; with `only` these alone."""
        files = {**({} if only else self.entries), **{entry.path: entry for entry in entries}}
        return replace(self, files=tuple(files.values()))
