"""Predictions are held up by examples, and flip without those an attribution names."""

import pytest
import torch
from torch import Tensor, nn

import imprint
from imprint import DataError, Plan, Sources, Task
from imprint.data import Data
from imprint.evaluation.brittleness import Brittleness, brittleness
from imprint.evaluation.retraining import Together
from imprint.evaluation.training import Training

TRAINING = Training(epochs=30, lr=0.5, batch_size=24)


def build() -> nn.Module:
    return nn.Linear(4, 2)


def data() -> tuple[Tensor, Tensor]:
    """Four directions; each query stands on the six examples of its own, and nothing else supports it."""
    directions = torch.eye(4).repeat_interleave(6, 0)
    return 2 * directions + 0.05 * torch.randn(24, 4), torch.tensor([0, 1, 0, 1]).repeat_interleave(6)


def asked(measure: str | None = "margin", removed: tuple[int, ...] = (1, 6)) -> Brittleness:
    x, y = data()
    queries = (2 * torch.eye(4), torch.tensor([0, 1, 0, 1]))
    together = Together(build, Task.classifier, Data((x, y), device=torch.device("cpu")), TRAINING)
    task = Task.classifier(together(torch.arange(24), 0), measure=measure)
    sources = Sources.per_example(24)
    store = imprint.simulate(task, (x, y), sources, Plan(steps=20, lr=0.5), progress=False)
    result = imprint.attribute(task, store, queries, progress=False)
    return brittleness(together, task, queries, result, sources, removed=removed, runs=2, progress=False)


def test_a_prediction_flips_or_weakens_without_what_holds_it_up_and_not_without_the_rest() -> None:
    found = asked()
    assert found.removed == (1, 6)
    assert found.shares[0] == 0  # one of six is not missed
    assert found.shares[1] > found.at_random[1]
    assert "6 removed" in str(found)


def test_another_measurement_has_no_sign_to_flip() -> None:
    with pytest.raises(DataError, match='needs measure="margin"'):
        asked(measure=None)


def test_more_than_there_is_cannot_be_removed() -> None:
    with pytest.raises(DataError, match="24 sources cannot be removed: there are 24"):
        asked(removed=(24,))
