"""Checks and simulations of the same task, to hold one against the other."""

from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from imprint import Check, Plan, Sources, Store, Task, check, simulate
from tests.zoo import Member

PLANS: dict[str, Plan] = {
    "tangent": Plan(steps=2, lr=0.1),
    "spectral": Plan(engine="spectral", steps=2, directions=3),
    "trajectories": Plan(engine="trajectories", steps=2, lr=0.1, keep_pair=True),
}


def checked(member: Member, plan: Plan | None = None, **options: Any) -> Check:
    given = {"queries": member.queries, "collate_fn": member.collate_fn, **options}
    return check(member.task, member.data, member.sources, plan, **given)


def simulated(member: Member, plan: Plan, **options: Any) -> Store:
    given = {"collate_fn": member.collate_fn, "progress": False, **options}
    return simulate(member.task, member.data, member.sources, plan, **given)


def classifier(n: int = 12, features: int = 4, sources: Sources | None = None, **options: Any) -> Member:
    """A linear classifier with as many examples and parameters as are wanted."""
    data = torch.randn(n, features), torch.randint(0, 3, (n,))
    task = Task.classifier(nn.Linear(features, 3), **options)
    return Member(task, data, sources or Sources.by_label([i % 3 for i in range(n)]), (data[0][:2], data[1][:2]))


def row_bytes(store: Store) -> int:
    """What the rows of all sources take, without the heads of their files."""
    total = 0
    for checkpoint in store.checkpoints:
        for file in (*checkpoint.imprints, *checkpoint.midpoints):
            with safe_open(store.path / file.path, framework="pt") as tensors:
                total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    return total


def refused(member: Member, plan: Plan | None = None, **options: Any) -> str:
    """The one problem that is found, which a simulation stops at as well."""
    found = checked(member, plan or PLANS["tangent"], **options)
    assert not found.ok and not found.to_json()["ok"]
    (problem,) = found.problems
    return problem
