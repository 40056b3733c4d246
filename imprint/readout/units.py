"""Which scores of a store repeat each other: those of its runs or, where there is one run, those of its checkpoints.

Runs with other seeds are independent. Checkpoints of one run are not: they share its seed, and their spread shows only
a part of what another run would change.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from imprint.store.reading import Store

Over = Literal["runs", "checkpoints"]


@dataclass(frozen=True)
class Units:
    """The runs of a store, or the checkpoints of its only run.

    shares: what each unit counts in the mean; they add up to 1.
    names: identify each unit: a hash of its checkpoints.
    members: which of the given checkpoints belong to each unit, and `weights` what each of those counts in the mean.
    """

    over: Over
    shares: tuple[float, ...]
    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.shares)

    def deviate(self, each: Sequence[Tensor], mean: Tensor) -> Tensor:
        """Return how far the scores of each unit lie from the mean, shape (units, queries, sources).

        each: the scores of every checkpoint, shape (sources, queries).
        """
        kept = torch.promote_types(each[0].dtype, torch.float32)
        found = torch.empty(len(self), *mean.shape, dtype=kept, device=mean.device)
        for unit, (members, share) in enumerate(zip(self.members, self.shares, strict=True)):
            own = sum((self.weights[i] / share * each[i].T.double() for i in members), torch.zeros_like(mean))
            found[unit] = own - mean
        return found


def find_units(store: Store, checkpoints: Sequence[int], weights: Sequence[float]) -> Units | None:
    """Return the units among some checkpoints, given by number with their weights in the mean; None if there is one."""
    if len(checkpoints) < 2:
        return None
    request = store.manifest.request
    runs: dict[int, list[int]] = {}
    for place, index in enumerate(checkpoints):
        runs.setdefault(request.runs[index], []).append(place)
    over: Over = "runs" if len(runs) > 1 else "checkpoints"
    members = tuple(map(tuple, runs.values())) if over == "runs" else tuple((i,) for i in range(len(checkpoints)))
    states = [[request.states[checkpoints[place]] for place in each] for each in members]
    return Units(
        over,
        tuple(sum(weights[place] for place in each) for each in members),
        tuple(hashlib.sha256("".join(each).encode()).hexdigest()[:16] for each in states),
        members,
        tuple(weights),
    )
