"""Files that are there in full or not at all: written beside their place, synced, renamed; and a lock on a folder.

Only regular files are replaced: a link, a device, a pipe or a folder in the place of a file is refused, and nothing
that somebody else has put there is removed. What is being written lies in a folder of its own, whose name cannot be
guessed.
"""

import contextlib
import errno
import glob
import hashlib
import os
import re
import secrets
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from imprint.errors import StoreError
from imprint.store.addresses import is_address, parse_address

try:
    import fcntl
except ImportError:  # not on this platform: folders go unlocked
    fcntl = None  # type: ignore[assignment]

Result = TypeVar("Result")
LOCK = ".imprint.lock"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OURS = re.compile(r"\.imprint-[0-9a-f]{16}\.tmp")
_HELD: set[tuple[int, int]] = set()  # the files of the locks that this process holds, by device and number
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def write(place: Path, fill: Callable[[Path], Result]) -> Result:
    """Write a file through `fill`, which is given a path to write to; durable once its result is returned."""
    try:
        refuse_irregular(place)
        place.parent.mkdir(exist_ok=True)
        with temporary_folder(place.parent) as folder:
            beside = folder / f"file{place.suffix}"
            beside.touch()
            mode = beside.stat().st_mode  # as the umask has it; safetensors makes a file for its owner alone
            result = fill(beside)
            beside.chmod(mode)
            sync(beside)
            beside.replace(place)
        sync(place.parent)
        return result
    except (OSError, SafetensorError) as error:
        raise _explain(place, error) from error


def write_tensors(place: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as a safetensors file; durable once this returns. They are streamed from where they are."""
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    end = 0
    for name, tensor in sorted(own.items(), key=lambda item: item[1].data_ptr()):
        if tensor.data_ptr() < end:  # such as tied weights: safetensors refuses tensors that share memory
            own[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    write(place, lambda path: save_file(own, path, metadata))


def refuse_irregular(place: Path) -> None:
    """Refuse to write to a place where there is anything but a regular file, or nothing."""
    try:
        mode = os.lstat(place).st_mode
    except (FileNotFoundError, NotADirectoryError):  # writing will say what is wrong with its folder
        return
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise StoreError(f"could not write {place}: it is {what}, and only a regular file is replaced.")


@contextlib.contextmanager
def temporary_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Make a new folder in another one, for its owner alone; remove it afterwards, unless it was moved away."""
    folder = parent / f"{prefix}.imprint-{secrets.token_hex(8)}.tmp"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def append(place: Path, text: str, *, durable: bool = True) -> None:
    """Add to the end of a text file; durable once this returns. A crash may leave a part of `text` there.

    durable: False hands the text to the system alone, which keeps it if the process is killed, and loses it if the
        machine is; a later durable call, of an empty text too, keeps everything before it.
    """
    try:
        refuse_irregular(place)
        is_new = not place.exists()
        descriptor = os.open(place, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _NO_LINK, 0o666)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if is_new:
            sync(place.parent)
    except OSError as error:
        raise _explain(place, error) from error


def is_leftover(path: Path, prefix: str = "") -> bool:
    """Tell whether a path is what a killed `write` has left: a folder with a name that only `write` gives."""
    named = path.name.startswith(prefix) and _OURS.fullmatch(path.name.removeprefix(prefix)) is not None
    return named and path.is_dir() and not path.is_symlink()


def clear_leftovers(folder: Path, prefix: str = "") -> None:
    """Remove what a killed `write` has left in a folder and in those directly under it.

    prefix: what the names of temporary folders begin with, in this folder alone.
    """
    for path in find_leftovers(folder) if not prefix else folder.glob(f"{glob.escape(prefix)}.imprint-*.tmp"):
        if is_leftover(path, prefix):
            shutil.rmtree(path, ignore_errors=True)


def find_leftovers(folder: Path) -> list[Path]:
    """Return what a killed `write` has left in a folder and in those directly under it."""
    inner = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()] if folder.is_dir() else []
    return [path for each in (folder, *inner) for path in each.glob(".imprint-*.tmp") if is_leftover(path)]


def find_nearest_folder(out: str | os.PathLike[str] | None) -> Path:
    """Find the existing folder in which `out` will be made; without `out`, that of temporary files."""
    if out is None:
        return Path(tempfile.gettempdir())
    if is_address(out):
        out = parse_address(out).cache
    place = Path(out).absolute().parent
    while not place.exists() and place != place.parent:
        place = place.parent
    for path in (place, Path(out)):
        if path.exists() and not path.is_dir():
            raise StoreError(f"{path} is a file: give a folder for the store.")
    return place


def refuse_unreadable(path: Path, longest: int | None = None) -> None:
    """Refuse to read what is not a regular file, since a pipe would block, or has more than so many bytes."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise StoreError(f"{path} cannot be read: it is not a regular file.")
    if longest is not None and about.st_size > longest:
        raise StoreError(
            f"{path} cannot be read: it has {about.st_size:,} bytes, and at most {longest:,} are expected."
        )


def sha256(path: Path) -> str:
    """Return the checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_damage(place: Path, size: int, checksum: str) -> str | None:
    """Return what is wrong with a file of this size and checksum, such as "missing"; None if it is as written."""
    try:
        if place.is_file() and place.stat().st_size == size and sha256(place) == checksum:
            return None
        return "damaged" if place.is_file() else "missing"
    except OSError as error:  # such as a bad sector
        return f"damaged ({error.strerror})"


def _explain(place: Path, error: OSError | SafetensorError) -> StoreError:
    number = error.errno if isinstance(error, OSError) else _find_errno(str(error))
    reason = os.strerror(number) if number else str(error)
    if number in _FULL:
        reason += ". Make room and make the same call again: a simulation with out= resumes, and "
        reason += "a store is changed in full or not at all"
    return StoreError(f"could not write {place}: {reason}.")


def _find_errno(message: str) -> int | None:
    """Find the system's error in a message of safetensors, which has it as text only."""
    found = re.search(r"os error (\d+)", message)
    return int(found[1]) if found else None


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Lock:
    """Keeps a folder to one process at a time. The system releases the lock when its owner ends, however it ends.

    It is released, too, when nothing refers to it any more.

    advice: what to say if it is this process that holds the folder already.
    """

    def __init__(self, folder: Path, name: str = LOCK, advice: str | None = None) -> None:
        self._path, self._advice = folder / name, advice
        found: int | None = None
        try:
            while found is None:
                found = self._take(folder)
        except OSError as error:
            raise StoreError(f"{folder} cannot be written to: {error.strerror or error}.") from error
        with contextlib.suppress(OSError):  # only to tell others whose it is: a full disk shall not matter here
            if os.fstat(found).st_nlink <= 1:  # else it may be a file of somebody's, under another name
                os.ftruncate(found, 0)
                os.write(found, f"process {os.getpid()}".encode())
        _HELD.add(_identify(found))
        self._release = weakref.finalize(self, _unlock, self._path, found, os.getpid())
        self._release.atexit = False

    def _take(self, folder: Path) -> int | None:
        """Lock the file; return None if its last owner removed it before it could be locked."""
        refuse_irregular(self._path)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif _identify(descriptor) in _HELD:
                raise BlockingIOError
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.stat()):
                    return descriptor
        except BlockingIOError:
            owner, own = os.read(descriptor, 100).decode(errors="replace"), _identify(descriptor) in _HELD
            os.close(descriptor)
            if own and self._advice is not None:
                raise StoreError(f"{folder} {self._advice}.") from None
            raise StoreError(f"another process ({owner or 'unknown'}) is writing to {folder}: wait for it.") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # a lock on a file that is no longer in the folder keeps nobody out
        return None

    def release(self) -> None:
        """Let others in, and leave no trace."""
        self._release()


def _identify(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _unlock(path: Path, descriptor: int, process: int) -> None:
    if os.getpid() != process:  # a forked one, whose parent holds the lock
        return
    _HELD.discard(_identify(descriptor))
    with contextlib.suppress(OSError):
        path.unlink()  # while the lock is held: afterwards the file may be another's
    os.close(descriptor)
