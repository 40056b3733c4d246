"""Files that are there in full or not at all: written beside their place, synced, renamed; and a lock on a folder."""

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from imprint.errors import StoreError

try:
    import fcntl
except ImportError:  # not on this platform: folders go unlocked
    fcntl = None  # type: ignore[assignment]


def write(place: Path, fill: Callable[[Path], object]) -> None:
    """Make the file at `place` what `fill` writes to the path it is given; durable once this returns."""
    beside = place.with_name(f".{place.name}.tmp")
    try:
        place.parent.mkdir(exist_ok=True)
        fill(beside)
        _sync(beside)
        beside.replace(place)
        _sync(place.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise StoreError(f"could not write {place}: {error}") from error


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():  # not possible there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """One process at a time in a folder. The system gives the lock back when its owner ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".lock"
        self._file: IO[Any] | None = None
        try:
            self._file = self._path.open("a+")
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            assert self._file is not None
            self._file.seek(0)
            owner = self._file.read().strip()
            self._file.close()
            raise StoreError(f"another process ({owner or 'unknown'}) is writing to {folder}: wait for it.") from None
        except OSError as error:
            raise StoreError(f"{folder} cannot be written to: {error}") from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Let others in, and leave no trace."""
        if self._file is not None:
            self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None
