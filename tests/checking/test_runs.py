"""A simulation that repeats a recorded run is tried on that run, and read out as its store will be."""

from collections.abc import Iterator

import pytest
from torch import Tensor, nn

from imprint import Plan, PlanError, Sources, Task, check
from imprint.plan import format_plan
from tests.simulation.engines.trainings import Training, classification, cross_entropy, mlp
from tests.simulation.removals import SOURCES, HandMadeRun, make_data, make_model, make_plan, make_task, removing_engine


@pytest.fixture(autouse=True)
def _removing() -> Iterator[None]:
    with removing_engine():
        yield


def test_a_run_is_tried_and_estimated() -> None:
    found = check(make_task(), make_data(), SOURCES, make_plan(), run=HandMadeRun.of(make_model()))
    assert found.ok, found.problems
    assert found.estimate is not None and found.estimate.rows_at_once == len(SOURCES)
    assert {engine.name: engine.works for engine in found.engines}["removing"]
    assert [(readout.name, readout.works) for readout in found.readouts] == [("removed", True)]
    assert "repeated a few steps of the recorded run" in str(found)
    assert "plan: removing of the recorded run" in str(found)


def test_a_run_of_other_data_or_another_loss_is_refused_as_the_simulation_would() -> None:
    training = Training(mlp(), classification(), steps=4)
    _, run = training.run()
    x, y = training.data
    sources = Sources.by_label([example % 4 for example in range(training.n)])
    assert check(training.task(), (x, y), sources, run=run).ok
    smoothed = Task(training.model, loss=lambda model, batch: 0.9 * cross_entropy(model, batch) + 0.1)
    for task, data in ((training.task(), (x.flip(0), y.flip(0))), (smoothed, (x, y))):
        found = check(task, data, sources, run=run)
        assert not found.ok and found.estimate is None
        assert found.problems[0].startswith("the replay differs from the recording at step 1: the loss is")


def test_engines_that_need_a_run_say_so_without_one() -> None:
    found = check(make_task(), make_data(), SOURCES, Plan(steps=1, lr=0.1))
    assert {engine.name: engine.remark for engine in found.engines}["removing"] == "needs a recorded run, run="
    assert "removed" not in [readout.name for readout in found.readouts]
    with pytest.raises(PlanError, match="repeats a recorded run"):
        check(make_task(), make_data(), SOURCES, make_plan())


def test_a_model_that_vmap_refuses_is_read_one_by_one() -> None:
    class Stubborn(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            z = super().forward(input)
            return z * (2.0 if z.mean().item() > 1e9 else 1.0)

    model = Stubborn(3, 2).double()
    found = check(make_task(model), make_data(), SOURCES, make_plan(), run=HandMadeRun.of(model))
    assert found.readouts[0].works and found.readouts[0].remark.startswith("sources one by one")


def test_a_late_start_is_shown() -> None:
    assert format_plan(make_plan(start=3)) == "removing of the recorded run from step 3 on"
