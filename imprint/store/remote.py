"""Folders in buckets, read through a cache: what is needed is downloaded, compared with its checksum, and kept.

A `Mirror` is the folder of an address on this machine: its plain values, as the list of the bucket has them now, and
those of its tensors that were asked for. `uploading` writes such a folder. Everything that takes a folder takes an
address, through `locate`, `Mirror` or `Upload`, at the edges.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.addresses import Address, is_address, parse_address
from imprint.store.bucket import Bucket, Object
from imprint.store.checkpoint import INSIDE
from imprint.store.contents import CONTENTS, LONGEST, Contents, Entry
from imprint.store.files import Lock, sha256
from imprint.store.parts import place_file

Fetch = Callable[[str], None]
"""Brings a file of a folder, by its path in it, as the bucket has it."""
READ, WORK = "read", "work"  # the folders in an address's cache: what is read, and what is being written
LATER = ".safetensors"  # what is downloaded when it is asked for


class Mirror:
    """The folder of an address as it is on this machine."""

    def __init__(self, place: str | os.PathLike[str] | Address, bucket: Bucket | None = None) -> None:
        self.address = place if isinstance(place, Address) else parse_address(place)
        self.bucket = Bucket(self.address) if bucket is None else bucket
        self.cache = self.address.cache
        self.folder = self.cache / READ
        self.contents: Contents | None = None
        self.found: Object | None = None

    def look(self) -> Contents | None:
        """Read the list; None where there is none."""
        self.found = self.bucket.read(CONTENTS, LONGEST)
        found = self.found
        self.contents = None if found is None else Contents.parse(found.content, self.address.of(CONTENTS))
        return self.contents

    def require(self) -> Contents:
        """Read the list; refuse an address where there is none."""
        contents = self.look()
        if contents is None or not contents.files:
            raise StoreError(f"there is nothing at {self.address}: no list of files, {CONTENTS}, is there.")
        return contents

    def open(self, *, whole: bool = False) -> "Mirror":
        """Bring the plain values of the folder up to date, and with `whole` everything in it."""
        contents = self.require()
        with self._alone() as alone:
            if alone:
                self._forget(contents)
        for entry in contents.files:
            if whole or _is_plain(entry.path):
                self.bring(entry, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def refresh(self, contents: Contents, whole: str | None = None) -> None:
        """Make the plain values of the folder what a list says, and everything in the folder `whole`.

        For whoever keeps other processes of this machine from writing there.
        """
        self._forget(contents, whole)
        for entry in contents.files:
            if _is_plain(entry.path) or _is_in(entry.path, whole):
                self.bring(entry, self.folder)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Keep other processes of this machine from writing there; yield False if one does: what it has is unlisted."""
        lock: Lock | None = None
        with contextlib.suppress(StoreError):
            lock = Lock(self.cache)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _forget(self, contents: Contents, whole: str | None = None) -> None:
        """Remove cached plain values that the folder no longer has: a store is read with what lies beside it.

        What other processes are downloading has names that no list has, and stays.
        """
        for place in self.folder.rglob("*") if self.folder.is_dir() else ():
            path = place.relative_to(self.folder).as_posix()
            is_ours = INSIDE.fullmatch(path) is not None and (_is_plain(path) or _is_in(path, whole))
            if is_ours and place.is_file() and contents.find(path) is None:
                place.unlink(missing_ok=True)

    def address_of(self, folder: Path) -> str:
        """Return the address of a folder in this one."""
        return f"{self.address}/{folder.relative_to(self.folder).as_posix()}".removesuffix("/.")

    def fetch_into(self, folder: Path) -> Fetch:
        """Return what brings files of a folder in this one, by their paths in it.

        Whatever is in the place of a file is replaced: it was missing or damaged.
        """
        inner = folder.relative_to(self.folder)

        def fetch(path: str) -> None:
            entry = self.contents.find((inner / path).as_posix()) if self.contents else None
            if entry is None:
                raise StoreError(f"{self.address_of(folder)}/{path} is missing: {CONTENTS} has no such file.")
            self.bucket.download(entry.object, entry.known, folder / path)

        return fetch

    def bring_to(self, place: Path) -> None:
        """Put a file of the folder into its place, if the folder has it."""
        entry = self.contents.find(place.relative_to(self.folder).as_posix()) if self.contents else None
        if entry is not None:
            self.bring(entry, self.folder)

    def bring(self, entry: Entry, folder: Path) -> None:
        """Put a file of the list into a folder: from the cache if it is there as it was written, or by download."""
        place = folder / entry.path
        if is_cached(place, entry):
            return
        other = self.cache / READ / entry.path
        if other != place and is_cached(other, entry):
            place_file(other, place, link=place.name.endswith(LATER))  # what is appended to is copied
        else:
            self.bucket.download(entry.object, entry.known, place)

    def verify(self, folder: Path, files: Mapping[str, str]) -> None:
        """Check every object of a folder in this one; the first that is missing or damaged is named.

        Plain values are then here as they are in the bucket, unless a process of this machine is writing there.

        files: what the bucket must have of the folder: checksums, by paths in it.
        """
        contents, inner = self.require(), folder.relative_to(self.folder)
        for path, checksum in files.items():
            entry, place = contents.find((inner / path).as_posix()), f"{self.address_of(folder)}/{path}"
            if entry is None:
                raise StoreError(f"{place} is missing: {CONTENTS} has no such file.")
            if entry.sha256 != checksum:
                raise StoreError(
                    f"{place} is not the file that was opened: {CONTENTS} has another checksum. Open the store again; "
                    "if that does not help, what is kept there is damaged."
                )
        for entry in contents.files:
            if Path(entry.path).is_relative_to(inner):
                self.bucket.check(entry.object, entry.known)
        with self._alone() as alone:
            if alone:
                self.refresh(contents)


def _is_plain(path: str) -> bool:
    return not path.endswith(LATER)


def _is_in(path: str, folder: str | None) -> bool:
    return path.split("/")[0] == folder


def is_cached(place: Path, entry: Entry) -> bool:
    """Tell whether a file is there as the list has it, by its checksum."""
    try:
        about = os.lstat(place)
        return stat.S_ISREG(about.st_mode) and about.st_size == entry.bytes and sha256(place) == entry.sha256
    except OSError:
        return False


def open_whole(place: str | os.PathLike[str]) -> Path:
    """Return a folder for reading; of an address, everything in it is brought to this machine first."""
    return Mirror(place).open(whole=True).folder if is_address(place) else Path(place)


def has_file(place: str | os.PathLike[str], name: str) -> bool:
    """Tell whether there is a file of a name in a folder, or at an address."""
    if not is_address(place):
        return (Path(place) / name).is_file()
    contents = Mirror(place).look()
    return contents is not None and contents.find(name) is not None


def has_anything(place: str | os.PathLike[str]) -> bool:
    """Tell whether there is something at a path or an address."""
    if not is_address(place):
        return Path(place).exists()
    contents = Mirror(place).look()
    return contents is not None and bool(contents.files)


def name_place(place: str | os.PathLike[str]) -> str:
    """Return how messages name a folder or an address."""
    return str(parse_address(place)) if is_address(place) else str(place)
