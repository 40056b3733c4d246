"""A store of five sources at two checkpoints, of which most tests of a folder are."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, simulate

N = 12
SOURCES = Sources.groups(
    {"ann": [0, 1, 2], "bob": [2, 3], "cid": [4], "dot": range(5, 12), "eve": [0, 11]}, names={"eve": "Eve & co"}
)
PLAN = Plan(engine="trajectories", steps=(2, 3), lr=0.1, keep_pair=True)
CPU = torch.device("cpu")


def columns(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator)


def new_task() -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        model(3 * columns(N, 1)[0] + 1)  # so that the running statistics are not those of a new layer
    return Task.classifier(model, parameters=["0.*", "3.weight"])


def simulated(task: Task, out: Path | None, plan: Plan = PLAN, **options: Any) -> Store:
    states = [{name: tensor.clone() for name, tensor in task.state().items()}, task.state()]
    states[0]["0.bias"] += 0.1
    options = {"checkpoints": states, "progress": False, **options}
    return simulate(task, columns(N, 1), SOURCES, plan, out=out, **options)
