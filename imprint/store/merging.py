"""Merges the parts of a store or of a ground truth: which folders, in what state, and one process at a time."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from imprint.display import name_some
from imprint.errors import StoreError
from imprint.store.addresses import is_address, parse_address
from imprint.store.files import LOCK, find_leftovers, is_leftover
from imprint.store.folder import PARTS, locked
from imprint.store.manifest import MANIFEST
from imprint.store.parts import PART, PartsFolder, Share
from imprint.store.remote import has_file, open_whole

_MERGED = re.compile(  # what an interrupted merge may have put into a folder
    r"parts|checkpoint-\d{3}|sources\.json|\.imprint\.lock|(probes|subsets|values-\d+)\.safetensors", re.ASCII
)


def find_target(
    parts: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], out: str | os.PathLike[str] | None
) -> tuple[list[PartsFolder], Path]:
    """Return the folders that have parts, and the one they are merged into.

    Stores may be in buckets: they are brought to this machine, with what was described there.
    """
    given = [parts] if isinstance(parts, str | os.PathLike) else list(parts)
    if not given:
        raise StoreError("there are no parts to merge: give the folder that was the out= of the parts.")
    if out is None and len(given) > 1:
        raise StoreError(f"parts in {len(given)} folders are merged into a further one: give it as out=.")
    target = given[0] if out is None else out
    if is_address(target):
        raise StoreError(f"{parse_address(target)} is in a bucket, and merging writes to a folder: give one as out=.")
    _refuse_parts_beside_addresses(given)
    return [PartsFolder(_bring_store(place)) for place in given], Path(target)


def _refuse_parts_beside_addresses(given: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse to merge stores in buckets with anything but stores, before they are downloaded."""
    folders = [Path(place) for place in given if not is_address(place)]
    others = [folder for folder in folders if not (folder / MANIFEST).is_file()]
    if len(folders) < len(given) and others:
        address = parse_address(next(place for place in given if is_address(place)))
        raise StoreError(f"{address} is in a bucket, and merged with finished stores alone: {others[0]} is none.")


def _bring_store(place: str | os.PathLike[str]) -> Path:
    """Return a folder as it is given; of an address, that of everything in its store."""
    if is_address(place) and not has_file(place, MANIFEST):
        raise StoreError(f"{parse_address(place)} holds no store, and nothing else is merged from a bucket.")
    return open_whole(place)


def refuse_mixture(folders: Sequence[PartsFolder], target: Path, record: str) -> None:
    """Refuse stores beside what is none, and stores that are to be merged into one of themselves."""
    places = [folder.out for folder in folders]
    stores = [place for place in places if (place / record).is_file()]
    if len(places) < 2 or not stores:
        return
    if others := [folder.out for folder in folders if folder.out not in stores and not folder.path.is_dir()]:
        raise StoreError(f"{others[0]} is no store, as {stores[0]} is: give the folders of finished stores.")
    if target in stores and len(stores) == len(places):
        raise StoreError(
            f"{target} is one of the stores to be merged, and they stay as they are: give a new folder as out=."
        )


@contextlib.contextmanager
def merging_into(folders: Sequence[PartsFolder], target: Path, record: str, content: str) -> Iterator[bool]:
    """Keep other processes out of the folder that parts are merged into; yield whether it holds the result already.

    Nothing of the parts is read before: while another process merges them, they are on their way into the result.
    """
    place = target / record
    try:
        require_parts(folders, target, content, merged=place.is_file())
    except StoreError:
        if not place.is_file():  # else another process has come to the end meanwhile
            raise
    if not place.is_file():
        found = target.exists()
        target.mkdir(parents=True, exist_ok=True)
        try:
            with locked(target):
                if not place.is_file():
                    yield False
                    return
        finally:
            if not found:
                with contextlib.suppress(OSError):  # there is something in it
                    target.rmdir()
    require_parts(folders, target, content, merged=True)
    yield True


def require_parts(folders: Sequence[PartsFolder], target: Path, content: str, *, merged: bool = False) -> None:
    """Refuse folders without parts, and a folder for them to be merged into that holds something else.

    merged: whether that folder holds the result already, and may be without parts.
    """
    for folder in folders:
        if not folder.path.is_dir() and not (merged and folder.out.absolute() == target.absolute()):
            raise StoreError(
                f"{folder.out} holds no parts: give the folder that was the out= of the parts of {content}."
            )
    if not merged:
        refuse_other_files(target, content)


def refuse_other_files(target: Path, content: str) -> None:
    """Refuse a folder that holds something else than what a killed merge has left."""
    if target.exists() and not target.is_dir():
        raise StoreError(f"{target} is a file: give a folder for {content}.")
    names = {path.name for path in target.iterdir() if not is_leftover(path)} if target.is_dir() else set()
    if foreign := sorted(name for name in names if not _MERGED.fullmatch(name)):
        raise StoreError(f"{target} holds something else ({foreign[0]}): give a new folder for {content}.")
    beside = [target / name for name in names if name != PARTS]
    inside = (path for folder in beside if folder.is_dir() and not folder.is_symlink() for path in folder.iterdir())
    if link := next((path for path in (*beside, *inside) if path.is_symlink()), None):
        raise StoreError(f"{link} is a link, and {content} is written to plain folders and files: remove it.")


def remove_parts(folders: Sequence[PartsFolder], target: Path) -> None:
    """Remove the parts in the folder that they were merged into."""
    for folder in folders:
        if folder.out.absolute() == target.absolute():
            folder.remove()


def tidy_up(folders: Sequence[PartsFolder], target: Path) -> None:
    """Remove what a merge has left that was killed when its result was already complete."""
    parts = any(folder.out.absolute() == target.absolute() and folder.path.is_dir() for folder in folders)
    if parts or find_leftovers(target) or (target / LOCK).exists():
        with contextlib.suppress(StoreError), locked(target):  # the folder is read-only, or another process is at work
            remove_parts(folders, target)


def find_finished(folders: Sequence[PartsFolder], of: int) -> dict[int, Path]:
    """Find the folders of all parts, by number; refuse to go on if some are missing, and say how they are made."""
    finished: dict[int, Path] = {}
    for folder in folders:
        for number, path in folder.find(of).items():
            if (path / PART).is_file():
                finished.setdefault(number, path)
    if missing := [Share(number, of) for number in range(1, of + 1) if number not in finished]:
        begun = {number for folder in folders for number in folder.find(of)}
        listed = name_some([f"{each}{' (unfinished)' if each.number in begun else ''}" for each in missing], 12)
        raise MissingPartsError(
            f"{folders[0].out} cannot be merged: of its {of} parts, these are missing: {listed}. Make each as the "
            f'others were made, with part "{missing[0]}" (`--part {missing[0]}`), and merge again.',
            missing,
        )
    return dict(sorted(finished.items()))


class MissingPartsError(StoreError):
    """Parts that are to be merged are not all there."""

    def __init__(self, message: str, missing: list[Share]) -> None:
        super().__init__(message)
        self.missing = missing
