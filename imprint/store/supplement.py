"""The folder in which what a store lacks is simulated, inside the store: new sources, or new checkpoints.

Everything about the simulation comes from the store: how its checkpoints were settled, and the basis that imprints
are kept on. The folder is resumed like that of any simulation, and removed once the store has its next version.
"""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from imprint.errors import StoreError
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.comparison import Evaluate, describe_other_end
from imprint.store.draws import Draws
from imprint.store.files import sync, temporary_folder
from imprint.store.manifest import JOURNAL, Manifest
from imprint.store.parts import refuse_damaged
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.store.values import read_json
from imprint.store.workspace import CheckChoices, Workspace
from imprint.task import Parameters

UPDATE = "update"


class Supplement(Workspace[Manifest]):
    """What a store lacks, while it is simulated; its record is never written, and nothing is read from it but files.

    checkpoints: those that are simulated. The store has those before them.
    compares_ends: whether a path that ends elsewhere than that of the store is refused, as a sign of other data.
    """

    record = "supplement.json"
    content = "what the store lacks"
    otherwise = "Finish that update first, with its sources but for those that were dropped since, or delete {path}"
    is_whole: ClassVar[bool] = False

    def __init__(
        self,
        store: Store,
        request: Request,
        evaluate: Evaluate,
        check: CheckChoices,
        checkpoints: range,
        draws: Draws | None,
        *,
        compares_ends: bool,
    ) -> None:
        self._compares_ends = compares_ends
        self._store, self._checkpoints, self._sound = store, checkpoints, set[str]()
        self.begins = checkpoints.start > 0
        super().__init__(store.path / UPDATE, request, evaluate, check, draws=draws)
        self.begin()  # a checkpoint that the store has is never settled here, and so would not be noted

    def _open_finished(self) -> Manifest:
        raise NotImplementedError  # there is no record

    def finish(self, manifest: Manifest) -> Manifest:
        """Return what was simulated; its files stay until the store has them."""
        self._lock.release()
        return manifest

    def simulates(self, index: int) -> bool:
        return index in self._checkpoints

    def check_end(self, index: int, base: Parameters) -> None:
        if not self._compares_ends or index >= len(self._store.checkpoints):
            return
        known = self._store.base(index, torch.device("cpu"))
        found = {name: tensor.detach().cpu() for name, tensor in base.items() if name in known}
        if different := describe_other_end(found, known):
            raise StoreError(
                f"{self._store.path} cannot be updated: at checkpoint {index} {different}. It was made from other "
                "training data, which was not compared in full: simulate a new store."
            )

    def settled(self, index: int) -> Checkpoint | None:
        """Return how the store simulated a checkpoint; a new one is settled here."""
        if index >= len(self._store.checkpoints):
            return super().settled(index)
        found = self._store.checkpoints[index]
        measured = replace(found.measured, norms=None, linearity=None, lost=None)  # which are of all sources
        return replace(found, measured=measured, base=None, imprints=(), midpoints=(), basis=None, noise=None)

    def _locate(self, name: str, rows: tuple[int, int] | None) -> tuple[Path, File] | None:
        file = self._find_basis(name)
        return super()._locate(name, rows) if file is None else (self._store.path / name, file)

    def _place(self, name: str) -> Path:
        return super()._place(name) if self._find_basis(name) is None else self._store.path / name

    def _find_basis(self, name: str) -> File | None:
        """Find the basis of a checkpoint that the store has; refuse a damaged one."""
        bases = (checkpoint.basis for checkpoint in self._store.checkpoints)
        file = next((basis for basis in bases if basis is not None and basis.path == name), None)
        if file is not None and name not in self._sound:
            refuse_damaged(self._store.path / name, file, f"restore {self._store.path} from a copy")
            self._sound.add(name)
        return file


def holds_other_work(store: Store) -> bool:
    """Tell whether the folder holds what the store lacks, and not what a killed update had already put into it."""
    if not (place := store.path / UPDATE / JOURNAL).is_file():
        return False
    try:
        request = Request.from_json(read_json(place).unsealed().mapping()["request"])
    except (StoreError, KeyError):
        return True
    history, table = store.manifest.history, store.table
    if request.states != store.manifest.request.states or not history or history[-1].kind != "updated":
        return True
    added = {*history[-1].added_ids} or {*table.ids}  # further checkpoints are of all sources
    return table.select([row for row, name in enumerate(table.ids) if name in added]).sha256 != request.members


def remove_supplement(store: Path) -> None:
    """Remove the folder at once: a process that is killed meanwhile leaves nothing that looks like one."""
    place = store / UPDATE
    if place.is_dir() and not place.is_symlink():
        with temporary_folder(store) as folder:
            place.rename(folder / UPDATE)
            sync(store)
