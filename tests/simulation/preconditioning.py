"""Preconditioned simulations of the problems, and small ones that have moments."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, simulate
from imprint.plan import State
from tests.problems import (
    Problem,
    descents,
    imprints,
    relative_error,
)

EXACT = 1e-10
PLANS = {
    "full batch": Plan(steps=7, lr=0.3, preconditioner="adam"),
    "damped": Plan(steps=7, lr=0.3, damping=0.2, preconditioner="adam"),
    "mini-batches": Plan(steps=7, lr=0.3, batch_size=6, preconditioner="adam"),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def named(problem: Problem, flat: Tensor) -> dict[str, Tensor]:
    """A vector by parameters."""
    parameters = dict(problem.task.model.named_parameters())
    pieces = torch.split(flat, [p.numel() for p in parameters.values()])
    return {name: piece.reshape(p.shape) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}


def an_m(problem: Problem) -> Tensor:
    """M of a training: a value for each parameter, from a third to three."""
    draw = torch.rand(len(problem.theta), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return 3 ** (2 * draw - 1)


def with_m(problem: Problem, m: Tensor) -> list[State]:
    """The model as it is, with the second moments that M is made of."""
    return [(problem.task.state(), named(problem, (m - 1e-8).square()))]


def run(problem: Problem, plan: Plan, m: Tensor | None = None, **options: Any) -> Store:
    checkpoints = None if m is None else with_m(problem, m)
    given = {"checkpoints": checkpoints, "batch_size": 512, "memory": "1GiB", "progress": False, **options}
    return simulate(problem.task, problem.data, problem.sources, plan, **given)


def check_trajectories(problem: Problem, plan: Plan, variant: Any, m: Tensor | None) -> None:
    """Simulated trajectories of a variant are the descents written out."""
    plan = replace(plan, engine="trajectories", variant=variant, accept_drift=variant == "mirrored")
    store = run(problem, plan, m)
    bottom, end = descents(problem, plan, m)
    share = 1 / problem.n
    for column, one in enumerate(torch.eye(len(problem.sources), dtype=torch.float64)):
        other = {"two_sided": end(-share * one), "one_sided": bottom, "mirrored": problem.theta}[variant]
        expected = (end(share * one) - other) / (2 * share if variant == "two_sided" else share)
        assert relative_error(imprints(store)[:, column], expected) < EXACT


def badly_scaled() -> Problem:
    """Linear regression on columns of sizes from 0.1 to 10, at its optimum."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, 6, dtype=torch.float64)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64) * sizes
    y = torch.randn(40, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    sources = Sources.groups({"few": range(5), "some": range(3, 20), "one": [30]})
    return Problem(Task.regression(model), (x, y), (x[:3], y[:3]), sources, lr=0.01)


def small_task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def moments_of(state: dict[str, Tensor], scale: float = 1.0) -> dict[str, Tensor]:
    return {name: scale * (0.1 + tensor.square()) for name, tensor in state.items()}


def two_checkpoints(out: Path, plan: Plan, scale: float = 1.0, **options: Any) -> Store:
    """One with moments and one without, several shards to die between."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)
    state = small_task().state()
    checkpoints: list[State] = [(state, moments_of(state, scale)), {name: t / 2 for name, t in state.items()}]
    memory = "12kB" if plan.batch_size else "56kB"
    given = {"checkpoints": checkpoints, "memory": memory, "progress": False, **options}
    return simulate(small_task(), data, Sources.by_label([i % 6 for i in range(24)]), plan, out=out, **given)
