"""What `Plan.auto` sees of a problem and chooses for it, and problems to choose for."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from imprint import Plan, Sources, Task
from imprint.data import Data
from imprint.simulation.descent import Descent
from imprint.simulation.look import Look, look, measure_own_curvature
from tests.problems import (
    Problem,
    converge,
    descend,
    overlapping,
    softmax_regression,
    squared_norm,
)


def descent_of(problem: Problem) -> Descent:
    functional, theta = problem.task.at(problem.task.state())
    data, sources = Data(problem.data, device=torch.device("cpu")), Sources.groups({"all": [0]})
    return Descent(functional, theta, data, sources, Plan(engine="spectral"), steps=1, lr=1.0)


def looked(problem: Problem) -> Look:
    with problem.task.evaluating():
        return look(descent_of(problem), lambda products: None)


def own_curvature(problem: Problem) -> float:
    with problem.task.evaluating():
        return measure_own_curvature(descent_of(problem))


def chosen(problem: Problem, **more: Any) -> Plan:
    return Plan.auto(problem.task, problem.data, Sources.per_example(problem.n), progress=False, **more)


def linear(targets: float = 1.0, decay: float | None = 0.1) -> Problem:
    """Linear regression at its optimum, with targets in some unit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    y = targets * (x.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator, dtype=torch.float64))
    model = nn.Linear(4, 1).double()
    task = Task.regression(model, regulariser=squared_norm(decay) if decay else None)
    return converge(Problem(task, (x, y), (x[:3], y[:3]), overlapping(40), lr=0.3))


def classifier(scale: float = 1.0, dropout: bool = False, where: str = "tuple") -> tuple[Task, Any]:
    """A softmax problem whose loss is multiplied, in float64."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64) + F.one_hot(y, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *([nn.Dropout(0.5)] if dropout else []), nn.Linear(4, 3)).double()
    nn.utils.vector_to_parameters(torch.randn(31, generator=generator, dtype=torch.float64), model.parameters())
    keys: tuple[Any, Any] = (0, 1) if where == "tuple" else ("x", "labels")
    task = Task(
        model,
        outputs=lambda model, batch: model(batch[keys[0]]),
        output_loss=lambda z, batch: scale * F.cross_entropy(z, batch[keys[1]], reduction="none"),
    )
    return task, ((x, y) if where == "tuple" else {"x": x, "labels": y})


def descended(steps: int) -> Problem:
    """Softmax regression that starts far from the optimum."""
    problem = softmax_regression()
    model = nn.Linear(3, 3, dtype=torch.float64)
    nn.init.constant_(model.bias, 0.0)
    model.weight.data.copy_(2 / 3 - 2 * torch.eye(3))  # what all classes share would be seen by the regulariser alone
    task = Task.classifier(model, regulariser=squared_norm(0.1))
    return descend(replace(problem, task=task), steps)


def each_example(task: Task, data: Any) -> tuple[Task, Any, Sources]:
    return task, data, Sources.per_example(30)
