"""Measures what retraining, replaying and simulating take for one task, each from a few steps.

One of them is the simulation that `imprint.checking` has estimated already; what the others need is made from its
inputs.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from imprint.errors import ImprintError, PlanError, first_line
from imprint.evaluation.together import Together, Train
from imprint.evaluation.training_cost import TrainingCost, measure_together, measure_training
from imprint.plan import Plan, engine_for
from imprint.recording.records import Run
from imprint.runtime.notices import Notices
from imprint.runtime.progress import format_duration
from imprint.simulation import engines
from imprint.simulation.estimate import Estimate, estimate
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import check_run, complete_end, list_checkpoints
from imprint.simulation.states import States

_EPOCHS, _BATCH = 10, 32  # of the training that a message takes for an example
_PATIENCE = 60.0  # seconds that measuring one way may take beside another
_PASSES, _PASSES_EACH = 100, 12  # gradients over all data that an estimate takes: for the step size, and per source


@dataclass(frozen=True)
class Costs:
    """What was measured of each way; in place of a measurement, the reason why there is none.

    sources: how many there are.
    replay: of the recorded run; None if no run is recorded.
    trainings: how many trainings a replay amounts to.
    plan: that of the simulation, from so many checkpoints.
    """

    sources: int
    training: TrainingCost | str
    replay: Estimate | str | None
    trainings: int
    simulation: Estimate | str
    plan: Plan
    checkpoints: int = 1


@dataclass(frozen=True)
class Training:
    """What the caller says about the training: the function that does it, or its number of steps and batch size."""

    train: Train | Together | None = None
    steps: int | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) != (self.batch_size is None):
            raise PlanError(
                "training_steps and training_batch belong together: give both, or neither, to say how long a training "
                "is."
            )
        for name, value in (("training_steps", self.steps), ("training_batch", self.batch_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError(f"{name} must be a whole number of at least 1, got {value!r}.")


def measure_costs(
    inputs: Inputs,
    estimated: Estimate | None,
    run: Run | None,
    training: Training,
    memory: int | str | None,
    out: str | os.PathLike[str] | None,
) -> Costs:
    """Measure what the ways take.

    estimated: that of the inputs, None if they cannot be simulated.
    run: the recorded run, also where the inputs do not repeat it.
    """
    own: Estimate | str = estimated or "this simulation cannot start: see the problem"
    replay: Estimate | str | None = None
    simulation, plan, checkpoints = own, inputs.plan, sum(settings.weight > 0 for settings in inputs.settings)
    if plan.rules.question == "this_run":
        assert run is not None
        replay, plan, checkpoints = own, Plan(), len(run.checkpoints) - 1
        simulation = _find_why_not_measured(inputs, estimated, run) or _attempt(
            lambda: estimate(_simulate_from(inputs, run), memory, out)
        )
    elif run is not None:
        replay = _attempt(lambda: estimate(_repeat(inputs, run), memory, out))
    repeating = next((each for each in engines.registered() if each.rules.question == "this_run"), None)
    trainings = repeating.trainings(inputs.sources) if repeating is not None else None
    return Costs(
        sources=len(inputs.sources),
        training=_measure_training(inputs, training, replay),
        replay=replay,
        trainings=trainings or len(inputs.sources) + 1,
        simulation=simulation,
        plan=plan,
        checkpoints=checkpoints,
    )


def _find_why_not_measured(inputs: Inputs, replay: Estimate | None, run: Run) -> str | None:
    """Return why a simulation beside the replay is not measured, which may take longer than the replay itself."""
    if replay is None or replay.training_seconds is None:
        return None
    seen = sum(len(micro.examples) for step in run.steps for micro in step.batches)
    gradient = replay.training_seconds / seen * len(inputs.data)
    if gradient * (_PASSES + _PASSES_EACH * len(inputs.sources)) <= _PATIENCE:
        return None
    return (
        f"a pass over all data takes about {format_duration(gradient)}, and a simulation is measured by many; check "
        "one by itself, with checkpoints= in place of run="
    )


def _simulate_from(inputs: Inputs, run: Run) -> Inputs:
    """Return the inputs of a simulation by the default plan, from the checkpoints of a run."""
    states = States(inputs.task, list_checkpoints(run, inputs.task))
    return replace(inputs, plan=Plan(), states=states, notices=Notices(), run=None)


def _repeat(inputs: Inputs, run: Run) -> Inputs:
    """Return the inputs of a repetition of a run."""
    plan = Plan(engine=engine_for("this_run"))
    check_run(run, inputs.task, len(inputs.data), plan)
    states = States(inputs.task, [complete_end(run, inputs.task)])
    return replace(inputs, plan=plan, states=states, notices=Notices(), run=run)


def _attempt(measure: Callable[[], Estimate]) -> Estimate | str:
    """Return an estimate, or why there is none."""
    try:
        return measure()
    except (ImprintError, torch.OutOfMemoryError) as error:
        return first_line(error)


def _measure_training(inputs: Inputs, given: Training, replay: Estimate | str | None) -> TrainingCost | str:
    """Measure a training: as the caller says; by the models that train together; as recorded."""
    try:
        if given.steps is not None and given.batch_size is not None:
            return measure_training(inputs.task, inputs.data, given.steps, given.batch_size)
        if isinstance(given.train, Together):
            return measure_together(given.train, len(inputs.sources) + 1)
    except Exception as error:  # the user's model and loss, in training mode
        return f"a step of training failed ({first_line(error)})"
    if isinstance(replay, Estimate) and replay.training_seconds is not None:
        return TrainingCost(replay.training_seconds, "as long as the recorded one", replay.training_bytes)
    return _explain_unknown(given, len(inputs.data))


def _explain_unknown(given: Training, n: int) -> str:
    """Say that the length of a training is not known, and what to give."""
    batch = min(_BATCH, n)
    why = "train(subset, seed) is a function, and only calling it would tell" if given.train else "nothing says"
    return (
        f"{why} how long a training is; give its number of steps and its batch size (training_steps= and "
        f"training_batch=; for {_EPOCHS} epochs in batches of {batch}, --training-steps {_EPOCHS * -(-n // batch)} "
        f"--training-batch {batch}), or a recorded run"
    )
