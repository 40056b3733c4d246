"""A small store for tests of what may happen to one, and what is read from it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, attribute, simulate

N = 12
PLAN = Plan(engine="trajectories", steps=2, lr=0.1, keep_pair=True, weight=(1.0, 0.0, 2.0))
SOURCES = Sources.groups({"ann": [0, 1, 2], "bob": [2, 3], "cid": [4, 11]})


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), parameters="0.*")


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 3, generator=generator), torch.randint(0, 2, (N,), generator=generator)


def make(out: Path | str, plan: Plan = PLAN, sources: Sources = SOURCES, **options: Any) -> Store:
    """Three checkpoints, of which the second does not count, in shards of two sources and one."""
    states = [{name: scale * t for name, t in task().state().items()} for scale in (0.5, 0.8, 1.0)]
    options = {"checkpoints": states, "progress": False, "memory": "14kB", **options}
    return simulate(task(), data(), sources, plan, out=out, **options)


def scores(store: Store | Path, **options: Any) -> Tensor:
    x, y = data()
    found: Tensor = attribute(task(), store, (x[:2], y[:2]), progress=False, **options).scores
    return found


def both(store: Store) -> Tensor:
    """Scores by derivatives and by the pair of end points, which read different parts of a store."""
    return torch.stack([scores(store), scores(store, readout="literal")])
