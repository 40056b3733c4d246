"""Parts of a store or of a ground truth that several processes make, and the folder in which they meet.

    runs/news/parts/
      shared/plan/ …              the plan, where it was chosen automatically
      shared/request/ …           what the parts are of, and how many there are
      shared/checkpoint-000/ …    how all of them simulate a checkpoint
      3-of-8/ …                   what one part has made; no other process writes there

Whatever the parts must agree on is decided by the first of them that gets so far, and taken over by the others. It is
made in a folder of its own and renamed into place, which succeeds once: no part waits for another, and none sees half
of it.
"""

import contextlib
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from imprint.display import count_of
from imprint.errors import PlanError, StoreError
from imprint.store.addresses import is_address, parse_address
from imprint.store.checkpoint import File
from imprint.store.files import (
    LOCK,
    find_damage,
    is_leftover,
    refuse_irregular,
    sync,
    temporary_folder,
    write,
)
from imprint.store.folder import PARTS
from imprint.store.values import Value, advised, read_json

SHARED = "shared"
REQUEST = "request"
PLAN = "plan"
PART = "part.json"  # written last into the folder of a part
MOST = 100_000  # parts
_SECONDS = 120
_THERE = {errno.EEXIST, errno.ENOTEMPTY}
_FOLDER = re.compile(r"([1-9]\d{0,6})-of-([1-9]\d{0,6})", re.ASCII)
_TEXT = re.compile(r"\s*(\d{1,7})\s*/\s*(\d{1,7})\s*", re.ASCII)


@dataclass(frozen=True)
class Share:
    """One of several parts: the third of eight is `Share(3, 8)`, written "3/8"."""

    number: int
    of: int

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Read a part such as "3/8".

        >>> Share.parse("3/8").of_chunks(20)
        range(5, 8)
        """
        found = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise PlanError(f'part must be a text such as "3/8", the third of eight parts; got {text!r}.')
        share = cls(int(found[1]), int(found[2]))
        if not 1 <= share.number <= share.of:
            raise PlanError(f'part {share} does not exist: of N parts the first is "1/N" and the last is "N/N".')
        if share.of > MOST:
            raise PlanError(f"part {share}: there can be at most {MOST:,} parts.")
        return share

    @classmethod
    def from_json(cls, value: Value) -> "Share":
        found = _TEXT.fullmatch(value.text())
        if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST:
            value.refuse('a part such as "3/8"')
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def folder(self) -> str:
        """The name of the part's folder."""
        return f"{self.number}-of-{self.of}"

    def of_chunks(self, count: int) -> range:
        """Return which of so many chunks belong to the part: neighbours, and as many as in any other part or one less.

        The first part always has the first chunk.
        """
        first, last = (-(-number * count // self.of) for number in (self.number - 1, self.number))
        return range(first, last)

    def others(self) -> "list[Share]":
        """Return all parts that belong together, this one included."""
        return [Share(number, self.of) for number in range(1, self.of + 1)]


def read_division(value: Value) -> int:
    """Read how many parts there are."""
    if not 1 <= (of := value.whole(1)) <= MOST:
        value.refuse(f"at most {MOST:,} parts")
    return of


@dataclass(frozen=True)
class Part:
    """A finished part of a store or of a ground truth, as `simulate_part` and `retrain_part` return it.

    share: which part it is.
    path: its folder; once the parts are merged, the folder they were merged into.
    count, total: how many of all sources or models it has.
    unit: what is counted.
    finished: how many of the parts are finished.
    """

    share: Share
    path: Path
    count: int
    total: int
    unit: str
    finished: int

    def __repr__(self) -> str:
        return f"Part({self.share}: {self.count:,} of {count_of(self.total, self.unit)} in {str(self.path)!r})"


class PartsFolder:
    """The folder of the parts that will be merged into one in `out`."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        if is_address(out):
            raise StoreError(
                f"{parse_address(out)} is in a bucket, and parts meet in a folder that all of them see: make and merge "
                "them there."
            )
        self.out = Path(out)
        self.path = self.out / PARTS
        self.shared = self.path / SHARED

    def of(self, share: Share) -> Path:
        """Return the folder of a part."""
        return self.path / share.folder

    def find(self, of: int) -> dict[int, Path]:
        """Find the folders of parts that were begun, by number."""
        found = {}
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if (name := _FOLDER.fullmatch(path.name)) and int(name[2]) == of and 1 <= int(name[1]) <= of:
                found[int(name[1])] = path
        return dict(sorted(found.items()))

    def count_finished(self, share: Share, record: str) -> int:
        """Count the parts that have their record."""
        return sum((path / record).is_file() for path in self.find(share.of).values())

    def refuse_other_use(self, content: str, *records: str) -> None:
        """Refuse to make parts in a folder that holds something else.

        records: files that show that the same thing was begun there without parts.
        """
        try:
            inside = list(self.out.iterdir()) if self.out.is_dir() else []
            is_file = self.out.exists() and not self.out.is_dir()
        except OSError as error:
            raise StoreError(f"{self.out} cannot be read: {error.strerror or error}.") from error
        if is_file:
            raise StoreError(f"{self.out} is a file: give a folder for {content}.")
        names = {path.name for path in inside if path.name != LOCK and not is_leftover(path)}
        if begun := next((name for name in records if name in names), None):
            raise StoreError(
                f"{self.out} holds {content} that was begun without parts ({begun}): finish it in the same "
                "way, or give another folder."
            )
        if names and PARTS not in names:
            raise StoreError(f"{self.out} holds something else: give a new folder for {content}.")

    def begun(self) -> list[Path]:
        """Find the folders of parts of any division that were begun."""
        inside = self.path.iterdir() if self.path.is_dir() else ()
        return sorted(path for path in inside if _FOLDER.fullmatch(path.name))

    def holds(self, record: str) -> bool:
        """Tell whether the folder holds what parts are merged into."""
        return (self.out / record).is_file()

    def division(self) -> int | None:
        """Return into how many parts the work was divided; None where no part was begun."""
        names = (_FOLDER.fullmatch(path.name) for path in self.path.iterdir()) if self.path.is_dir() else ()
        return next((int(name[2]) for name in names if name), None)

    def refuse_other_number(self, share: Share) -> None:
        """Refuse a part of another division than that of the parts in the folder."""
        for path in self.path.iterdir() if self.path.is_dir() else ():
            name = _FOLDER.fullmatch(path.name)
            if name and int(name[2]) != share.of:
                raise StoreError(
                    f"{self.out} is divided into {int(name[2])} parts, not {share.of}: give one of those, or delete "
                    f"{self.path} to divide it anew."
                )

    def publish(self, name: str, fill: Callable[[Path], None]) -> bool:
        """Share a folder with the other parts under a name; return False if another part has been first.

        fill: writes the folder's files.
        """
        place = self.shared / name
        if place.exists():
            return False
        self.shared.mkdir(parents=True, exist_ok=True)
        with temporary_folder(self.shared) as folder:
            own = folder / name
            own.mkdir()
            fill(own)
            sync(own)
            try:
                own.rename(place)
            except OSError as error:
                if error.errno in _THERE or place.exists():
                    self._await(place)
                    return False
                raise StoreError(f"could not write {place}: {error.strerror or error}.") from error
        sync(self.shared)
        return True

    def _await(self, place: Path) -> None:
        """Wait until what another part has shared can be seen here: network file systems remember what was not there.

        They look again after half a minute or so, or when the folder around it is listed.
        """
        for _ in range(_SECONDS):
            if any(path.name == place.name for path in self.shared.iterdir()) and place.exists():
                return
            time.sleep(1)
        raise StoreError(f"another part has shared {place}, but it cannot be read: is the folder the same everywhere?")

    def read(self, name: str, file: str) -> Value | None:
        """Read a file of plain values that is shared under a name; None where none is, so far."""
        place = self.shared / name / file
        return read_json(place) if place.exists() else None

    @contextlib.contextmanager
    def mending(self, name: str) -> Iterator[None]:
        """Say what to do about a file that is shared under a name, where it cannot be read."""
        if name == REQUEST:
            advice = f"Delete {self.shared / name}, make any part again, which writes it anew, and go on."
        else:
            advice = f"Delete {self.path}, and make all parts again."
        with advised(advice):
            yield

    def withdraw(self, name: str) -> None:
        """Remove what was shared under a name, if nothing else was."""
        if self.shared.is_dir() and [path.name for path in self.shared.iterdir()] == [name]:
            shutil.rmtree(self.shared / name, ignore_errors=True)

    def remove(self) -> None:
        """Remove all parts at once: a process that is killed meanwhile leaves nothing that looks like parts."""
        if not self.path.is_dir() or self.path.is_symlink():
            return
        with temporary_folder(self.out) as folder:
            self.path.rename(folder / PARTS)
            sync(self.out)

    def remove_empty(self, *, out: bool) -> None:
        """Remove the folders that a part has made which never began; `out` is one of them, or not."""
        for path in (self.shared, self.path, *([self.out] if out else [])):
            with contextlib.suppress(OSError):  # there is something in it, or it is not there
                path.rmdir()


def is_sound(place: Path, file: File) -> bool:
    """Tell whether a file is there as it was written."""
    return find_damage(place, file.bytes, file.sha256) is None


def refuse_damaged(place: Path, file: File, advice: str) -> None:
    """Refuse a file that is not what was written."""
    if found := find_damage(place, file.bytes, file.sha256):
        state = "damaged: it differs from its checksum" if found == "damaged" else found
        raise StoreError(f"{place} is {state}. To go on, {advice}.")


def place_file(source: Path, place: Path, *, link: bool) -> bool:
    """Put a file into its place, durably; return whether as another name of the same file, and not as a copy.

    link: try that.
    """
    if link and _link(source, place):
        return True
    write(place, lambda beside: shutil.copyfile(source, beside))
    return False


def _link(source: Path, place: Path) -> bool:
    """Give a file another name, in place of what has it.

    Return False where the file system cannot, and of a link, which may lead anywhere.
    """
    refuse_irregular(place)
    try:
        place.parent.mkdir(exist_ok=True)
        with temporary_folder(place.parent) as folder:
            beside = folder / "file"
            os.link(source, beside, follow_symlinks=False)
            if beside.is_symlink():  # a name of the link, not of the file; what it leads to may go with the parts
                return False
            beside.replace(place)
        sync(place.parent)
    except (OSError, NotImplementedError):
        return False
    return True
