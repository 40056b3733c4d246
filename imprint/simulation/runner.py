"""Runs a plan: every checkpoint, every chunk of sources, into a store."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from imprint.data import Collate, HashData
from imprint.errors import PlanError, StoreError, first_line
from imprint.plan import Checkpoints, Plan
from imprint.runtime.memory import Peak
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import settle_child
from imprint.simulation import engines
from imprint.simulation.executors import Executor
from imprint.simulation.guards import check_weights
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import Recorded, open_run, settle_states
from imprint.simulation.sizing import fit_batches
from imprint.simulation.taking_over import check_choices
from imprint.simulation.work import Simulation, count_units
from imprint.sources import Sources
from imprint.store.checkpoint import Checkpoint
from imprint.store.comparison import compare_training_data, difference
from imprint.store.describing import describe_new
from imprint.store.fingerprint import how_hashed, partly_hashed
from imprint.store.manifest import LONGEST, MANIFEST, Cost, Execution, Manifest
from imprint.store.reading import Store
from imprint.store.request import Request
from imprint.store.values import parsed
from imprint.store.workspace import Workspace
from imprint.store.writing import Writer
from imprint.task import Task

Agree = Callable[[Callable[[], Plan]], Plan]
"""Returns the automatic plan that several processes agree on, given a function that chooses one."""

logger = logging.getLogger(__name__)
Made = TypeVar("Made")


@torch.inference_mode(False)
def simulate(
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    run: Recorded | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory: int | str | None = None,
    repeat: Store | str | os.PathLike[str] | None = None,
    hash_data: HashData = "all",
    note: Any = None,
    validate: Any = None,
    record: Any = None,
    progress: bool | Advance = True,
    executor: Executor | None = None,
) -> Store:
    """Simulate the imprint of every source and keep them in a store.

    plan: how; "auto" lets `Plan.auto` choose from curvature and gradients at the checkpoints.
    data: the training data: a map-style dataset, or a tuple or mapping of tensors with one row per example; also a
        table of `datasets`, or a DataLoader that does not shuffle.
    checkpoints: state dicts, .safetensors or .pt files, or a Trainer's checkpoint folders; by default the model as it
        is. A pair (checkpoint, moments) brings Adam's second moments for a plan with that preconditioner, as a dict by
        parameter or a .safetensors file; those that a `Recorder` has kept beside a file, or a Trainer in its folder,
        are found without being named. Checkpoints of several training runs are a list of lists,
        [first.paths, second.paths]: their spread gives scores standard errors.
    run: a recorded training run in place of checkpoints: a `RunRecorder`, a `Recording` or its folder. Without a plan
        it is repeated once per source, with that source at weight 0: scores then say what removing the source does to
        the model of this very run. With "auto" it is repeated where that is affordable and the run is calm.
    out: folder of the store; without it the store is temporary and vanishes with the returned object. The
        same call again resumes an interrupted simulation, and returns a finished one.
    batch_size: how many examples are evaluated at once, by default 1,024, on a GPU 8,192; memory and speed only (the
        plan has the mini-batch), but for the draw of dropout along the path.
    device: where the data goes; it must be the model's device, which is the default.
    dtype: of the stored imprints: that of the parameters by default, bfloat16 to halve it.
    memory: what the simulation may use, in bytes or as "4GiB"; by default a share of what is available.
    repeat: a store, or its folder, to make again: other inputs than it was made from are refused, and what its
        simulation had to decide (step sizes, ε, chunk and batch sizes) is taken from it, so that on the same device
        with as many threads the imprints come out the same to the bit.
    hash_data: how the data is hashed, by which changed data is refused later. "sampled" hashes 1,024 examples, for data
        that is too large or slow to read once more; "none" accepts data that changes from reading to reading, such as
        randomly augmented images. Both are kept as a warning, and every later comparison says so.
    note: anything worth keeping with the store, as JSON values: it goes into the manifest.
    validate: queries on which the store is validated once it is made: see `imprint.validate`, which takes `record`.
    progress: True for a line on standard error, False for none, or a function of (done, total).
    executor: where the simulation runs in parts, such as `imprint.RayExecutor()` for a Ray cluster; by default it runs
        here, in one piece. Needs `out`, a folder that all workers see.
    """
    if validate is None and record is not None:
        raise PlanError("record is for a validation: give the queries to validate on as validate=.")
    given: dict[str, Any] = {"checkpoints": checkpoints, "run": run, "device": device, "dtype": dtype, "repeat": repeat}
    given |= {"batch_size": batch_size, "collate_fn": collate_fn, "hash_data": hash_data, "memory": memory}
    given |= {"note": note, "progress": progress}

    def open_store(request: Request, inputs: Inputs) -> Writer:
        return Writer(out, request, inputs.seen, check_choices, inputs.draws)

    if executor is None:
        store, inputs = simulate_into(open_store, task, data, sources, plan, **given)
    else:
        from imprint.simulation.sharing import simulate_on  # which makes parts, through this module

        store, inputs = simulate_on(executor, task, data, sources, plan, out=out, **given)
    describe_new(store, sources.about)
    store.origin = {"task": task, "data": data, "sources": sources, "run": inputs.run, "collate_fn": collate_fn}
    if validate is not None:
        _validators[-1](store, validate, record=record, memory=memory, progress=progress)
    return store


def simulate_into(
    open_workspace: Callable[[Request, Inputs], Workspace[Made]],
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None,
    *,
    checkpoints: Checkpoints | None = None,
    run: Recorded | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory: int | str | None = None,
    repeat: Store | str | os.PathLike[str] | None = None,
    hash_data: HashData = "all",
    note: Any = None,
    progress: bool | Advance = True,
    agree: Agree = lambda choose: choose(),
) -> tuple[Made, Inputs]:
    """Simulate what belongs to a folder, a store or a part of one; return what it then is, and what it was made from.

    open_workspace: opens the folder for a request.
    """
    settle_child()
    given: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "hash_data": hash_data, "run": run}
    given |= {"checkpoints": checkpoints, "device": device, "dtype": dtype, "progress": progress}
    repeat = None if repeat is None else Store.of(repeat)
    inputs = settle_inputs(task, data, sources, plan, repeat=repeat, agree=agree, **given)[0]
    refuse_note(note)
    with task.evaluating():
        if batch_size is None and repeat is None:
            fit_batches(inputs, memory, engines.get(inputs.plan).rows_per_source(inputs.plan))
        request = inputs.request()
        workspace = open_workspace(request, inputs)
        if workspace.finished is not None:
            return workspace.finished, inputs
        with _resumable(workspace):
            manifest = _fill(inputs, workspace, request, repeat, memory, note, progress)
            return workspace.finish(manifest), inputs


def settle_inputs(
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None,
    *,
    checkpoints: Checkpoints | None,
    run: Recorded | None,
    batch_size: int | None,
    collate_fn: Collate | None,
    hash_data: HashData,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    repeat: Store | None,
    progress: bool | Advance,
    agree: Agree = lambda choose: choose(),
) -> tuple[Inputs, Checkpoints | None]:
    """Check what a simulation is made from, and choose what the caller left open; return also its checkpoints."""
    recorded = open_run(run)
    if repeat is not None:
        plan = repeat.manifest.plan if plan is None else plan
        batch_size = repeat.manifest.execution.batch_size if batch_size is None else batch_size
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "hash_data": hash_data}
    if plan == "auto":
        plan = agree(partial(Plan.auto, task, data, sources, checkpoints, run=recorded, progress=progress, **options))
        recorded, checkpoints = settle_states(plan, recorded, checkpoints, task)
    inputs = Inputs.checked(task, data, sources, plan, checkpoints, device=device, dtype=dtype, run=recorded, **options)
    return inputs, checkpoints


_validators: list[Callable[..., object]] = []


def register_validator(validate: Callable[..., object]) -> None:
    """Make `simulate(validate=...)` call this function; `evaluation.validating`, above this, registers its own."""
    _validators.append(validate)


def _fill(
    inputs: Inputs,
    workspace: Workspace[Any],
    request: Request,
    repeat: Store | None,
    memory: int | str | None,
    note: Any,
    progress: bool | Advance,
) -> Manifest:
    """Simulate what an empty or unfinished folder lacks; return the record of what it then holds."""
    started, peak, task = time.monotonic(), Peak(inputs.task.device), inputs.task
    if warning := partly_hashed(how_hashed(vars(workspace.request.data)), len(inputs.data)):
        inputs.notices.add(warning)  # of what is resumed, too
    with closing(_count_work(inputs, workspace, progress)) as bar:
        inputs.examine()
        if repeat is not None:
            _take_over(repeat, request, workspace, inputs)
        work = Simulation(inputs, memory, workspace, bar)
        done: tuple[Checkpoint, ...] = ()
        for index, settings in enumerate(inputs.settings):
            done = (*done, work.checkpoint(index, settings))
        if workspace.is_whole:
            inputs.notice(check_weights([c.weight for c in done], [c.measured.norms for c in done]))
        return Manifest(
            request=workspace.request,
            sources=workspace.sources(inputs.sources),
            probes=work.probes(done) if done[inputs.first].base is not None else None,
            checkpoints=done,
            execution=Execution(str(task.device), torch.get_num_threads(), inputs.data.batch_size),
            cost=Cost(time.monotonic() - started, peak.bytes, workspace.resumed),
            question=inputs.plan.rules.question,
            shared=inputs.sources.shared,
            note=note,
            warnings=inputs.notices.messages,
        )


@contextmanager
def _resumable(workspace: Workspace[Any]) -> Iterator[None]:
    """Leave the folder of a simulation that fails or is interrupted in a state from which the same call resumes."""
    try:
        yield
    except BaseException as error:
        by_key = isinstance(error, KeyboardInterrupt) or "RuntimeError: KeyboardInterrupt" in str(error)
        if workspace.stop(by_key or not isinstance(error, Exception)):  # such as SystemExit, from a signal's handler
            logger.warning("stopped: the same call again resumes the simulation in %s", workspace.path)
        if by_key:  # within its own code torch makes a RuntimeError of it
            raise KeyboardInterrupt from error
        raise


def _count_work(inputs: Inputs, workspace: Workspace[Any], progress: bool | Advance) -> Progress:
    """Make a progress line for the work of all checkpoints."""
    engine, plan = engines.get(inputs.plan), inputs.plan
    every = enumerate(inputs.settings)
    used = [settings for index, settings in every if settings.weight > 0 and workspace.simulates(index)]
    units = [engine.shared_units(plan, len(inputs.data)) + count_units(inputs, s, workspace) for s in used]
    return Progress("simulating", sum(units), engine.unit, progress)


def refuse_note(note: Any) -> None:
    """Refuse a note that cannot be written: before the work, not after it."""
    try:
        text = json.dumps(note, allow_nan=False)
        parsed(text.encode(), Path("note"))
        if len(text) > LONGEST // 2:
            raise ValueError(f"it has {len(text):,} characters, and at most {LONGEST // 2:,} fit a manifest")
    except (TypeError, ValueError, RecursionError, StoreError) as error:
        raise StoreError(f"note must be made of JSON values: {first_line(error)}.") from error


def _take_over(repeat: Store, request: Request, workspace: Workspace[Any], inputs: Inputs) -> None:
    """Settle every checkpoint as an earlier simulation of the same request did."""
    before = replace(repeat.manifest.request, fixed=request.fixed)  # which does not change what is simulated
    if different := difference(before, request, inputs.seen):
        raise StoreError(f"{repeat.path} cannot be repeated: {different}.")
    compare_training_data(before, request).warn()
    plan, members = inputs.plan, inputs.sources.members
    drawn = plan.source_sample is not None or (plan.dropout and plan.batch_size is not None)
    if before.members is None and drawn and any((np.diff(each) < 0).any() for each in members):
        inputs.notices.add(
            f"{repeat.path} was made by a version whose draws depended on the order of a source's members, and some "
            "are not in ascending order: imprints of these sources are drawn anew, and differ."
        )
    for index, checkpoint in enumerate(repeat.checkpoints):
        found = workspace.settled(index)
        if checkpoint.weight == 0:
            continue
        plain = parsed(json.dumps(asdict(checkpoint)).encode(), repeat.path / MANIFEST)
        check_choices(checkpoint, index, before, replace(plain, field=f"checkpoints[{index}]"))
        if found is None:
            workspace.settle(index, replace(checkpoint, base=None, imprints=(), midpoints=(), basis=None, noise=None))
        elif found.choices != checkpoint.choices:
            raise StoreError(
                f"{workspace.path} holds an unfinished simulation that chose other steps than {repeat.path}: give "
                "another folder."
            )
