"""Writes a folder in a bucket: in a folder on this machine, whose files are uploaded as they are finished.

The list of the folder is replaced after the files that it names. It also says who is writing: nobody else begins while
that one renews it, and whoever takes over from one that went silent leaves it unable to replace the list.
"""

import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.bucket import Known
from imprint.store.checkpoint import INSIDE
from imprint.store.contents import CONTENTS, Contents, Entry
from imprint.store.files import Lock, sha256, write
from imprint.store.manifest import MANIFEST
from imprint.store.remote import LATER, WORK, Mirror, is_cached

logger = logging.getLogger(__name__)
SILENCE = 120.0  # seconds without a word after which a writer counts as dead
_WRITER = "writer"
_PATIENCE = 9.0  # times as long as it takes to write the list, the list is not written again


class Upload:
    """The folder of an address while this process writes there; nobody else does meanwhile.

    folder: what is in the bucket and more, on this machine. What an earlier process left here is kept if it was the
        last to write to the bucket; otherwise everything is brought from there.
    editing: changes a few files beside those of a complete store, in the folder from which it is read. They are as
        they are in the bucket now, whatever was read of the store before; so is everything in the folder `replaced`.
    """

    def __init__(self, mirror: Mirror, *, editing: bool = False, replaced: str | None = None) -> None:
        self.mirror = mirror
        self.folder = mirror.folder if editing else mirror.cache / WORK
        mirror.cache.mkdir(parents=True, exist_ok=True)
        self._local = Lock(mirror.cache)
        self._uploading = threading.Lock()  # of uploads, and of lists that name what was uploaded; taken first
        self._guard = threading.Lock()  # of the list, which is renewed whatever is being uploaded
        self._ended = threading.Event()
        self._swapped, self._took = time.monotonic(), 0.0
        self._pending: dict[str, None] = {}  # small files that go with the next list
        self._uploaded: dict[str, Entry] = {}  # what it names besides
        self._written: set[str] = set()  # objects that were written since the list was
        self._lost: str | None = None
        self._contents = Contents.begin()  # the list as it is in the bucket
        work = (self._renew, self._catch_up)
        self._threads = [threading.Thread(target=each, name="imprint-upload", daemon=True) for each in work]
        try:
            own, who = _identify(mirror.cache), f"process {os.getpid()} on {socket.gethostname()}"
            opened = mirror.contents
            before = mirror.require() if editing else mirror.look()
            self._tag = mirror.found.tag if mirror.found else None
            self._refuse_other(before, own)
            if editing:
                self._refuse_other_store(opened, before)
            if before is None or before.writer != own:  # others have gone on, or nothing is there any more
                shutil.rmtree(mirror.cache / WORK, ignore_errors=True)
            self._swap(replace(before or Contents.begin(), writer=own, who=who, held=True))
            for thread in self._threads:
                thread.start()
            self.folder.mkdir(parents=True, exist_ok=True)
            if editing:
                mirror.refresh(self._contents, replaced)
            else:
                self._bring()
        except BaseException:
            self.close()
            raise

    def _refuse_other(self, found: Contents | None, own: str) -> None:
        """Refuse to write where somebody else is at work."""
        if found is None or not found.held or found.writer == own or self.mirror.found is None:
            return
        silent = self.mirror.bucket.now() - self.mirror.found.written
        if silent < SILENCE:
            raise StoreError(
                f"{self.mirror.address} is being written to by {found.who}: wait for it. If it was killed, its claim "
                f"ends in {SILENCE - silent:.0f} seconds."
            )
        logger.warning("%s was left by %s, and is taken over", self.mirror.address, found.who)

    def _refuse_other_store(self, opened: Contents | None, found: Contents | None) -> None:
        """Refuse to edit beside another store than was opened."""
        was, now = (None if each is None else each.find(MANIFEST) for each in (opened, found))
        if was is None or was != now:
            raise StoreError(f"{self.mirror.address} holds another store than was opened: open it again.")

    def _bring(self) -> None:
        """Bring what is missing here; what is here is as new as in the bucket, or newer."""
        for entry in self._contents.files:
            if not (self.folder / entry.path).exists():
                self.mirror.bring(entry, self.folder)

    def push(self, *paths: str, now: bool = False) -> None:
        """Upload files of tensors that are new, and the list that names them, with the others that have changed.

        The list is left for later if it has just been written, unless `now`: files that are not on it are written
        again by whoever resumes elsewhere.
        """
        with self._uploading:
            self._pending.update(dict.fromkeys(path for path in paths if not path.endswith(LATER)))
            for path in paths:
                if path.endswith(LATER):
                    self._uploaded[path] = self._upload(path)
            if now or time.monotonic() - self._swapped >= _PATIENCE * self._took:
                self._publish()

    def _publish(self, *, held: bool = True) -> None:
        """Replace the list, after the small files that are due."""
        while self._pending:
            path = next(iter(self._pending))
            self._uploaded[path] = self._upload(path)
            del self._pending[path]
        self._name(self._uploaded.values(), held=held)

    def finish(self, paths: Iterable[str]) -> None:
        """Upload what the folder finally consists of, the last file last, and end: nothing else remains in it."""
        with self._uploading:
            entries = []
            for path in dict.fromkeys(paths):
                self._uploaded[path] = self._upload(path)
                entries.append(self._uploaded[path])
            self._name(entries, only=True, held=False)
        self._end()
        for entry in self._contents.files:
            _move(self.folder / entry.path, self.mirror.folder / entry.path, entry)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._local.release()

    def finish_editing(self, beside: Collection[str], replaced: str | None) -> None:
        """Upload what has changed beside a complete store, and end.

        beside: the files and folders that may have changed.
        replaced: the one of them of which everything is on this machine; of the others, tensors may not be.
        """
        here = [path for path in self._list_here() if path.split("/")[0] in beside]
        with self._uploading:
            entries = {path: self._upload(path) for path in here}
            for entry in self._contents.files:
                top = entry.path.split("/")[0]
                if top not in beside or (entry.path.endswith(LATER) and top != replaced):
                    entries.setdefault(entry.path, entry)
            self._name(entries.values(), only=True, held=False)
        self._end()
        self.mirror.contents = self._contents
        self._local.release()

    def _list_here(self) -> list[str]:
        paths = (place.relative_to(self.folder).as_posix() for place in self.folder.rglob("*") if place.is_file())
        return sorted(path for path in paths if INSIDE.fullmatch(path))

    def close(self) -> None:
        """Let others write; whoever resumes finds what was uploaded, and this machine what it has besides."""
        if self._ended.is_set():
            return
        try:
            with self._uploading:
                if self._contents.held:
                    self._publish(held=False)
                    if not self._contents.files:
                        self.mirror.bucket.delete(CONTENTS)
        except StoreError as error:
            logger.warning("%s", error)
        finally:  # interrupted a second time, too: what goes on claiming the address would keep everybody out
            self._end()
            self._local.release()

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join()

    def _upload(self, path: str) -> Entry:
        """Upload a file unless the bucket has it, and return its entry, which the next list is to have."""
        self._refuse_lost()
        place = self.folder / path
        try:
            content = place if path.endswith(LATER) else place.read_bytes()  # which may grow meanwhile
            size = len(content) if isinstance(content, bytes) else place.stat().st_size
            digest = hashlib.sha256(content).hexdigest() if isinstance(content, bytes) else sha256(place)
        except OSError as error:
            raise StoreError(f"{place} cannot be read: {error.strerror or error}.") from error
        known = Known(digest, size)
        there = self._uploaded.get(path) or self._contents.find(path)
        if there is not None and there.known == known:
            return there
        with self._guard:
            self._refuse_taken_over()  # before an object is overwritten, and not only before the list is
        entry = self._contents.having(self._uploaded.values()).plan(path, known, self._list_objects())
        self._written.add(entry.object)
        self.mirror.bucket.upload(entry.object, content)
        return entry

    def _list_objects(self) -> set[str]:
        return {entry.object for entry in self._contents.files}

    def _name(self, entries: Iterable[Entry], *, only: bool = False, held: bool = True) -> None:
        """Have the list name some files, with `only` these alone, and delete the objects that it no longer names.

        They are deleted before others may write, who could use their names again.
        """
        before = self._list_objects() | self._written
        contents = self._contents.having(entries, only=only)
        unnamed = before - {entry.object for entry in contents.files}
        self._replace(contents, held=held or bool(unnamed))
        self._uploaded.clear()
        self._written.clear()
        for name in unnamed:
            self.mirror.bucket.delete(name)
        if not held and unnamed:
            self._replace(contents, held=False)

    def _replace(self, contents: Contents, *, held: bool) -> None:
        """Replace the list by one of other files."""
        with self._guard:
            self._swap(replace(self._contents, files=contents.files, held=held))

    def _swap(self, contents: Contents) -> None:
        """Replace the list, if it is still as this process wrote it."""
        self._refuse_lost()
        began = time.monotonic()
        contents = replace(contents, number=contents.number + 1)
        tag = self.mirror.bucket.swap(CONTENTS, contents.to_bytes(), self._tag)
        if tag is None:
            self._lose()
        self._tag, self._contents, self._swapped = tag, contents, time.monotonic()
        self._took = self._swapped - began

    def _refuse_taken_over(self) -> None:
        """Refuse to go on if the list is not as this process wrote it: it was stopped so long that another one writes.

        What that one has uploaded may lie in objects of the same names, which must stay as its list says.
        """
        if self.mirror.bucket.tag(CONTENTS) != self._tag:
            self._lose()

    def _lose(self) -> None:
        self._lost = f"another process has taken over writing to {self.mirror.address}: this one cannot go on."
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self._lost:
            raise StoreError(self._lost)

    def _renew(self) -> None:
        """Write the list from time to time, so that others see that this process is alive, whatever it is doing."""
        while not self._ended.wait(min(1.0, SILENCE / 8)):
            if self._lost or time.monotonic() - self._swapped < SILENCE / 4:
                continue
            try:
                with self._guard:
                    if self._contents.held:
                        self._swap(self._contents)
            except StoreError as error:  # the next upload says what is wrong, if it still is
                logger.debug("%s", error)
                self._swapped = time.monotonic()

    def _catch_up(self) -> None:
        """Publish from time to time what `push` has left for later."""
        tried = 0.0
        while not self._ended.wait(1.0):
            waited = time.monotonic() - max(tried, self._swapped)
            is_due = bool(self._pending or self._uploaded)
            if self._lost or not is_due or waited < max(1.0, _PATIENCE * self._took):
                continue
            try:
                with self._uploading:
                    if self._contents.held and not self._ended.is_set():
                        self._publish()
            except StoreError as error:  # as above
                logger.debug("%s", error)
            tried = time.monotonic()


def begin_upload(place: str | os.PathLike[str], content: str, *records: str) -> Upload:
    """Begin to write to an address; refuse one that holds something else than `content`, in words.

    records: the files of which one says that it holds that.
    """
    mirror = Mirror(place)
    contents = mirror.look()
    if contents is not None and contents.files and not any(contents.find(name) for name in records):
        raise StoreError(f"{mirror.address} holds something else: give a new folder for {content}.")
    return Upload(mirror)


@contextlib.contextmanager
def editing(mirror: Mirror | None, *beside: str, replaced: str | None = None) -> Iterator[None]:
    """Have what is changed beside a complete store, in its folder on this machine, take effect in its bucket.

    Without a mirror the folder is the store's own. After an error nothing has changed in the bucket.
    """
    if mirror is None:
        yield
        return
    upload = Upload(mirror, editing=True, replaced=replaced)
    try:
        yield
        upload.finish_editing({*beside, *filter(None, [replaced])}, replaced)
    finally:
        upload.close()


def _identify(cache: Path) -> str:
    """Return what identifies this cache as a writer: its folder may be resumed, where no other was written to since."""
    place = cache / _WRITER
    if not place.is_file():
        write(place, lambda path: path.write_text(secrets.token_hex(16)))
    return place.read_text()[:64]


def _move(place: Path, target: Path, entry: Entry) -> None:
    """Keep an uploaded file for those who read it next."""
    with contextlib.suppress(OSError):  # it can be downloaded
        if not is_cached(target, entry):
            target.parent.mkdir(parents=True, exist_ok=True)
            place.replace(target)
