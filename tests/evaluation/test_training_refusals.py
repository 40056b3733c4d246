"""What cannot be trained together is refused, and memory decides on how many are."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import DataError, PlanError, Task, TaskError
from imprint.data import Data
from imprint.evaluation.training import Training, models_at_once
from imprint.task import Batch
from tests.evaluation.trainings import CPU, LABELS, PERCEPTRON, SEEDS, SUBSETS, TRAINING, Kind, Scaled, draw

MOVING = {
    "changed by training": lambda: Scaled(counting=True).double(),
    "drawn by the seed": lambda: Scaled(drawn=True).double(),
}


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False), nn.BatchNorm1d(6, affine=False)],
    ids=["statistics", "no statistics", "no weights"],
)
def test_models_with_batch_norm_are_refused(layer: nn.Module) -> None:
    kind = Kind(lambda: nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(6, 3)).double(), PERCEPTRON.data)
    with pytest.raises(TaskError, match=r"batch norm.*train\(subset, seed\)"):
        kind.together(SUBSETS, SEEDS, TRAINING)
    with pytest.raises(TaskError, match="batch norm"):
        models_at_once(kind.build, kind.task, kind.inputs, TRAINING)


@pytest.mark.parametrize("build", MOVING.values(), ids=MOVING.keys())
def test_models_with_buffers_that_are_not_constant_are_refused(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(TaskError, match=r"buffers that depend on training or on the seed.*train\(subset, seed\)"):
        Kind(build, PERCEPTRON.data).together(SUBSETS, SEEDS, TRAINING)


def test_models_that_vmap_cannot_run_are_refused_with_the_reason() -> None:
    def losses(model: nn.Module, batch: Batch) -> Tensor:
        values = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return values if values.sum().item() > 0 else -values

    kind = Kind(PERCEPTRON.build, PERCEPTRON.data, lambda model: Task(model, losses))
    with pytest.raises(TaskError, match=r"cannot be trained together.*RuntimeError.*train\(subset, seed\)"):
        kind.together(SUBSETS, SEEDS, TRAINING)


def at_once(width: int, memory: str) -> int:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    inputs = Data((draw(30, 4).float(), LABELS), device=CPU)
    return models_at_once(build, Task.classifier, inputs, TRAINING, memory)


def test_more_memory_and_smaller_models_let_more_train_at_once() -> None:
    assert at_once(100, "1kB") == 1
    assert 1 < at_once(100, "1MB") < at_once(100, "4MB")
    assert at_once(1000, "4MB") < at_once(100, "4MB")
    assert at_once(10**6, "1TB") == 1  # one alone is more than the caches of a CPU hold


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "optimiser": ({"optimiser": "Adam"}, "optimiser 'Adam' is unknown: use one of sgd, adam, adamw"),
    "schedule": ({"schedule": "step"}, "schedule 'step' is unknown"),
    "epochs": ({"epochs": 0}, "epochs must be at least 1, got 0"),
    "batch size": ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    "step size": ({"lr": math.nan}, "lr must be at least 0, got nan"),
    "momentum": ({"optimiser": "adam", "momentum": 0.9}, "momentum= works with \"sgd\" only; 'adam' has betas"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_settings_that_cannot_be_meant_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Training(**{"epochs": 1, "lr": 0.1, **change})


def test_a_subset_that_fills_no_batch_is_refused() -> None:
    with pytest.raises(DataError, match="a subset of 9 examples is smaller than one batch of 10"):
        PERCEPTRON.together(SUBSETS, SEEDS, replace(TRAINING, batch_size=10, drop_last=True))


def test_every_subset_needs_its_seed() -> None:
    with pytest.raises(DataError, match="got 4 subsets and 3 seeds"):
        PERCEPTRON.together(SUBSETS, SEEDS[:3], TRAINING)
