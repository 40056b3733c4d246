"""Keep a readout within its memory budget: how many sources to read at once, and which imprints to keep.

Half of the budget keeps imprints between calls, so that the next queries need not read them again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from imprint.readout.base import Base
from imprint.runtime.memory import activation_bytes, tensor_bytes
from imprint.task import Batch, Parameters
from imprint.tensors.vectors import zeros_like

Loaded = tuple[Parameters, Parameters | None]
"""The imprints of some sources, and their midpoints where the readout wants them."""


@dataclass(frozen=True)
class Activations:
    """Bytes that reading one query computes: `shared` however many sources there are, and `per_source` for each."""

    shared: int
    per_source: int

    def bytes(self, sources: int, queries: int) -> int:
        """Return what reading some queries against some sources computes."""
        return (self.shared + self.per_source * sources) * queries


def measure_activations(
    base: Base, batch: Batch, count: int, *, forward_mode: bool, evaluations: int = 2
) -> Activations:
    """Measure what a readout computes, forward mode for many sources at once or plain evaluations of each."""

    def sources(rows: int) -> int:
        imprints = zeros_like(base.theta, rows)
        return activation_bytes(lambda: base.jvp(imprints, batch, count, vectorise=True))

    if not forward_mode:
        measure = base.measure(batch, count)
        return Activations(0, evaluations * activation_bytes(lambda: measure(base.theta)) // count)
    one, two = sources(1), sources(2)
    return Activations(max(0, 2 * one - two) // count, (two - one) // count)


def split_sources(sources: int, fit: int) -> list[tuple[int, int]]:
    """Return all sources in pieces of as many as fit, and of one at least."""
    size = max(1, min(sources, fit))
    return [(i, min(i + size, sources)) for i in range(0, sources, size)]


class ImprintCache:
    """Imprints as they were read, as long as there is room for them; and the last ones of each checkpoint.

    load: reads the imprints of a checkpoint from the store, from one source up to another.
    """

    def __init__(self, load: Callable[[int, int, int], Loaded], room: int) -> None:
        self._load, self._room = load, room
        self._kept: dict[tuple[int, int, int], Loaded] = {}
        self._last: dict[int, tuple[tuple[int, int, int], Loaded]] = {}

    def get(self, checkpoint: int, start: int, stop: int) -> Loaded:
        """Return the imprints of some sources, read if they are not kept."""
        key = (checkpoint, start, stop)
        if key in self._kept:
            return self._kept[key]
        if self._last.get(checkpoint, (None,))[0] == key:  # the next batch of queries wants the same
            return self._last[checkpoint][1]
        loaded = self._load(checkpoint, start, stop)
        size = tensor_bytes(loaded[0]) + tensor_bytes(loaded[1] or {})
        if size <= self._room:
            self._room -= size
            self._kept[key] = loaded
        self._last[checkpoint] = key, loaded
        return loaded

    def keeps(self, checkpoint: int, start: int, stop: int) -> bool:
        """Return whether the imprints of some sources stay where they are."""
        return (checkpoint, start, stop) in self._kept
