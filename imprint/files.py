"""Files that are there in full or not at all: written beside their place, synced, renamed; and a lock on a folder."""

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from imprint.errors import StoreError

try:
    import fcntl
except ImportError:  # not on this platform: folders go unlocked
    fcntl = None  # type: ignore[assignment]

Result = TypeVar("Result")
LOCK = ".imprint.lock"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write(place: Path, fill: Callable[[Path], Result]) -> Result:
    """Make the file at `place` what `fill` writes to the path it is given; durable once its result is returned."""
    beside = place.with_name(f".{place.name}.tmp")
    try:
        place.parent.mkdir(exist_ok=True)
        beside.unlink(missing_ok=True)
        beside.touch()
        mode = beside.stat().st_mode  # as the umask has it; safetensors makes a file of its own, for its owner alone
        result = fill(beside)
        beside.chmod(mode)
        _sync(beside)
        beside.replace(place)
        _sync(place.parent)
        return result
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise _unwritten(place, error) from error
        raise


def append(place: Path, text: str) -> None:
    """Add to the end of a text file; durable once this returns. A crash may leave a part of `text` there."""
    try:
        is_new = not place.exists()
        with place.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync(place.parent)
    except OSError as error:
        raise _unwritten(place, error) from error


def leftovers(folder: Path) -> Iterator[Path]:
    """What a `write` that was killed has left under a folder: its own file, or the one safetensors fills before it."""
    for path in folder.rglob(".*"):
        if re.fullmatch(r"\..*\.tmp|\.tmp\w{6}", path.name):
            yield path


def nearest_folder(out: str | os.PathLike[str] | None) -> Path:
    """The folder that is there already and in which `out` will be made; without `out`, that of temporary files."""
    if out is None:
        return Path(tempfile.gettempdir())
    place = Path(out).absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    for path in (place, Path(out)):
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file: give a folder for the store.")
    return place


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unwritten(place: Path, error: OSError | SafetensorError) -> StoreError:
    number = error.errno if isinstance(error, OSError) else _number(str(error))
    reason = os.strerror(number) if number else str(error)
    if number in _FULL:
        reason += ". Make room and make the same call again: a simulation with out= goes on where it stood"
    return StoreError(f"could not write {place}: {reason}.")


def _number(message: str) -> int | None:
    """The system's error in a message of safetensors, which has it as text only."""
    found = re.search(r"os error (\d+)", message)
    return int(found[1]) if found else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """One process at a time in a folder. The system gives the lock back when its owner ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._descriptor: int | None = None
        try:
            while self._descriptor is None:
                self._descriptor = self._taken(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be written to: {error.strerror or error}.") from error
        with contextlib.suppress(OSError):  # only to tell others whose it is: a full disk shall not matter here
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"process {os.getpid()}".encode())

    def _taken(self, folder: Path) -> int | None:
        """The locked file; None if its last owner took it away before it could be locked."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    return descriptor
        except BlockingIOError:
            owner = os.read(descriptor, 100).decode(errors="replace")
            os.close(descriptor)
            raise StoreError(f"another process ({owner or 'unknown'}) is writing to {folder}: wait for it.") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # a lock on a file that is no longer in the folder keeps nobody out
        return None

    def release(self) -> None:
        """Let others in, and leave no trace."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()  # while the lock is held: afterwards the file may be another's
            os.close(self._descriptor)
            self._descriptor = None
