"""A function that does not train as it is asked to is refused, and what goes wrong in it is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import DataError, Task
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Train
from imprint.evaluation.truth import Truth
from tests.evaluation.truths import (
    EXTRA,
    HALVES,
    QUERIES,
    REMOVALS,
    RUNS,
    TRAINING,
    Counting,
    N,
    ask,
    build,
    every_kind,
    points,
    stubborn,
    task,
    together,
    train,
    unseeded,
)


def heedless(subset: Tensor, seed: int) -> nn.Module:
    return train(torch.arange(N), seed)


def forgetful(subset: Tensor, seed: int) -> Any:
    train(subset, seed)


def diverging(subset: Tensor, seed: int) -> nn.Module:
    model = train(subset, seed)
    if seed == HALVES.seeds(1, 0)[3]:
        model.get_parameter("0.weight").data.fill_(torch.nan)
    return model


@every_kind
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (heedless, "same model for two different subsets"),
        (stubborn, "same model for two seeds"),
        (forgetful, "must return the trained model, got a NoneType"),
    ],
)
def test_a_function_that_does_not_train_as_asked_is_refused(how: Train, message: str, subsets: Subsets) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how, subsets=subsets)


@every_kind
@pytest.mark.parametrize("how", [heedless, stubborn, forgetful])
def test_a_refused_function_leaves_the_folder_to_the_right_one(how: Train, subsets: Subsets, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        ask(tmp_path / "truth", how, subsets=subsets)
    ask(tmp_path / "truth", train, subsets=subsets)
    with pytest.raises(DataError, match="the training diverged"):
        ask(tmp_path / "together", together(training=replace(TRAINING, lr=1e308)), subsets=subsets)
    ask(tmp_path / "together", subsets=subsets)


def test_parameters_are_compared_and_not_only_what_is_measured() -> None:
    def coarse(model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(len(batch[0]), dtype=torch.float64)

    assert not ask(how=train, task=task(measure=coarse)).values.any()


@every_kind
def test_trials_are_counted_and_those_that_are_needed_are_not_made_twice(subsets: Subsets) -> None:
    counting, told = Counting(), []
    ask(how=counting, subsets=subsets, progress=lambda done, total: told.append((done, total)))
    extra = EXTRA if subsets is HALVES else 1
    assert counting.made == RUNS * len(subsets) + extra
    assert told[-1] == (counting.made, counting.made)
    assert [done for done, _ in told] == list(range(1, counting.made + 1))


@every_kind
def test_a_function_without_a_seed_is_told_by_how_much_its_models_differ(
    subsets: Subsets, caplog: pytest.LogCaptureFixture
) -> None:
    ask(how=train, subsets=subsets)
    assert not caplog.text
    truth = ask(how=unseeded, subsets=subsets)
    assert "returns different models for the same subset and seed" in caplog.text
    assert ("differ by more than what was removed" in caplog.text) == (subsets is REMOVALS)
    assert truth.about["noise"] > 1e-3


def test_what_a_training_raises_says_which_it_was() -> None:
    def failing(subset: Tensor, seed: int) -> nn.Module:
        if len(subset) < N:
            raise ZeroDivisionError("of mine")
        return train(subset, seed)

    with pytest.raises(ZeroDivisionError, match="of mine") as error:
        ask(how=failing, subsets=REMOVALS)
    seed = REMOVALS.seeds(0, 0)[0]
    assert error.value.__notes__ == [f"while retraining on subset 1 (all but '0') in run 0 with seed {seed}"]
    with pytest.raises(DataError, match="is smaller than one batch") as raised:
        ask(how=together(training=replace(TRAINING, batch_size=20, drop_last=True)))
    assert "while retraining on subset 0" in raised.value.__notes__[0] and "and 1 more" in raised.value.__notes__[0]


def test_a_model_that_the_task_does_not_measure_is_refused() -> None:
    def other(subset: Tensor, seed: int) -> nn.Module:
        return nn.Linear(4, 3).double()

    def wider(subset: Tensor, seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def longer(subset: Tensor, seed: int) -> nn.Module:
        return nn.Sequential(*build().children(), nn.Linear(3, 3).double())

    for how, message in (
        (other, "it lacks '0.weight'"),
        (wider, r"'0.weight' has shape \(6, 4\), there \(5, 4\)"),
        (longer, "it has an extra '3.weight'"),
    ):
        with pytest.raises(DataError, match=f"returns another model than the task's: {message}"):
            ask(how=how)


def trembling(how: Train, size: float = 1e-12) -> Train:
    """The same function on a device that does not repeat itself."""
    shaking = torch.Generator().manual_seed(0)

    def trained(subset: Tensor, seed: int) -> nn.Module:
        model = how(subset, seed)
        for parameter in model.parameters():
            parameter.data += size * torch.randn(parameter.shape, generator=shaking, dtype=torch.float64)
        return model

    return trained


@every_kind
@pytest.mark.parametrize(
    ("how", "message"), [(heedless, "same model for two different subsets"), (stubborn, "same model for two seeds")]
)
@pytest.mark.parametrize("size", [1e-12, 1e-6])
def test_rounding_does_not_pass_for_listening(how: Train, message: str, size: float, subsets: Subsets) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=trembling(how, size), subsets=subsets)
    ask(how=trembling(train, size), subsets=subsets)


def test_a_subset_that_changes_nothing_is_not_the_last_word() -> None:
    def picky(subset: Tensor, seed: int) -> nn.Module:
        return train(subset[subset != 3], seed)

    for removed in ([[], [3], [0, 1]], [[], [0, 1], [3]]):
        assert ask(how=picky, subsets=Subsets.without(N, removed)).values.isfinite().all()
    told: list[tuple[int, int]] = []
    ask(how=picky, subsets=Subsets.without(N, [[], [3], [0, 1]]), progress=lambda *now: told.append(now))
    assert told[-1] == (2 * 3 + 1, 2 * 3 + 1)
    with pytest.raises(DataError, match="same model for two different subsets"):
        ask(how=picky, subsets=Subsets.without(N, [[], [3]]))


def test_a_function_may_shuffle_its_subset_in_place() -> None:
    def shuffling(subset: Tensor, seed: int) -> nn.Module:
        subset[:] = subset[torch.randperm(len(subset), generator=torch.Generator().manual_seed(seed))]
        return train(subset, seed)

    truth = ask(how=shuffling, subsets=REMOVALS)
    assert truth.about["noise"] == 0
    for run in range(RUNS):
        alone = shuffling(REMOVALS.examples(0), REMOVALS.seeds(run, 0)[0])
        torch.testing.assert_close(task().measure(alone, points(QUERIES, 1)).detach(), truth.values[run, 0])


class Neighbours(nn.Module):
    """Learns nothing that its parameters would tell."""

    def __init__(self, subset: Tensor) -> None:
        super().__init__()
        x, y = points(N, 0)
        self.x, self.y = x[subset], y[subset]
        self.unused = nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.stack([torch.cdist(x, self.x[self.y == label]).mean(1) for label in range(3)], 1)


def test_what_is_learned_outside_the_parameters_counts_too() -> None:
    own = Task.classifier(Neighbours(torch.arange(N)))
    truth = ask(how=lambda subset, seed: Neighbours(subset), task=own, runs=1)
    assert float(truth.values.std(1).min()) > 0
    with pytest.raises(DataError, match="same model for two seeds"):
        ask(how=lambda subset, seed: Neighbours(subset), task=own)
    with pytest.raises(DataError, match="same model for two different subsets"):
        ask(how=lambda subset, seed: Neighbours(torch.arange(N)), task=own, runs=1)


def test_a_seed_may_be_ignored_where_there_is_one_run() -> None:
    assert ask(how=stubborn, runs=1).values.isfinite().all()


def test_a_training_that_diverges_is_named_and_not_kept(tmp_path: Path) -> None:
    which = r"subset 3 \(all but .* and \d+ more\) in run 1 with seed \d+"
    with pytest.raises(DataError, match=rf"query 0 is nan under the model retrained on {which}: the training diverged"):
        ask(tmp_path, diverging)
    assert Truth.load(tmp_path).runs == 1  # the second has it
    explosive = together(training=replace(TRAINING, lr=1e308))
    with pytest.raises(DataError, match="the training diverged"):
        ask(how=explosive)
