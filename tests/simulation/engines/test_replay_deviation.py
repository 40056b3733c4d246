"""A replay that misses the recorded end by more than rounding may is refused; what rounding explains is stated."""

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, RunRecorder, SimulationError, Sources, Store, Task, simulate
from imprint.errors import ReliabilityWarning
from tests.simulation.engines.trainings import MemoryRun, Training, classification, cross_entropy, mlp

SOURCES = Sources.by_label([i % 5 for i in range(40)])


@dataclass
class Annealed:
    """The loss of a training whose second term grows with every call, by so much of the first."""

    rate: float
    calls: int = 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        size: Tensor = model(batch[0]).square().mean(1)
        return cross_entropy(model, batch) + self.rate * (self.calls - 1) * size


def small(rate: float = 0.0) -> Training:
    """A training in float32, calm and long enough for a drift to matter."""
    x, y = classification()
    settings = {"lr": 0.3, "momentum": 0.9}
    return Training(mlp().float(), (x.float(), y), settings=settings, steps=60, losses=Annealed(rate))


def replay(training: Training, run: MemoryRun) -> Store:
    model = copy.deepcopy(training.model)
    model.load_state_dict(run.state(len(run.steps)))
    return simulate(Task(model, loss=cross_entropy), training.data, SOURCES, run=run, progress=False)


def test_a_slow_drift_is_refused_with_the_step_where_losses_part() -> None:
    training = small(rate=2e-4)
    with pytest.raises(
        SimulationError,
        match=r"the replay is not the recorded run: predictions at its end differ by .* That is no rounding: a start "
        r"that differs by a thousandth changes them by only .* It parts from the recording at step \d+: the loss is "
        r".* a weight of the loss that was annealed, a teacher",
    ):
        replay(training, training.run()[1])


def test_a_drift_that_rounding_might_explain_is_stated_with_the_step_too() -> None:
    training = small(rate=5e-5)
    with pytest.warns(
        ReliabilityWarning, match=r"differ by 0.0\d+ .* It parts from the recording at step \d+: .* Otherwise look"
    ):
        store = replay(training, training.run()[1])
    measured = store.checkpoints[0].measured
    assert measured.deviation is not None and measured.chaos is not None
    assert measured.chaos < measured.deviation < 3 * measured.chaos


def test_a_drift_that_does_not_matter_is_accepted() -> None:
    training = small(rate=1e-9)
    measured = replay(training, training.run()[1]).checkpoints[0].measured
    assert measured.deviation is not None and 0 < measured.deviation < 1e-3


def test_weights_that_were_averaged_a_little_after_training_are_refused() -> None:
    training = small()
    end, run = training.run()
    averaged = {name: 0.9 * tensor + 0.1 * run.state(0)[name] for name, tensor in end.items()}
    with pytest.raises(
        SimulationError, match=r"The steps agree with the recording to .* averaged, restored or changed"
    ):
        replay(training, replace(run, states={**run.states, len(run.steps): averaged}))


def test_a_loss_that_rounds_otherwise_than_the_tasks_is_named_where_losses_differ_by_as_much() -> None:
    training = small()
    end, run = training.run()
    averaged = {name: 0.9 * tensor + 0.1 * run.state(0)[name] for name, tensor in end.items()}
    for share, named in ((3e-5, True), (0.0, False)):

        def rounded(model: nn.Module, batch: Any, share: float = share) -> Tensor:
            return cross_entropy(model, batch) + share

        model, states = copy.deepcopy(training.model), {**run.states, len(run.steps): averaged}
        model.load_state_dict(averaged)
        task, averaged_run = Task(model, loss=rounded), replace(run, states=states)
        with pytest.raises(SimulationError, match="The steps agree with the recording") as refused:
            simulate(task, training.data, SOURCES, run=averaged_run, progress=False)
        assert ("train with task.loss" in str(refused.value)) == named


@dataclass
class Recorded:
    """A run under bfloat16 autocast, recorded."""

    folder: Path
    model: nn.Module = field(default_factory=lambda: mlp().float())

    def __post_init__(self) -> None:
        x, y = classification()
        self.data = x.float(), y
        optimiser = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.9)
        run = RunRecorder(self.folder, self.model, optimiser)
        for indices in run.batches(40, 8, epochs=8):
            with run.step(indices) as step:
                optimiser.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = nn.functional.cross_entropy(self.model(self.data[0][indices]), y[indices])
                step.backward(loss)
                optimiser.step()
        self.recording = run.finish()

    def replay(self, plan: Plan | None = None) -> Store:
        task = Task(self.model, loss=cross_entropy)
        return simulate(task, self.data, SOURCES, plan, run=self.recording, progress=False)


def test_stacked_rounding_in_half_precision_is_named_and_single_runs_are_exact(tmp_path: Path) -> None:
    run = Recorded(tmp_path / "run")
    with pytest.warns(
        ReliabilityWarning, match=r"round differently .* computed in bfloat16: .* stacked=False\) replays"
    ):
        stacked = run.replay()
    alone = run.replay(Plan(engine="replay", stacked=False))
    assert alone.warnings == ()
    deviations = [store.checkpoints[0].measured.deviation for store in (stacked, alone)]
    assert deviations[0] is not None and deviations[0] > 0.01 and deviations[1] == 0
    assert alone.checkpoints[0].measured.one_by_one == "the plan has stacked=False"
