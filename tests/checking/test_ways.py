"""`check` says what retraining, replaying and simulating take, and which of them to choose."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import Check, DataError, Plan, PlanError, Recording, RunRecorder, Sources, Task, check
from imprint.advice import costs
from imprint.evaluation import Together, Training
from imprint.evaluation.training_cost import TrainingCost
from tests.advice.planted import simulation
from tests.checking.members import PLANS, checked, classifier
from tests.zoo import Member


def tasks(found: Check) -> dict[str, float | None]:
    return {way.task: way.seconds for way in found.ways}


def record(folder: Path, member: Member, steps: int = 4, **options: Any) -> Recording:
    model = member.task.model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = RunRecorder(folder, model, optimiser, **options)
    for step, indices in enumerate(run.batches(12, 4, epochs=steps)):
        if step == steps:
            break
        with run.step(indices) as now:
            optimiser.zero_grad()
            now.backward(nn.functional.cross_entropy(model(member.data[0][indices]), member.data[1][indices]))
            optimiser.step()
    return run.finish()


@pytest.mark.parametrize(("seconds", "cheapest"), [(1e-6, "retrain from 3 seeds"), (1e6, "simulate")])
def test_the_advice_is_the_cheaper_way(seconds: float, cheapest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four trainings of each of three seeds; nothing here depends on how fast the machine is."""
    monkeypatch.setattr("imprint.checking.estimate", lambda *given: simulation(60.0))
    monkeypatch.setattr(costs, "measure_training", lambda *given: TrainingCost(seconds, "of 5 steps"))
    found = checked(classifier(), PLANS["tangent"], training_steps=5, training_batch=4)
    assert tasks(found)["simulate"] == 60.0
    assert tasks(found)["retrain from 3 seeds"] == pytest.approx(12 * seconds)
    assert f", {cheapest}: about " in found.advice
    assert found.advice in str(found) and found.to_json()["advice"] == found.advice
    assert [way["question"] for way in found.to_json()["ways"]] == ["expected", "this_run", "expected", "expected"]


def test_without_a_known_training_length_it_says_so_and_what_to_give() -> None:
    found = checked(classifier(100, sources=Sources.by_label([i % 4 for i in range(100)])), PLANS["tangent"])
    known = {task for task, seconds in tasks(found).items() if seconds is not None}
    assert found.ok and known == {"simulate"}
    assert "nothing says how long a training is; give its number of steps and its batch size" in found.advice
    assert "for 10 epochs in batches of 32, --training-steps 40 --training-batch 32" in found.advice


def test_a_function_that_trains_is_not_called_to_find_out() -> None:
    def train(subset: Any, seed: int) -> nn.Module:
        raise AssertionError("this may take hours")

    assert "train(subset, seed) is a function, and only calling" in checked(classifier(), train=train).advice


def test_steps_and_batch_size_are_enough_to_measure_a_training() -> None:
    found = checked(classifier(), PLANS["tangent"], training_steps=50, training_batch=4)
    assert all(seconds is not None and seconds > 0 for seconds in tasks(found).values())
    retrain, *_ = found.ways
    assert retrain.how.endswith("each of 50 steps of 4 examples, one by one")


def test_models_that_train_together_tell_how_long_that_takes() -> None:
    member = classifier()
    train = Together(lambda: nn.Linear(4, 3), Task.classifier, member.data, Training(epochs=3, lr=0.1, batch_size=4))
    retrain, *_ = checked(member, PLANS["tangent"], train=train).ways
    assert retrain.how.endswith("each of 3 epochs in batches of 4, 4 at once") and retrain.seconds is not None


def test_a_training_that_fails_is_not_a_reason_to_fail() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if model.training:
            raise ValueError("not today")
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    member = classifier()._replace(task=Task(nn.Linear(4, 3), loss))
    found = checked(member, PLANS["tangent"], training_steps=5, training_batch=4)
    assert found.ok and "a step of training failed (ValueError: not today)" in found.advice


def test_a_recorded_run_tells_what_training_it_again_takes(tmp_path: Path) -> None:
    member = classifier()
    found = check(member.task, member.data, member.sources, run=record(tmp_path / "run", member))
    assert all(seconds is not None and seconds > 0 for seconds in tasks(found).values())
    assert found.estimate is not None and found.estimate.training_seconds is not None
    retrain, this_run, expected, simulate = found.ways
    assert retrain.seconds == pytest.approx(12 * found.estimate.training_seconds)
    assert retrain.how.endswith("each as long as the recorded one, one by one")
    assert this_run.seconds == found.estimate.seconds and expected.seconds is not None
    assert expected.seconds == pytest.approx(3 * (found.estimate.seconds + found.estimate.training_seconds))
    assert simulate.how.startswith("tangent; steps 200;")
    assert "replay this run: about" in found.advice


def test_a_run_is_compared_with_a_simulation_that_does_not_repeat_it(tmp_path: Path) -> None:
    member = classifier()
    run = record(tmp_path / "run", member)
    found = checked(member, PLANS["tangent"], run=run, checkpoints=run.paths[:1])
    assert found.plan == PLANS["tangent"] and found.ok
    assert all(seconds is not None for seconds in tasks(found).values())
    with pytest.raises(PlanError, match="does not repeat a run"):
        checked(member, PLANS["tangent"], run=run)


def test_a_simulation_that_takes_long_to_measure_is_left_out_beside_a_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "_PATIENCE", 0.0)
    member = classifier()
    found = check(member.task, member.data, member.sources, run=record(tmp_path / "run", member))
    simulate = found.ways[-1]
    assert simulate.seconds is None and "check one by itself, with checkpoints= in place of run=" in simulate.unknown


def test_a_simulation_that_cannot_start_is_still_compared() -> None:
    member = classifier()
    member.data[0][3] = torch.nan
    found = checked(member, PLANS["tangent"], training_steps=5, training_batch=4)
    assert not found.ok and tasks(found)["simulate"] is None
    assert "this simulation cannot start: see the problem" in found.advice


def test_nothing_is_compared_if_nobody_asks() -> None:
    found = checked(classifier(), PLANS["tangent"], compare=False)
    assert found.ways == () and found.advice == "" and "retrain from" not in str(found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training_steps": 5}, "training_steps and training_batch belong together"),
        ({"training_batch": 5}, "training_steps and training_batch belong together"),
        ({"training_steps": 0, "training_batch": 5}, "training_steps must be a whole number of at least 1, got 0"),
        ({"training_steps": 5, "training_batch": 1.5}, "training_batch must be a whole number of at least 1, got 1.5"),
    ],
)
def test_a_length_that_is_none_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        checked(classifier(), Plan(), **given)


def test_other_data_than_was_recorded_are_refused_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = classifier()
    run = record(tmp_path / "run", member, data=member.data)
    monkeypatch.delattr("imprint.checking._try_engines")
    with pytest.raises(DataError, match="was recorded with other training data"):
        check(member.task, tuple(column.flip(0) for column in member.data), member.sources, run=run)


def test_a_check_tells_what_it_is_doing() -> None:
    told: list[str] = []

    class Told:
        def __call__(self, done: int, total: int, /) -> None:
            raise AssertionError("nothing is counted")

        def announce(self, phase: str, /) -> None:
            told.append(phase)

    member = classifier()
    check(member.task, member.data, member.sources, PLANS["tangent"], progress=Told())
    assert told[0] == "trying the task on a few examples" and "trying the engine spectral" in told
    assert told[-1] == "timing what else answers the question" and len(told) == len(set(told))
