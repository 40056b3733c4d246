"""The files of one checkpoint while it is simulated: written in the store's precision, found again after a kill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from imprint.simulation.snapshot import Snapshot
from imprint.store.checkpoint import File
from imprint.store.layouts import Layout, layout
from imprint.store.values import Value
from imprint.store.workspace import SETTLING, Workspace
from imprint.task import Parameters

Result = TypeVar("Result")


@dataclass(frozen=True)
class CheckpointFiles:
    """The files in the folder of checkpoint number `index`."""

    writer: Workspace[Any]
    index: int

    @property
    def folder(self) -> str:
        return f"checkpoint-{self.index:03}"

    def write(
        self, name: str, tensors: Parameters, rows: tuple[int, int] | None = None, about: dict[str, Any] | None = None
    ) -> File:
        """Write tensors, with plain values `about` them."""
        return self.writer.tensors(self._path(name), tensors, rows, about)

    def find(
        self, name: str, rows: tuple[int, int] | None, expected: Layout | None, read: Callable[[Value], Result]
    ) -> tuple[File, Result] | None:
        """Find a file that an earlier run has written, with what `read` makes of the values about it."""
        return self.writer.done(self._path(name), rows, expected, read)

    def keep(self, name: str, tensors: Parameters, about: dict[str, Any] | None = None) -> File:
        """Write tensors unless an earlier run has."""
        found = self.find(name, None, layout(tensors), Value.mapping)
        return found[0] if found else self.write(name, tensors, about=about)

    def load(self, name: str, device: torch.device) -> Parameters:
        """Read the tensors of a file."""
        return self.writer.read(self._path(name), device)

    def snapshots(self) -> list[Snapshot]:
        """Return what may keep the state of an engine that settles the checkpoint; none where nothing outlives it."""
        places = [self.writer.settling(self.folder, number) for number in range(SETTLING)]
        return [Snapshot(place, 0, begin=self.writer.begin) for place in places if place is not None]

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}.safetensors"
