"""A replay that is not of the recorded run is refused, with the step, both values and what to look for."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import SimulationError, Sources, Task, simulate
from imprint.recording.records import Clipping, Step
from imprint.simulation.engines.replay.agreement import Watch
from tests.simulation.engines.trainings import Adapting, MemoryRun, Training, classification, cross_entropy, mlp

Change = Callable[[MemoryRun], MemoryRun]
TRAINING = Training(mlp(), classification(), torch.optim.Adam, {"lr": 0.02}, steps=40)


@pytest.fixture(scope="module")
def run() -> MemoryRun:
    return TRAINING.run()[1]


def replay(run: MemoryRun, task: Task | None = None, data: Any = None) -> None:
    model = copy.deepcopy(TRAINING.model)
    model.load_state_dict(run.state(len(run.steps)))
    task = task or Task(model, loss=cross_entropy)
    simulate(task, data or TRAINING.data, Sources.by_label([i % 5 for i in range(40)]), run=run, progress=False)


def change_steps(run: MemoryRun, change: Callable[[Step], Step], first: int = 0, last: int = 1000) -> MemoryRun:
    steps = tuple(change(step) if first <= number < last else step for number, step in enumerate(run.steps))
    return replace(run, steps=steps)


def change_batches(**changes: Any) -> Callable[[Step], Step]:
    return lambda step: replace(step, batches=tuple(replace(batch, **changes) for batch in step.batches))


def test_the_recorded_run_itself_is_accepted(run: MemoryRun) -> None:
    replay(run)


def test_a_loss_with_another_reduction_is_named_by_its_factor(run: MemoryRun) -> None:
    model = copy.deepcopy(TRAINING.model)
    task = Task(model, loss=lambda model, batch: 3 * cross_entropy(model, batch))
    with pytest.raises(
        SimulationError,
        match=r"at step 1: the loss is .*, and was .* in training \(a relative difference of 2\). It is 3 times the "
        r"recorded one in every step: the losses of 8 examples are summed and divided by the recorded normaliser 8. "
        r"Look for a loss that is reduced",
    ):
        replay(run, task)


def test_a_wrong_normaliser_is_named_by_its_factor(run: MemoryRun) -> None:
    with pytest.raises(
        SimulationError, match=r"It is 0.08 times .* divided by the recorded normaliser 100. .* or tell"
    ):
        replay(change_steps(run, change_batches(normaliser=100.0)))


def test_another_loss_is_refused_at_the_first_step(run: MemoryRun) -> None:
    def squared(model: nn.Module, batch: Any) -> Tensor:
        error: Tensor = model(batch[0]) - nn.functional.one_hot(batch[1], 3)
        losses: Tensor = error.square().sum(1) + batch[0].abs().sum(1)
        return losses

    with pytest.raises(SimulationError, match=r"at step 1: the loss is .* Look for another loss or reduction"):
        replay(run, Task(copy.deepcopy(TRAINING.model), loss=squared))


def test_other_data_are_refused_at_the_first_step(run: MemoryRun) -> None:
    x, y = classification()
    with pytest.raises(SimulationError, match=r"at step 1: the loss is .* other data or data in another order"):
        replay(run, data=(x.flip(0), y))


def test_gradients_that_were_changed_are_told_from_a_wrong_loss(run: MemoryRun) -> None:
    scaled = change_steps(run, lambda step: replace(step, gradient_norm=2 * (step.gradient_norm or 0)))
    with pytest.raises(SimulationError, match=r"at step 1: the gradient norm is .* The loss agrees: look for grad"):
        replay(scaled)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: replace(run, optimiser=torch.optim.NAdam),
        lambda run: change_steps(run, lambda step: replace(step, groups=({**step.groups[0], "lr": 0.04},))),
        lambda run: change_steps(run, lambda step: replace(step, clipping=Clipping("value", 1e-9))),
    ],
    ids=["class", "learning rate", "clipping"],
)
def test_another_optimiser_is_refused_at_the_second_step(
    change: Callable[[MemoryRun], MemoryRun], run: MemoryRun
) -> None:
    with pytest.raises(SimulationError, match=r"at step 2: .* Step 1 agrees, so the loss is right"):
        replay(change(run))


def test_missing_steps_are_refused_where_they_are_missing(run: MemoryRun) -> None:
    torn = replace(run, steps=(*run.steps[:20], *run.steps[22:]), states={0: run.state(0), 38: run.state(40)})
    torn.optimiser_states[38] = run.optimiser_state(40)
    with pytest.raises(SimulationError, match=r"at step 21: .* agree to 1e-1\d: look for steps that were not recorded"):
        replay(torn)


def test_other_examples_in_one_step_are_refused_there(run: MemoryRun) -> None:
    wrong = change_steps(run, change_batches(examples=tuple(range(8))), 30, 31)
    with pytest.raises(SimulationError, match=r"at step 31: the loss is"):
        replay(wrong)


def test_a_difference_too_small_for_its_digits_is_given_as_such(run: MemoryRun) -> None:
    def nudge(step: Step) -> Step:
        return replace(step, batches=tuple(replace(each, loss=(each.loss or 0) * (1 + 3e-8)) for each in step.batches))

    with pytest.raises(SimulationError, match=r"at step 1: the loss is (\S+), and was \1 in training \(.* of 3e-08\)"):
        replay(change_steps(run, nudge))


def test_an_end_that_was_changed_after_training_is_refused(run: MemoryRun) -> None:
    averaged = {name: (tensor + run.state(0)[name]) / 3 for name, tensor in run.state(40).items()}
    with pytest.raises(
        SimulationError, match=r"misses the recorded end by \d+% of the distance the run travelled.* averaged, restored"
    ):
        replay(replace(run, states={0: run.state(0), 40: averaged}))


def test_rounding_that_grows_is_a_deviation_and_no_error() -> None:
    """In float32 a rounding error of the start grows along a chaotic run; the recording is of another rounding."""
    chaotic = Training(
        mlp().float(), tuple(t.float() if t.is_floating_point() else t for t in classification()),
        torch.optim.Adam, {"lr": 0.5}, steps=150,
    )  # fmt: skip
    _, run = chaotic.run()
    nudged = {name: t * (1 + 1e-6) for name, t in run.state(0).items()}
    task = Task(copy.deepcopy(chaotic.model), loss=cross_entropy)
    sources = Sources.by_label([i % 5 for i in range(40)])
    with pytest.warns(match="the replay misses the recorded end: predictions differ by"):
        store = simulate(
            task, chaotic.data, sources, run=replace(run, states={**run.states, 0: nudged}), progress=False
        )
    deviation = store.checkpoints[0].measured.deviation
    assert deviation is not None and deviation > 0.1


def test_a_run_that_diverges_without_a_source_names_source_and_step() -> None:
    """Without example 0, which pulls the weight down, the other one drives it to infinity."""

    def pull(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0]).squeeze(1)
        return torch.where(batch[1] == 0, 2.0, -1.0) * torch.exp(20 * outputs)

    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.2)
    data = torch.ones(2, 1, dtype=torch.float64), torch.tensor([0, 1])
    training = Training(model, data, settings={"lr": 0.01}, steps=5, batch=2, losses=pull)
    _, run = training.run()
    with pytest.raises(SimulationError, match=r"the loss of the run without source '0' is not finite at step 3"):
        simulate(training.task(), data, Sources.per_example(2), run=run, progress=False)


def test_an_optimiser_that_changes_its_settings_is_refused_where_the_recording_does_not_tell_which() -> None:
    """As in recordings of versions that did not look: the settings would be taken for those of a schedule."""
    training = Training(mlp(), classification(), Adapting, {"lr": 0.3}, steps=4)
    _, run = training.run()
    earlier = change_steps(run, lambda step: replace(step, left=None))
    with pytest.raises(
        SimulationError, match=r"Adapting changes 'd' of its parameter groups in its own .*record the r"
    ):
        simulate(training.task(), training.data, Sources.by_label([i % 5 for i in range(40)]), run=earlier)


def test_losses_need_not_have_been_reported(run: MemoryRun) -> None:
    replay(change_steps(run, change_batches(loss=None)))
    silent = change_steps(run, change_batches(loss=None, normaliser=4.0))
    with pytest.raises(
        SimulationError,
        match=r"at step 1: the gradient norm is .* No loss was recorded, .* a sum where training took a mean, or "
        r"another divisor: the losses of 8 examples are summed and divided by the recorded normaliser 4, .* order",
    ):
        replay(silent)


def test_a_row_that_diverges_is_named_with_its_first_step() -> None:
    watch = Watch(("the unperturbed run", "the run without source 'ann'"))
    for step, loss in enumerate([1.0, torch.inf, torch.nan, 1.0], 7):
        watch.add(step, torch.tensor([1.0, loss]))
    with pytest.raises(SimulationError, match="without source 'ann' is not finite at step 9: it diverges"):
        watch.check()
