"""A folder that one process at a time writes to, that is not mixed with anything else, and that says what it holds.

Stores, ground truth, benchmarks and exports are such folders. What they hold is a JSON file with a checksum of its own;
every file in them is there in full or not at all.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from imprint.errors import StoreError
from imprint.store.files import LOCK, Lock, clear_leftovers, is_leftover, write
from imprint.store.values import sealed


class Folder:
    """A folder for one thing.

    content: what that is, in words such as "the store".
    records: the files of which one says what the folder holds. A folder with files and without any of these is refused.
    """

    def __init__(self, path: Path, content: str, *records: str) -> None:
        self.path, self.content, self._records = path, content, records

    def refuse_foreign(self) -> None:
        """Refuse a file, and a folder that holds something else. Nothing is touched."""
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file: give a folder for {self.content}.")
        if not self.path.exists() or any((self.path / name).exists() for name in self._records):
            return
        if any(file.name != LOCK and not is_leftover(file) for file in self.path.iterdir()):  # of one that was killed
            raise StoreError(f"{self.path} holds something else: give a new folder for {self.content}.")

    def make(self) -> None:
        """Make the folder if it is not there, and refuse one that cannot be used."""
        try:
            str(self.path).encode()  # safetensors opens only what is UTF-8
            self.refuse_foreign()
            self.path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise StoreError(
                f"could not make the folder {self.path}: {reason}. Give a folder that you may write to."
            ) from error


def write_sealed(place: Path, values: dict[str, Any]) -> None:
    """Write a file of plain values, with a checksum of its own."""
    text = json.dumps(sealed(values), indent=1)
    write(place, lambda path: path.write_text(text, encoding="utf-8"))


@contextmanager
def locked(folder: Path, prefix: str = "") -> Iterator[None]:
    """Keep other processes out of a folder meanwhile, or out of what begins with `prefix` in it.

    What killed ones have left there is removed.
    """
    lock = Lock(folder, f"{prefix}{LOCK}")
    try:
        clear_leftovers(folder, prefix)
        yield
    finally:
        lock.release()
