"""Writes a store, in a folder that can be killed at any moment and resumed: the manifest comes last."""

import json
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.addresses import is_address
from imprint.store.comparison import Evaluate, compare_training_data, difference
from imprint.store.draws import Draws
from imprint.store.files import write
from imprint.store.manifest import JOURNAL, MANIFEST, Manifest
from imprint.store.reading import Store
from imprint.store.remote import Mirror
from imprint.store.request import Request
from imprint.store.uploading import Upload, begin_upload
from imprint.store.values import parsed
from imprint.store.workspace import CheckChoices, Workspace

logger = logging.getLogger(__name__)


class Writer(Workspace[Store]):
    """The folder of a store that is being written; a temporary one without `out`.

    out: a folder, or the address of one in a bucket: files are uploaded as they are finished, the manifest last.
    """

    record = MANIFEST
    content = "the store"

    def __init__(
        self,
        out: str | os.PathLike[str] | None,
        request: Request,
        evaluate: Evaluate,
        check: CheckChoices,
        draws: Draws | None = None,
    ) -> None:
        self._out: str | os.PathLike[str] = tempfile.mkdtemp(prefix="imprint-") if out is None else out
        self._upload: Upload | None = None
        path = self._open_address() if is_address(self._out) else Path(self._out)
        try:
            super().__init__(path, request, evaluate, check, temporary=out is None, draws=draws)
        except BaseException:
            self._leave()
            raise

    def _open_address(self) -> Path:
        """Return the folder on this machine in which to write what goes to a bucket, or read what is complete there."""
        mirror = Mirror(self._out)
        contents = mirror.look()
        if contents is not None and contents.find(MANIFEST) is not None:
            return mirror.open().folder
        self._upload = begin_upload(self._out, self.content, JOURNAL)
        return self._upload.folder

    @property
    def place(self) -> str:
        return str(self.path if self._upload is None else self._upload.mirror.address)

    def _open_finished(self) -> Store:
        if self._upload is not None:  # it was killed before the manifest was in the bucket
            self._upload_store()
        return open_same(self._out, self.request, self._evaluate)

    def _publish(self, *names: str) -> None:
        if self._upload is not None:
            self._upload.push(*names)

    def _upload_store(self) -> None:
        """Upload what is missing of a complete store, the manifest last."""
        assert self._upload is not None
        files = [file.path for file in Manifest.read(self.path / MANIFEST).files()]
        self._upload.finish([*files, MANIFEST])

    def _leave(self) -> None:
        if self._upload is not None:
            self._upload.close()

    def stop(self, interrupted: bool = False) -> bool:
        resumable = super().stop(interrupted)
        self._leave()
        return resumable

    def finish(self, manifest: Manifest) -> Store:
        """Write the manifest, and open what is now a store."""
        write_manifest(self.path, manifest)
        self.close()
        if self._upload is not None:
            self._upload_store()
        store = Store(self._out)
        if self._temporary:  # a temporary folder lives as long as its store
            weakref.finalize(store, _remove, self.path, os.getpid())
        return store


def open_same(path: str | os.PathLike[str], request: Request, evaluate: Evaluate) -> Store:
    """Open the store in a folder; refuse one that was made from another request."""
    store = Store(path)
    if different := difference(store.manifest.request, request, evaluate):
        raise StoreError(f"{store.place} already holds a store, made otherwise: {different}. Give another folder.")
    compare_training_data(store.manifest.request, request).warn()
    logger.info("%s already holds this store", store.place)
    return store


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a store whose files are all there; refuse one that could not be read again."""
    place = folder / MANIFEST
    try:
        text = json.dumps(manifest.to_json(), indent=1)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"could not write {place} as JSON: {error}. Is the note made of plain values?") from error
    Manifest.from_json(parsed(text.encode(), place))
    write(place, lambda path: path.write_text(text))


def _remove(folder: Path, process: int) -> None:
    """Remove a temporary store, unless this is a child that was forked from the process it belongs to."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
