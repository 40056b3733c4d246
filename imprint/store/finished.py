"""The list of finished files in the folder of a simulation, by which it is resumed.

Each line is a file with its checksum, and begins with a checksum of its own. A file is done once it is on the list and
still what the list says.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.checkpoint import File
from imprint.store.files import append, find_damage, refuse_unreadable, write
from imprint.store.records import read
from imprint.store.values import parsed

logger = logging.getLogger(__name__)
FILES = "unfinished.files"


class Finished:
    """The files that are done in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, File] = {}

    def get(self, name: str, rows: tuple[int, int] | None) -> File | None:
        """Return a file that is done and holds these rows."""
        file = self._files.get(name)
        return file if file is not None and file.rows == rows else None

    def add(self, file: File) -> None:
        """Note that a file is done; durable once this returns."""
        append(self._folder / FILES, _format_line(file))

    def drop_shard(self, file: File) -> None:
        """Have the shard made again that a file belongs to."""
        self._files = {path: each for path, each in self._files.items() if _shard_of(each) != _shard_of(file)}

    def resume(self) -> None:
        """Count those files as done that are what the list says. A shard with another is made again as a whole."""
        latest = {file.path: file for file in _read_list(self._folder / FILES)}
        again = {_shard_of(file) for file in latest.values() if not self._is_sound(file)}
        for path, file in latest.items():
            if _shard_of(file) in again:
                (self._folder / path).unlink(missing_ok=True)
            else:
                self._files[path] = file
        text = "".join(_format_line(file) for file in self._files.values())
        write(self._folder / FILES, lambda path: path.write_text(text))

    def _is_sound(self, file: File) -> bool:
        place = self._folder / file.path
        if (state := find_damage(place, file.bytes, file.sha256)) is None:
            return True
        rows = f", rows {file.rows[0]} to {file.rows[1] - 1}" if file.rows else ""
        logger.warning("%s is %s: its shard is simulated again%s", place, state, rows)
        return False


def _shard_of(file: File) -> tuple[str, int]:
    """Return the folder and the first row of a file's shard. The base is made with the first shard."""
    return str(Path(file.path).parent), file.rows[0] if file.rows else 0


def _format_line(file: File) -> str:
    text = json.dumps(asdict(file))
    return f"{_checksum(text.encode())} {text}\n"


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _read_list(place: Path) -> Iterator[File]:
    """Read the files on a list. Its last line may be cut short: that file is not done."""
    try:
        refuse_unreadable(place)
        *lines, _ = place.read_bytes().split(b"\n")
    except FileNotFoundError:  # it comes with the first file
        return
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        checksum, _, text = line.partition(b" ")
        if checksum == _checksum(text).encode():
            yield read(File, parsed(text, place))
        elif number < len(lines):
            raise StoreError(f"{place} is damaged in line {number}: delete it to have the finished shards made again.")
