"""Keeps the checkpoints that imprints want, from any training loop."""

import operator
import os
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import SupportsIndex

from safetensors.torch import save_model
from torch import nn

from imprint.errors import PlanError, StoreError
from imprint.files import write


class Recorder:
    """Writes the model to a folder when a moment comes that is worth keeping: epoch 3 to checkpoint-000003.safetensors.

    at: which moments, such as epochs, early ones above all; None keeps every one it is called with.

    A folder is for one training, which may be resumed: if the first call comes with epoch 6, checkpoints up to epoch 5
    are its beginning. Those of epoch 6 and later were left by another training, or by this one before it was set back;
    they stay on disk, are warned of, and are left out of `paths` until they are written anew.

    >>> import tempfile
    >>> recorder = Recorder(tempfile.mkdtemp(), at=(1, 3))
    >>> for epoch in range(1, 5):
    ...     recorder(nn.Linear(2, 1), epoch)
    >>> [path.name for path in recorder.paths]
    ['checkpoint-000001.safetensors', 'checkpoint-000003.safetensors']
    """

    def __init__(self, folder: str | os.PathLike[str], at: Collection[int] | None = None) -> None:
        if at is not None and (isinstance(at, str) or not isinstance(at, Collection)):
            raise PlanError(f"at is a list of moments, such as at=(1, 2, 4), got {at!r}.")
        self.folder = Path(folder)
        self._at = None if at is None else frozenset(map(_moment, at))
        self._last: int | None = None  # the moment of the latest call
        self._left: set[int] = set()  # moments in the folder that another training has left

    def __repr__(self) -> str:
        moments = "every moment" if self._at is None else f"at {', '.join(map(str, sorted(self._at)))}"
        return f"Recorder({str(self.folder)!r}, {moments}: {len(self.paths)} kept)"

    def __call__(self, model: nn.Module, moment: SupportsIndex) -> None:
        """Keep the model as it is at this moment, if the moment is worth it; call it at every moment, kept or not."""
        if not isinstance(model, nn.Module):
            raise PlanError(
                "a recorder is called with the model and the moment, recorder(model, epoch), got a first argument of "
                f"type {type(model).__name__}: give the model itself, not its state dict."
            )
        moment = _moment(moment)
        if self._last is None or moment < self._last:
            self._begin(moment)
        self._last = moment
        if self._wants(moment):
            place = self.folder / f"checkpoint-{moment:06}.safetensors"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"could not make the folder {self.folder}: {error}.") from error
            write(place, lambda path: save_model(model, str(path)))
            self._left.discard(moment)

    @property
    def paths(self) -> list[Path]:
        """The checkpoints of this training in the folder, in order: what `simulate` takes."""
        held = self._held()
        return [held[moment] for moment in sorted(held) if self._wants(moment) and moment not in self._left]

    def _begin(self, moment: int) -> None:
        """A training begins, or goes on, at this moment: what is there from then on is not of it."""
        self._left = {held for held in self._held() if held >= moment}
        if self._left:
            warnings.warn(
                f"{self.folder} holds checkpoints of an earlier training, from {min(self._left)} to {max(self._left)}: "
                "they are left out of `paths` until they are written anew. Take a folder for each training.",
                stacklevel=3,
            )

    def _wants(self, moment: int) -> bool:
        return self._at is None or moment in self._at

    def _held(self) -> dict[int, Path]:
        """The checkpoints in the folder by moment, whoever wrote them."""
        found = {path.stem.removeprefix("checkpoint-"): path for path in self.folder.glob("checkpoint-*.safetensors")}
        return {int(moment): path for moment, path in found.items() if moment.isdecimal()}


def _moment(value: SupportsIndex) -> int:
    """A whole number of at least 0, as an int."""
    try:
        moment = operator.index(value)
    except TypeError:
        moment = -1
    if moment < 0:
        raise PlanError(f"a moment is a whole number of at least 0, such as an epoch, got {value!r}.")
    return moment
