"""A small task with its data, of which the tests spoil one part each."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Sources, Store, Task, simulate

N = 12
PLAN = Plan(steps=2, lr=0.1)
SOURCES = Sources.by_label(["ann", "bob", "cid"] * 4)


def columns(rows: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator)


def small_model(features: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(features, 4), nn.Tanh(), nn.Linear(4, 2))


def simulated(task: Task | None = None, data: Any = None, sources: Sources = SOURCES, **options: Any) -> Store:
    options = {"plan": PLAN, "progress": False, **options}
    return simulate(task or Task.classifier(small_model()), columns() if data is None else data, sources, **options)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def each_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
