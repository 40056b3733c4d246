"""Gathers scores as they are read, block by block: all of them, or only the first sources of each query."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from imprint.attribution.replicates import Replicates, replicate
from imprint.attribution.top import Best, Order, merge_best
from imprint.readout.units import Units


@dataclass
class Collected:
    """The scores read so far, of so many batches of queries.

    units: the runs whose deviations are kept; None where none are.
    k: how many sources of each query to keep, the first `by` this order; None keeps all.
    squares: the sum of the squares of all scores, kept or not.
    """

    batches: int
    units: Units | None
    k: int | None
    by: Order
    squares: float = 0.0
    parts: dict[int, list[tuple[Tensor, Tensor | None]]] = field(default_factory=dict)
    best: dict[int, Best] = field(default_factory=dict)

    def add(self, batch: int, start: int, block: Tensor, deviations: Tensor | None) -> None:
        """Add the scores of a batch of queries for some sources, from number `start` on."""
        self.squares += float(block.double().square().sum())
        if self.k is None:
            self.parts.setdefault(batch, []).append((block, deviations))
        else:
            self.best[batch] = merge_best(self.best.get(batch), block, deviations, start, self.k, self.by)

    @property
    def indices(self) -> Tensor:
        """The numbers of the first sources, shape (queries, k)."""
        return torch.cat([self.best[batch][0] for batch in range(self.batches)])

    @property
    def scores(self) -> Tensor:
        """The scores of all queries, shape (queries, sources), or (queries, k) of the first."""
        if self.k is not None:
            return torch.cat([self.best[batch][1] for batch in range(self.batches)])
        return torch.cat([torch.cat([block for block, _ in self.parts[batch]], 1) for batch in range(self.batches)])

    @property
    def replicates(self) -> tuple[Replicates, ...]:
        """How the scores of the runs deviate; empty where they were not kept."""
        if self.units is None:
            return ()
        if self.k is None:
            every = [[each for _, each in self.parts[batch] if each is not None] for batch in range(self.batches)]
            joined = torch.cat([torch.cat(blocks, 2) for blocks in every], 1)
        else:
            joined = torch.cat([each for batch in range(self.batches) if (each := self.best[batch][2]) is not None], 1)
        return replicate(self.units, joined)
