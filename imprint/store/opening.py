"""Opens the files of a store: each is compared with its checksum on first use, and its tensors with a layout."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from imprint.errors import StoreError, first_line
from imprint.store.checkpoint import File
from imprint.store.files import sha256
from imprint.store.layouts import Layout, find_misfit
from imprint.store.manifest import MANIFEST
from imprint.store.parts import is_sound
from imprint.store.remote import Fetch
from imprint.store.values import shown

_Stamp = tuple[int, int, int, int]


class Files:
    """The files of a store, opened for reading.

    manifest: the checksum of the manifest that lists them; errors say where another has taken its place.
    fetch: brings a file from where the folder is a copy of, if it is one.
    sources: id and name of every source, once they are known: errors say whose imprints are in a file.
    advice: what to do about a file that is damaged, as a sentence; errors end with it.
    """

    def __init__(self, folder: Path, manifest: str | None = None, fetch: Fetch | None = None) -> None:
        self._manifest, self._fetch = manifest, fetch
        self.folder = folder.absolute()  # a relative path holds where it was given, wherever the process goes
        self.sources: list[tuple[str, str]] = []
        self.advice = ""
        self._root = str(self.folder)
        self._verified: dict[str, _Stamp] = {}

    def check(self, file: File) -> None:
        """Refuse a file that is missing, elsewhere, or differs from its checksum; one that was checked is not read."""
        try:
            self._check(file)
        except StoreError as error:
            if self.is_outdated():
                raise StoreError(
                    f"{self.folder} was changed since it was opened, and {file.path} is no longer what it was: open "
                    "the store again."
                ) from error
            if self.advice:
                raise StoreError(f"{error} {self.advice}") from error
            raise

    def is_outdated(self) -> bool:
        """Tell whether another manifest has taken the place of the one that lists the files."""
        try:
            return self._manifest is not None and sha256(self.folder / MANIFEST) != self._manifest
        except OSError:
            return False

    def _check(self, file: File) -> None:
        if file.path in self._verified and self._is_unchanged(file):
            return
        if self._fetch is not None and not is_sound(self.folder / file.path, file):
            self._fetch(file.path)
        place = self.folder / file.path
        try:
            if not place.is_file():
                raise StoreError(f"{place} is missing: the store is damaged{self._name_sources(file)}.")
            if not Path(os.path.realpath(place)).is_relative_to(os.path.realpath(self.folder)):
                raise StoreError(f"{place} is a link that leads out of the store{self._name_sources(file)}.")
            stamp = _stamp(str(place))
            if (size := stamp[0]) != file.bytes:
                raise StoreError(
                    f"{place} is damaged: it has {size:,} bytes, {file.bytes:,} were written{self._name_sources(file)}."
                )
            if sha256(place) != file.sha256:
                raise StoreError(f"{place} is damaged: it differs from its checksum{self._name_sources(file)}.")
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"{place} cannot be read: {reason}{self._name_sources(file)}.") from error
        self._verified[file.path] = stamp

    def check_again(self, file: File) -> None:
        """Refuse damage that a file has taken since it was checked. It is hashed again only if it looks another."""
        if file.path in self._verified and not self._is_unchanged(file):
            self.check(file)

    def forget(self) -> None:
        """Check every file anew from now on."""
        self._verified.clear()

    @contextlib.contextmanager
    def open(self, file: File, layout: Layout | None = None) -> Iterator[Any]:
        """Open a file of tensors, checked; those in `layout` must be there as it says."""
        self.check(file)
        place = self.folder / file.path
        try:
            with _map(place) as tensors:
                if layout and (misfit := find_misfit(tensors, layout, others=True)):
                    raise StoreError(f"{place} does not fit the manifest: {misfit}{self._name_sources(file)}.")
                yield tensors
        except (OSError, SafetensorError, MemoryError) as error:
            raise StoreError(f"{place} cannot be read: {first_line(error)}{self._name_sources(file)}.") from error

    def check_layout(self, file: File, layout: Layout) -> None:
        """Refuse a file of tensors that is damaged, or does not hold those in `layout`."""
        with self.open(file, layout):
            pass

    def _is_unchanged(self, file: File) -> bool:
        """Tell whether a file looks as it did when it was verified; one that is gone does not."""
        try:
            return self._verified[file.path] == _stamp(f"{self._root}/{file.path}")
        except OSError:
            return False

    def _name_sources(self, file: File) -> str:
        """Name the sources in a file, in brackets."""
        if file.rows is None:
            return ""
        first, last = file.rows[0], file.rows[1] - 1
        if last >= len(self.sources):  # which are not known yet
            return f" (row {first})" if first == last else f" (rows {first} to {last})"
        one, other = self._name_source(first), self._name_source(last)
        return (
            f" (row {first}: source {one})" if first == last else f" (rows {first} to {last}: sources {one} to {other})"
        )

    def _name_source(self, row: int) -> str:
        identity, name = self.sources[row]
        return shown(identity) if name == identity else f"{shown(identity)}, {shown(name)}"


def _map(place: Path) -> Any:
    """Open a file of tensors; torch has an error of its own for a file that goes away in that moment."""
    try:
        return safe_open(place, framework="pt")
    except RuntimeError as error:
        raise FileNotFoundError(str(error).splitlines()[0]) from error


def _stamp(place: str) -> _Stamp:
    """Return what tells that a file is still the one that was looked at, without reading it."""
    about = os.stat(place)  # noqa: PTH116  (each query asks: a path would take longer to make than the answer)
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino
