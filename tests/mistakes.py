"""A small task, its data and its store, to make mistakes with."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, simulate

SOURCES = Sources.by_label([i % 4 for i in range(16)])


def columns(n: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def store_of(out: Path | None = None, task: Task | None = None, **options: Any) -> Store:
    plan = options.pop("plan", Plan(steps=2, lr=0.1))
    given = {"sources": SOURCES, "data": columns(), "progress": False, **options}
    return simulate(task or classifier(), given.pop("data"), plan=plan, out=out, **given)


def classifier(**options: Any) -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(3, 3), **options)
