"""A small model, its imprints, and the scores that are read from them."""

from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, attribute, simulate
from imprint.readout.kernels import ReadoutName

N, SOURCES = 12, Sources.by_label([index % 6 for index in range(12)])
PLAN = Plan(engine="trajectories", steps=3, lr=0.2, keep_pair=True)
FORWARD_ONLY: list[ReadoutName] = ["jvp", "central", "literal"]


def columns(rows: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=dtype), torch.randint(2, (rows,), generator=generator)


def new_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).to(dtype)


def simulated(task: Task, plan: Plan = PLAN, **options: Any) -> Store:
    data = columns(N, 1, next(task.model.parameters()).dtype)
    return simulate(task, data, SOURCES, plan, progress=False, **options)


def scored(task: Task, store: Store, queries: Any = None, **options: Any) -> Tensor:
    result = attribute(task, store, queries or columns(5, 2), progress=False, **options)
    scores: Tensor = result.scores
    return scores
