"""Fits a recorded training run to a task, its data and a plan, for `imprint.simulation.inputs`."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from imprint.compat import uncompiled
from imprint.display import name_some
from imprint.errors import DataError, PlanError, TaskError
from imprint.plan import Checkpoints, Plan, State, engine_for
from imprint.recorder import moments_beside
from imprint.recording.reading import Recording
from imprint.recording.records import Run
from imprint.store.fingerprint import DataPrint, compare_data
from imprint.store.request import ParameterSpec
from imprint.task import Parameters, Task


@runtime_checkable
class Finishable(Protocol):
    """What records a run: a `RunRecorder`, or what was attached to a Trainer."""

    def finish(self) -> Recording: ...


Recorded = Run | Finishable | str | os.PathLike[str]
"""A recorded run: a recording, the recorder that made it, or the folder it is in."""


def open_run(run: Recorded | None) -> Run | None:
    """Return a recorded run as replays read it; the training of a recorder is over."""
    if isinstance(run, Finishable):  # which knows an optimiser of the user's own
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
            f"the recorded run trained {name_some(lacking)}, which the task does not select: "
            f"{_explain_lack(lacking, run, task)}"
        )
    if plan.start >= len(run.steps):
        raise PlanError(
            f"start is {plan.start}, and the recorded run has {len(run.steps)} steps: start at an earlier one, or "
            "leave start out to repeat the whole run."
        )


def _explain_lack(lacking: Sequence[str], run: Run, task: Task) -> str:
    """Say why a task may not have parameters that a run trained, and what to do."""
    own = dict(task.model.named_parameters())
    if uncompiled(task.model) is not task.model:
        return (
            "its model is a compiled one, whose parameters have other names. Build the task from the model that was "
            "compiled, model._orig_mod."
        )
    if rested := [name for name in lacking if all(name in step.missing for step in run.steps)]:
        return (
            f"{name_some(rested)} had no gradient in any step, and the recording has them as trained. Record the run "
            "again with a RunRecorder that is made when they are frozen, which leaves them out; or select them too: "
            'model.requires_grad_(True), and parameters="*".'
        )
    if frozen := [name for name in lacking if name in own and not own[name].requires_grad]:
        return (
            f"{name_some(frozen)} is frozen now. Call model.requires_grad_(True) before building the task; what was "
            "frozen during training is replayed so."
        )
    return (
        "what a removal does to all trained parameters belongs to it. Build the task with parameters= that match them."
    )


def refuse_other_data(run: Run, hashes: DataPrint, n: int) -> None:
    """Refuse data that differ from those the run was recorded with, where the recording has their hash."""
    if run.data is None:
        return
    likeness = compare_data(run.data, hashes, n)
    if not likeness.same:
        raise DataError(
            f"the run was recorded with other training data{likeness.remark}: give the same examples in the same "
            "order, in the form in which they were trained on. (The run of a Trainer is replayed with its "
            "train_dataset, such as documents.rows, and collate_fn=run.collate_fn.)"
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
    own = task.tensors()
    return [{**own, **run.state(step)} for step in steps]


def describe_other_state(run: Run, task: Task) -> str | None:
    """Say that the task's model is neither the start nor the end of a run; None if it is one of them."""
    if _ONE_OF_SEVERAL.get():
        return None
    own, steps = task.tensors(), len(run.steps)
    differing = [
        next((name for name, t in run.state(step).items() if name in own and not _agree(own[name], t)), None)
        for step in (steps, 0)
    ]
    if None in differing:
        return None
    return (
        f"the model of the task is neither the start nor the end of the recorded run ({differing[0]!r} differs): "
        "results describe the model at the recorded end, not this one. If you serve the recorded end, load it: "
        f"model.load_state_dict(recording.state({steps}), strict=False). If you serve this model, record its training "
        "to the end, with every step within run.step."
    )


@contextmanager
def one_of_several() -> Iterator[None]:
    """Accept any model of the task meanwhile: of runs from several seeds, it is the end of one at most."""
    token = _ONE_OF_SEVERAL.set(True)
    try:
        yield
    finally:
        _ONE_OF_SEVERAL.reset(token)


_ONE_OF_SEVERAL: ContextVar[bool] = ContextVar("one_of_several", default=False)
_DETOURS = (torch.float32, torch.bfloat16, torch.float16)  # in which a model may have been saved meanwhile
_ULPS = 8  # of rounding that a model may differ by, in float32 and wider: far less than a step of training


def _agree(own: Tensor, recorded: Tensor) -> bool:
    """Tell whether a tensor has the recorded values, but for rounding and a detour through a lower precision."""
    recorded = recorded.to(own.device)
    if own.shape != recorded.shape or not own.is_floating_point():
        return torch.equal(own, recorded)
    slack = _ULPS * torch.finfo(own.dtype).eps if own.dtype.itemsize >= 4 else 0.0
    return any(
        torch.allclose(own, recorded.to(dtype).to(own.dtype), rtol=slack, atol=0.0)
        for dtype in (recorded.dtype, *_DETOURS)
    )


def list_checkpoints(run: Run, task: Task) -> list[State]:
    """Return the checkpoints of a run after its start, for engines that simulate from checkpoints."""
    if isinstance(run, Recording) and not run.frozen:
        return list(run.paths)
    states = _complete(run, task, *run.checkpoints[1:])
    trained = {name for names in run.groups for name in names}
    if isinstance(run, Recording) and trained.issuperset(task.names) and all(map(_has_moments, run.paths)):
        return [(state, moments_beside(path)) for state, path in zip(states, run.paths, strict=True)]
    return list(states)


def _has_moments(checkpoint: Path) -> bool:
    return moments_beside(checkpoint).is_file()


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
