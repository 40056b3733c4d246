"""The truth is what a plain loop would measure, and says what it is."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import DataError, Sources, Task
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together, Train
from imprint.evaluation.truth import Truth
from tests.evaluation.truths import (
    QUERIES,
    REMOVALS,
    RUNS,
    TRAINING,
    N,
    ask,
    build,
    contents,
    every_kind,
    points,
    task,
    together,
    train,
)
from tests.test_recorder import Tied


@every_kind
def test_models_trained_together_and_in_a_loop_give_the_same_truth(subsets: Subsets) -> None:
    ours, loop = ask(subsets=subsets), ask(how=train, subsets=subsets)
    assert ours.values.shape == (RUNS, len(subsets), QUERIES)
    torch.testing.assert_close(ours.values, loop.values, rtol=1e-9, atol=1e-12)
    assert float(ours.values.std(1).min()) > 1e-3  # subsets matter
    assert float(ours.values.std(0).min()) > 1e-4  # and so do seeds


@every_kind
def test_values_are_those_of_the_models_measured_one_by_one(subsets: Subsets) -> None:
    truth, (x, y) = ask(subsets=subsets), points(QUERIES, 1)
    for run in range(RUNS):
        for index, seed in enumerate(subsets.seeds(run, 0)):
            losses = nn.functional.cross_entropy(train(subsets.examples(index), seed)(x), y, reduction="none")
            torch.testing.assert_close(truth.values[run, index], losses.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 3, None])
def test_how_many_models_train_at_once_does_not_matter(at_once: int | None) -> None:
    torch.testing.assert_close(ask(how=together(at_once)).values, ask().values, rtol=1e-10, atol=1e-13)


def test_neither_the_tasks_own_model_nor_the_random_state_is_touched() -> None:
    own = task()
    before, state = own.state(), torch.get_rng_state()
    ask(task=own)
    together()(torch.arange(N), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in own.state().items())


def test_one_model_of_those_trained_together_can_be_had_alone() -> None:
    how = together(build=lambda: Tied().double())
    tied = Task.classifier(Tied().double())
    stack, alone = (ask(how=each, task=tied) for each in (how, lambda subset, seed: how(subset, seed)))
    torch.testing.assert_close(stack.values, alone.values, rtol=1e-10, atol=1e-13)
    model = how(torch.arange(N), 0)
    assert not model.training
    assert model.get_parameter("second.weight") is model.get_parameter("first.weight")


def test_models_are_measured_in_evaluation_mode() -> None:
    def wrapped(model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Dropout(0.5), nn.BatchNorm1d(3).double()).train()

    own = Task.classifier(wrapped(build()))
    first, again = (ask(how=lambda *given: wrapped(train(*given)), task=own).values for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("how", [together(), train], ids=["together", "loop"])
@every_kind
def test_a_kept_truth_is_what_was_returned(how: Train | Together, subsets: Subsets, tmp_path: Path) -> None:
    truth = ask(tmp_path / "truth", how, subsets=subsets)
    assert torch.equal(truth.values, ask(how=how, subsets=subsets).values)
    kept = Truth.load(tmp_path / "truth")
    assert torch.equal(kept.values, truth.values)
    assert (kept.measure, kept.subsets.kind, kept.subsets.n) == (truth.measure, subsets.kind, N)
    assert kept.subsets.removed == subsets.removed
    assert kept.subsets.sources.ids == subsets.sources.ids
    assert torch.equal(kept.subsets.membership(), subsets.membership())
    assert {file.suffix for file in contents(tmp_path)} == {".safetensors", ".json"}


def test_columns_are_data_enough_to_train_together() -> None:
    plain = Together(build, Task.classifier, points(N, 0), TRAINING, 2)
    assert torch.equal(ask(how=plain).values, ask().values)
    arrays = tuple(column.numpy() for column in points(N, 0))
    assert torch.equal(ask(how=replace(plain, data=arrays)).values, ask().values)
    assert ask(how=plain).about["fingerprints"] == ask().about["fingerprints"]


def test_effects_are_changes_against_the_models_that_lack_nothing() -> None:
    truth = ask(subsets=REMOVALS)
    assert truth.lacking == [(0,), (1,), (2,), (3,)]
    assert truth.effects.shape == (RUNS, QUERIES, 4)
    expected = truth.values[1, 1 + 3] - truth.values[1, 0]
    torch.testing.assert_close(truth.effects[1, :, 3], expected)
    with pytest.raises(DataError, match="these are trained on halves"):
        _ = ask().effects
    with pytest.raises(DataError, match="add a baseline"):
        _ = ask(subsets=Subsets("removal", N, Sources.per_example(N), ((0,), (1, 2)))).effects


def test_a_truth_says_what_it_is() -> None:
    assert repr(ask()) == "Truth(halves, expected: 5 subsets × 2 runs, loss of 5 queries)"
    assert repr(ask(runs=1, queries=points(1, 1))) == "Truth(halves, expected: 5 subsets × 1 run, loss of 1 query)"


def test_a_truth_tells_the_same_whether_it_is_kept_or_not(tmp_path: Path) -> None:
    kept, read, loose = ask(tmp_path).about, Truth.load(tmp_path).about, ask().about
    assert kept == read
    assert {**loose, "created": ""} == {**kept, "created": ""}
    assert loose["at_once"] == 2 and loose["device"] == "cpu" and "torch" in loose["versions"]


def test_more_runs_and_more_halves_begin_with_the_same_models() -> None:
    few, more = ask(), ask(runs=3, subsets=Subsets.halves(N, 8))
    torch.testing.assert_close(more.values[:RUNS, :5], few.values, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("at_once", [1, 2, 3, None])
def test_models_of_a_removal_share_their_dropout_however_many_train_at_once(at_once: int | None) -> None:
    def dropping() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3)).double()

    given: dict[str, Any] = {"task": Task.classifier(dropping()), "subsets": REMOVALS}
    one, some = (ask(how=together(k, build=dropping), **given).values for k in (5, at_once))
    torch.testing.assert_close(some, one, rtol=1e-10, atol=1e-13)
