"""Writes a store, in a folder that can be killed at any moment and resumed: the manifest comes last."""

import json
import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from imprint.errors import StoreError
from imprint.store.comparison import Evaluate, compare_training_data, difference
from imprint.store.files import write
from imprint.store.manifest import MANIFEST, Manifest
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.store.values import parsed
from imprint.store.workspace import CheckChoices, Workspace

logger = logging.getLogger(__name__)


class Writer(Workspace[Store]):
    """The folder of a store that is being written; a temporary one without `out`."""

    record = MANIFEST
    content = "the store"

    def __init__(
        self, out: str | os.PathLike[str] | None, request: Request, evaluate: Evaluate, check: CheckChoices
    ) -> None:
        path = Path(tempfile.mkdtemp(prefix="imprint-") if out is None else out)
        super().__init__(path, request, evaluate, check, temporary=out is None)

    def _open_finished(self) -> Store:
        return open_same(self.path, self.request, self._evaluate)

    def finish(self, manifest: Manifest) -> Store:
        """Write the manifest, and open what is now a store."""
        write_manifest(self.path, manifest)
        self.close()
        store = Store(self.path)
        if self._temporary:  # a temporary folder lives as long as its store
            weakref.finalize(store, _remove, self.path, os.getpid())
        return store


def open_same(path: Path, request: Request, evaluate: Evaluate) -> Store:
    """Open the store in a folder; refuse one that was made from another request."""
    store = Store(path)
    if different := difference(store.manifest.request, request, evaluate):
        raise StoreError(f"{path} already holds a store, made otherwise: {different}. Give another folder.")
    compare_training_data(store.manifest.request, request).warn()
    logger.info("%s already holds this store", path)
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
