"""Fits a recorded training run to a task, its data and a plan, for `imprint.simulation.inputs`."""

import os

import torch

from imprint.display import name_some
from imprint.errors import DataError, PlanError, TaskError
from imprint.plan import Checkpoints, Plan, State, engine_for
from imprint.recording.reading import Recording
from imprint.recording.records import Run
from imprint.recording.writing import RunRecorder
from imprint.store.fingerprint import DataPrint, compare_data
from imprint.store.request import ParameterSpec
from imprint.task import Parameters, Task

Recorded = Run | RunRecorder | str | os.PathLike[str]
"""A recorded run: a recording, the recorder that made it, or the folder it is in."""


def open_run(run: Recorded | None) -> Run | None:
    """Return a recorded run as replays read it; the training of a recorder is over."""
    if isinstance(run, RunRecorder):
        return run.finish()
    if isinstance(run, str | os.PathLike):
        return Recording(run)
    if run is not None and not hasattr(run, "optimiser_state"):
        raise PlanError(
            f"run must be an imprint.RunRecorder, an imprint.Recording or a folder, got {type(run).__name__}."
        )
    return run


def choose_plan_for(plan: Plan | None, run: Run | None) -> Plan:
    """Return the plan, by default that of the run; refuse one that does not belong to the run."""
    if plan is None:
        return Plan() if run is None else Plan(engine=engine_for("this_run"))
    follows = plan.rules.question == "this_run"
    if follows and run is None:
        raise PlanError(
            f"the {plan.engine} engine repeats a recorded run: record the training with imprint.RunRecorder and give "
            "it as run=, or use another engine."
        )
    if run is not None and not follows:
        raise PlanError(
            f"the {plan.engine} engine simulates from checkpoints and does not repeat a run: give "
            f'checkpoints=run.paths in place of run=, or leave the plan out to repeat the run (engine="'
            f'{engine_for("this_run")}").'
        )
    return plan


def refuse_both(checkpoints: Checkpoints | None) -> None:
    """Refuse checkpoints beside a recorded run."""
    if checkpoints is not None:
        raise PlanError("a recorded run is repeated to its end: give run= or checkpoints=, not both.")


def check_run(run: Run, task: Task, n: int, plan: Plan) -> None:
    """Refuse a run of other data or parameters than the task's, and a start that lies beyond its end.

    Whether it is of the same model, with the same frozen values, `complete_end` finds out.
    """
    if run.n != n:
        raise DataError(
            f"the recorded run has {run.n} training examples, the data has {n}: give the data it was trained on."
        )
    optimised = [name for names in run.groups for name in names]
    if lacking := sorted(set(optimised) - set(task.names)):
        raise TaskError(
            f"the recorded run trained {name_some(lacking)}, which the task does not select: what a removal does to "
            "all trained parameters belongs to it. Build the task with parameters= that match them."
        )
    if plan.start >= len(run.steps):
        raise PlanError(
            f"start is {plan.start}, and the recorded run has {len(run.steps)} steps: start at an earlier one, or "
            "leave start out to repeat the whole run."
        )


def refuse_other_data(run: Run, hashes: DataPrint, n: int) -> None:
    """Refuse data that differ from those the run was recorded with, where the recording has their hash."""
    recorded = getattr(run, "data", None)
    if recorded is None:
        return
    likeness = compare_data(recorded, hashes, n)
    if not likeness.same:
        raise DataError(
            f"the run was recorded with other training data{likeness.remark}: give the same examples in the same order."
        )
    likeness.warn()


def find_begin(run: Run, start: int) -> int:
    """Return the last checkpoint of a run that is not after a step, from which a replay of that step begins."""
    return max(step for step in run.checkpoints if step <= start)


def complete_end(run: Run, task: Task) -> Parameters:
    """Return the recorded end as a complete state: what the run did not train comes from the task's model."""
    (end,) = _complete(run, task, len(run.steps))
    return end


def _complete(run: Run, task: Task, *steps: int) -> list[Parameters]:
    """Return some checkpoints of a run as complete states; refuse a run of another model."""
    if isinstance(run, Recording):
        return run.complete(task, *steps)
    own = task.state()
    return [{**own, **run.state(step)} for step in steps]


def list_checkpoints(run: Run, task: Task) -> list[State]:
    """Return the checkpoints of a run after its start, for engines that simulate from checkpoints."""
    if isinstance(run, Recording) and not run.frozen:
        return list(run.paths)
    return list(_complete(run, task, *run.checkpoints[1:]))


def settle_states(
    plan: Plan, run: Run | None, checkpoints: Checkpoints | None, task: Task
) -> tuple[Run | None, Checkpoints | None]:
    """Return the run and the checkpoints that an automatic plan is for: of a run that it does not repeat, its own."""
    if run is None or plan.rules.question == "this_run":
        return run, checkpoints
    return None, list_checkpoints(run, task)


def find_changed_buffers(run: Run, task: Task) -> dict[str, ParameterSpec]:
    """Return the floating-point buffers that the run changed, such as the running statistics of batch norm."""
    before, after = run.state(0), run.state(len(run.steps))
    buffers = (name for name, _ in task.model.named_buffers() if name in after and name in before)
    return {
        name: ParameterSpec(tuple(after[name].shape), str(task.model.get_buffer(name).dtype))
        for name in buffers
        if after[name].is_floating_point() and not torch.equal(before[name], after[name])
    }
