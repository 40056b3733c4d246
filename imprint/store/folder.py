"""Folders that hold one thing, are written by one process at a time, and say what they hold.

Stores, ground truth, benchmarks and exports are such folders. What they hold is in a JSON file, their record, with a
checksum of its own; every file in them is there in full or not at all.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from imprint.errors import StoreError
from imprint.store.files import LOCK, Lock, clear_leftovers, is_leftover, write
from imprint.store.values import sealed

PARTS = "parts"  # the folder in which parts of what a folder will hold are made, see `imprint.store.parts`


def make_folder(path: Path, content: str, *records: str) -> bool:
    """Make a folder if it is not there, and return whether it was. Refuse a file, and a folder with something else.

    content: what the folder is for, in words such as "the store".
    records: the files of which one says what it holds, in the order in which they go. Without any of them, it must be
        empty but for what is left of a process that was killed as it began.
    """
    try:
        str(path).encode()  # safetensors opens only what is UTF-8
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file: give a folder for {content}.")
        found = path.exists()
        path.mkdir(parents=True, exist_ok=True)
        foreign = [file.name for file in path.iterdir() if file.name != LOCK and not is_leftover(file)]
        complete = any((path / name).exists() for name in records)  # a killed merge leaves parts beside its result
        if PARTS in foreign and not complete:
            raise StoreError(
                f"{path} holds an unfinished simulation or retraining in parts: make the others, and merge them "
                f"(`imprint merge`). To make {content} at once, give another folder, or delete {path / PARTS}."
            )
        if foreign and not complete:
            raise StoreError(f"{path} holds something else: give a new folder for {content}.")
        return found
    except (OSError, ValueError) as error:  # ValueError: a path that no file can have
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise StoreError(f"could not make the folder {path}: {reason}. Give a folder that you may write to.") from error


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


def write_sealed(place: Path, values: dict[str, Any]) -> None:
    """Write a file of plain values, with a checksum of its own."""
    text = json.dumps(sealed(values), indent=1)
    write(place, lambda path: path.write_text(text, encoding="utf-8"))
