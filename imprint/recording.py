"""Keeps the checkpoints that imprints want, from any training loop."""

import os
from collections.abc import Collection
from pathlib import Path

from safetensors.torch import save_model
from torch import nn

from imprint.errors import PlanError, StoreError
from imprint.files import write


class Recorder:
    """Writes the model to a folder whenever a moment comes that is worth keeping.

    at: which moments, such as epochs, early ones above all; None keeps every one it is called with.

    >>> import tempfile
    >>> recorder = Recorder(tempfile.mkdtemp(), at=(1, 3))
    >>> for epoch in range(1, 5):
    ...     recorder(nn.Linear(2, 1), epoch)
    >>> [path.name for path in recorder.paths]
    ['checkpoint-000001.safetensors', 'checkpoint-000003.safetensors']
    """

    def __init__(self, folder: str | os.PathLike[str], at: Collection[int] | None = None) -> None:
        self.folder = Path(folder)
        self._at = None if at is None else frozenset(at)

    def __call__(self, model: nn.Module, moment: int) -> None:
        """Keep the model as it is at this moment, if the moment is worth it."""
        if moment < 0:
            raise PlanError(f"a moment is a number of at least 0, such as an epoch, got {moment}.")
        if self._at is None or moment in self._at:
            place = self.folder / f"checkpoint-{moment:06}.safetensors"
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(f"could not make the folder {self.folder}: {error}.") from error
            write(place, lambda path: save_model(model, str(path)))

    @property
    def paths(self) -> list[Path]:
        """The checkpoints in the folder, in order: what `simulate` takes."""
        found = {path.stem.removeprefix("checkpoint-"): path for path in self.folder.glob("checkpoint-*.safetensors")}
        return [found[moment] for moment in sorted(filter(str.isdecimal, found), key=int)]
