"""What a replay says of effects that are all 0, and of a memory budget that is too small."""

import re
from typing import Any

import pytest
from torch import Tensor, nn

from imprint import Plan, Sources, Task, attribute, simulate
from tests.simulation.engines.trainings import Training, classification, cross_entropy, mlp


def find_warnings(training: Training, sources: Sources, **options: Any) -> tuple[str, ...]:
    """Replay a training, and return the warnings of an attribution from it."""
    end, run = training.run()
    training.model.load_state_dict(end)
    task = Task(training.model, loss=cross_entropy, **options)
    plan = Plan(engine="replay", stacked=False)  # the rows of a stack differ by rounding
    store = simulate(task, training.data, sources, plan, run=run, progress=False)
    return attribute(task, store, training.data, progress=False).warnings


def is_right(model: nn.Module, batch: Any) -> Tensor:
    right: Tensor = model(batch[0]).argmax(1) == batch[1]
    return right.double()


def test_a_run_that_did_not_move_the_weights_is_named_as_the_cause_of_zeros() -> None:
    training = Training(mlp(), classification(), settings={"lr": 0.0}, steps=3)
    (warning,) = find_warnings(training, Sources.per_example(40))
    assert warning.startswith("every score is exactly 0, because the recorded run did not move the weights")
    assert "learning rate" in warning and "derivative" not in warning


def test_sources_that_no_step_had_are_named_as_the_cause_of_zeros() -> None:
    training = Training(mlp(), classification(), steps=2)
    used = {example for micros in training.batches() for micro in micros for example in micro}
    sources = Sources.groups({"unused": sorted(set(range(40)) - used)})
    (warning,) = find_warnings(training, sources)
    assert warning.startswith("every score is exactly 0, because removing a source changed no weight")


def test_a_flat_measurement_is_named_as_the_cause_of_zeros() -> None:
    training = Training(mlp(), classification(), settings={"lr": 1e-6}, steps=2)
    found = find_warnings(training, Sources.per_example(40), measure=is_right)
    assert any("changed the weights, and not what is measured there. Accuracy" in warning for warning in found)


def test_without_room_for_a_stack_runs_are_replayed_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    training = Training(mlp(), classification(), steps=1)
    _, run = training.run()
    plan, sources = Plan(engine="replay"), Sources.groups({"ann": [0, 1], "bob": [2]})
    store = simulate(training.task(), training.data, sources, plan, run=run, memory="1kB", progress=False)
    told = r"together 5 runs need about [\d.]+ kB, and the memory budget is 1 kB"
    assert re.search(f"runs are replayed one by one: {told}", caplog.text)
    assert re.fullmatch(told, store.checkpoints[0].measured.one_by_one or "")
