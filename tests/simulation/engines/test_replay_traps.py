"""What would make a replay wrong without a word: state that nobody keeps, optimisers that change their ways."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint.errors import SimulationError
from imprint.simulation.engines.replay.optimisers import find_why_not_stackable
from imprint.simulation.engines.replay.training import as_recorded
from imprint.simulation.engines.replay.ways import find_unkept_state, find_way
from tests.simulation.engines.test_replay_rows import check, replay_plainly
from tests.simulation.engines.test_replay_ways import SHAPES, settings_of
from tests.simulation.engines.trainings import Training, classification, mlp


class Late(torch.optim.SGD):
    """Looks at the norm of a gradient only after ten steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                if self.state[p]["seen"] > 10 and p.grad.norm() > 3:
                    p.grad.zero_()
        super().step(closure)


def test_an_optimiser_that_treats_values_together_only_later_cannot_be_stacked() -> None:
    reason = find_why_not_stackable(Late, settings_of("SGD"), SHAPES)
    assert reason == "Late moves a stack of rows in another way than each of them alone"


class Remembering(nn.Module):
    """Keeps a running mean of its inputs, where a checkpoint does not see it."""

    def __init__(self, as_buffer: bool) -> None:
        super().__init__()
        if as_buffer:
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64), persistent=False)
        else:
            self.mean = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x
        return x - self.mean


@pytest.mark.parametrize("as_buffer", [True, False])
def test_state_that_training_changes_and_no_checkpoint_keeps_is_named(as_buffer: bool) -> None:
    training = Training(mlp(Remembering(as_buffer)), classification(), steps=2)
    _, run = training.run()
    with as_recorded(run.circumstances):
        found = find_unkept_state(training.repetition(run), twice=False)
    assert found is not None and found.strip("'").endswith("mean")
    plain = replace(training, model=mlp())
    _, run = plain.run()
    with as_recorded(run.circumstances):
        assert find_unkept_state(plain.repetition(run), twice=True) is None


class Counting(nn.Module):
    """Scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Annealed(nn.Module):
    """Scales by how many forward passes training has made, which a buffer counts."""

    passes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return x / (1 + 0.2 * self.passes)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_buffer_that_counts_passes_leaves_sources_out_of_batches_of_any_size(batch: int) -> None:
    training = Training(mlp(Annealed()), classification(), batch=batch, steps=30, leaves_out=True)
    _, run = training.run()
    with as_recorded(run.circumstances):
        way = find_way(training.repetition(run))
    assert way.leaves_out
    assert way.one_by_one is not None and way.one_by_one.startswith("a forward pass in training changes the buffer")
    check(replay_plainly(training, run, way.leaves_out), training)


def test_a_model_that_counts_its_calls_is_refused_where_batches_are_passed_twice() -> None:
    training = Training(mlp(Counting()), classification(), steps=2)
    _, run = training.run()
    with as_recorded(run.circumstances), pytest.raises(SimulationError, match="counts its calls"):
        find_unkept_state(training.repetition(run), twice=True)


def test_an_example_alone_in_a_batch_with_batch_norm_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(nn.BatchNorm1d(6).double())
    batches = tuple(([0, 1, 39], [2, 3, 4, 5]) for _ in range(3))
    training = Training(model, classification(), fixed_batches=batches, leaves_out=True)
    _, run = training.run()
    end = replay_plainly(training, run, leaves_out=True)[1]  # without examples 0 to 5, 39 is alone, the others are gone
    start = copy.deepcopy(model.state_dict())
    assert "alone in its batch" in caplog.text
    for name, tensor in end.items():
        assert torch.equal(tensor, start[name]), "nothing was left to learn from"
