"""Finds out before a simulation whether it will work, by which engine and readout, and what it will take."""

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Subset

from imprint.advice.costs import Training, measure_costs
from imprint.advice.ways import Way, advise, format_seconds, list_ways
from imprint.batches import map_tensors
from imprint.data import Collate, HashData, as_tensors, is_columns, query_batches
from imprint.display import format_size
from imprint.errors import ImprintError, SimulationError, first_line
from imprint.evaluation.together import Together, Train
from imprint.plan import Checkpoints, Plan, format_plan
from imprint.readout.base import Base
from imprint.readout.kernels import ReadoutName, forward_only
from imprint.readout.reader import Reader
from imprint.runtime.progress import Advance, Progress, format_duration
from imprint.runtime.turns import settle_child
from imprint.simulation import engines
from imprint.simulation.estimate import Estimate, estimate
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import Recorded, open_run, settle_states
from imprint.simulation.runner import simulate
from imprint.simulation.sizing import fit_batches
from imprint.simulation.step_size import coarse_curvature
from imprint.sources import Sources
from imprint.store.files import find_nearest_folder
from imprint.store.reading import Store
from imprint.task import Batch, Parameters, Task
from imprint.tensors.batching import attempt

_EXAMPLES = 32  # on which engines and readouts are tried
_QUERIES = 4
_PATIENCE = 120.0  # seconds of a simulation up to which checkpoints are looked at as closely as it will


@dataclass(frozen=True)
class Possibility:
    """Whether an engine or a readout works on the task; `remark` says why not, or what it costs."""

    name: str
    works: bool
    remark: str = ""


@dataclass(frozen=True)
class Check:
    """What `check` found. `problems` is empty if nothing that was tried stands in the way; `tried` says what that was.

    parameters: shapes of the selected parameters; `values` of them are simulated, of `values_in_all` in the model.
    plan: that of the simulation, also where it was chosen.
    estimate: None where the simulation cannot begin.
    warnings: what the simulation would warn of, as far as its first checkpoint shows.
    ways: what retraining, replaying and simulating take, and which question each answers; empty if not asked for.
    """

    parameters: dict[str, tuple[int, ...]]
    values: int
    values_in_all: int
    examples: int
    sources: int
    checkpoints: int
    plan: Plan
    engines: tuple[Possibility, ...]
    readouts: tuple[Possibility, ...]
    estimate: Estimate | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()

    @property
    def advice(self) -> str:
        """Which way is the cheapest for the question that the plan answers; empty if none were compared."""
        return advise(self.ways, self.plan.rules.question) if self.ways else ""

    @property
    def tried(self) -> str:
        """What was run without trouble, where there was none: more is not known before the simulation."""
        few = min(_EXAMPLES, self.examples)
        readouts = ", ".join(possibility.name for possibility in self.readouts if possibility.works)
        if self.plan.rules.question == "this_run":
            return (
                f"Nothing stands in the way: the {self.plan.engine} engine repeated a few steps of the recorded run, "
                f"and the model can be read out by {readouts}. How chaotic the run is, the simulation measures."
            )
        return (
            f"Nothing stands in the way: one step of the {self.plan.engine} engine ran on {few:,} examples and was "
            f"read out by {readouts}; a few steps were measured at the first checkpoint. Whether scores are right, "
            "only a comparison with retraining tells (imprint evaluate)."
        )

    @property
    def ok(self) -> bool:
        """Whether the simulation can begin, as far as was tried."""
        return not self.problems

    def __str__(self) -> str:
        found = self.estimate
        lines = [f"problem: {problem}" for problem in self.problems] or [self.tried]
        lines += [f"warning: {message}" for message in self.warnings]
        each = "" if found is None else f" of {format_size(found.bytes_per_source)} each"
        lines.append(
            f"{self.values:,} of {self.values_in_all:,} values of the parameters, {self.sources:,} sources{each}"
        )
        if found is not None:
            lines.append(
                f"about {format_duration(found.seconds)}, at most {format_size(found.peak_bytes)} of memory, "
                f"a store of {format_size(found.store_bytes)}"
            )
        lines.append(f"plan: {format_plan(self.plan)}")
        for kind, possibilities in (("engine", self.engines), ("readout", self.readouts)):
            lines += [f"{kind} {p.name}: {'works' if p.works else 'no'}, {p.remark}" for p in possibilities]
        lines += [f"{way.task} ({way.question}): {format_seconds(way.seconds)}, {way.how}" for way in self.ways]
        return "\n".join(lines + [self.advice] * bool(self.ways))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**asdict(self), "plan": self.plan.to_json(), "ok": self.ok, "advice": self.advice}


@torch.inference_mode(False)
def check(
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None = None,
    *,
    queries: Any = None,
    checkpoints: Checkpoints | None = None,
    run: Recorded | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory: int | str | None = None,
    hash_data: HashData = "all",
    train: Train | Together | None = None,
    training_steps: int | None = None,
    training_batch: int | None = None,
    compare: bool = True,
    progress: bool | Advance = True,
) -> Check:
    """Try every engine and readout on a few examples, measure a few steps, and compare with plain retraining.

    The arguments are those of `simulate`, which may follow; `queries` are tried with the readouts, by default a few
    training examples are. Nothing stays on disk. Input that does not fit together raises, as in `simulate`.

    run: repeated by default; beside checkpoints and a plan for them, only compared with.
    train: how models are retrained, as for `retrain`; `Together` tells how long that takes.
    training_steps, training_batch: how many steps a training has, and how many examples a step, if nothing else tells.
    compare: whether to measure what retraining and replaying would take (`ways` and `advice` of the result).
    progress: as in `simulate`.
    """
    settle_child()
    training = Training(train, training_steps, training_batch)
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "device": device, "dtype": dtype}
    data, recorded = as_tensors(data), open_run(run)
    if plan == "auto":
        chosen_by: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "hash_data": hash_data}
        plan = Plan.auto(task, data, sources, checkpoints, run=recorded, progress=False, **chosen_by)
        repeated, checkpoints = settle_states(plan, recorded, checkpoints, task)
    else:
        aside = checkpoints is not None and isinstance(plan, Plan) and plan.rules.question == "expected"
        repeated = None if aside else recorded
    inputs = Inputs.checked(task, data, sources, plan, checkpoints, hash_data=hash_data, run=repeated, **options)
    inputs.refuse_other_data()
    problems: list[str] = []
    bar = Progress("checking", 0, "units", progress)
    expected: Estimate | None = None
    # One thread at a time, as what is made quiet belongs to all of them.
    with closing(bar), task.evaluating(), _silence():
        if batch_size is None:
            fit_batches(inputs, memory, engines.get(inputs.plan).rows_per_source(inputs.plan))
        state = inputs.state(inputs.first)
        bar.announce("trying the task on a few examples")
        inputs.examine()
        batch, count = _gather_queries(inputs, queries, collate_fn)
        stores = _try_engines(inputs, state, data, collate_fn, bar.announce)
        bar.announce("trying readouts")
        readouts = _try_readouts(inputs, state, stores, batch, count)
        try:
            if isinstance(chosen := stores.get(inputs.plan.engine), Exception):
                raise chosen
            bar.announce("timing a few steps")
            try:
                expected = estimate(inputs, memory, out)
            except SimulationError:  # if for its curvature, then by what a closer look says of it
                _look_ahead(inputs, memory, patient=False)
                raise
            bar.announce("looking at every checkpoint")
            _look_ahead(inputs, memory, patient=expected.seconds <= _PATIENCE)
            problems += _check_disk(expected, out)
        except (ImprintError, torch.OutOfMemoryError) as error:
            problems.append(_explain(error))
        bar.announce("timing what else answers the question")
        ways = list_ways(measure_costs(inputs, expected, recorded, training, memory, out)) if compare else ()
    if readouts and not any(readout.works for readout in readouts):
        problems.append(f"no readout works: {readouts[0].remark}")
    selected = {name: tuple(task.model.get_parameter(name).shape) for name in task.names}
    return Check(
        parameters=selected,
        values=sum(torch.Size(shape).numel() for shape in selected.values()),
        values_in_all=sum(p.numel() for p in task.model.parameters()),
        examples=len(inputs.data),
        sources=len(sources),
        checkpoints=sum(settings.weight > 0 for settings in inputs.settings),
        plan=inputs.plan,
        engines=tuple(_describe_engine(engine, stores, inputs, expected) for engine in engines.registered()),
        readouts=readouts,
        estimate=expected,
        problems=tuple(problems),
        warnings=inputs.notices.messages,
        ways=ways,
    )


def _try_engines(
    inputs: Inputs, state: Parameters, data: Any, collate_fn: Collate | None, announce: Callable[[str], None]
) -> dict[str, Store | Exception]:
    """Simulate a step by each engine that takes a checkpoint; those that repeat a run are tried by an estimate."""
    found: dict[str, Store | Exception] = {}
    with coarse_curvature():
        for engine in engines.registered():
            if engine.rules.question != "this_run":
                announce(f"trying the engine {engine.name}")
                found[engine.name] = _try_plan(inputs, state, data, engine.trial(inputs.plan), collate_fn)
    return found


def _try_plan(
    inputs: Inputs, state: Parameters, data: Any, plan: Plan, collate_fn: Collate | None
) -> Store | Exception:
    """Simulate one step of a plan on a few examples; return the store, or the error."""
    count = min(_EXAMPLES, len(inputs.data))
    few = map_tensors(lambda t: t[:count], data) if is_columns(data) else Subset(data, range(count))
    two = Sources.groups({index: [index] for index in range(min(2, count))})
    try:
        given: dict[str, Any] = {"checkpoints": [state], "collate_fn": collate_fn, "batch_size": count}
        return simulate(inputs.task, few, two, plan, hash_data=inputs.hash_data, progress=False, **given)
    except (ImprintError, torch.OutOfMemoryError) as error:
        return error


def _look_ahead(inputs: Inputs, memory: int | str | None, patient: bool) -> None:
    """Refuse what the simulation would refuse at any checkpoint, only later."""
    for index, settings in enumerate(inputs.settings):
        if settings.weight > 0:
            engines.at_checkpoint(inputs, index, inputs.state(index), memory).look_ahead(patient)


def _explain(error: Exception) -> str:
    """Describe an error as a problem, and what to do where memory runs out."""
    if isinstance(error, torch.OutOfMemoryError):
        return f"memory runs out ({first_line(error)}): lower memory= or batch_size=, or select fewer parameters."
    return str(error)


def _describe_engine(
    engine: type[engines.Engine], stores: dict[str, Store | Exception], inputs: Inputs, expected: Estimate | None
) -> Possibility:
    found = stores.get(engine.name)
    if isinstance(found, Exception):
        return Possibility(engine.name, False, _explain(found))
    if found is not None:
        return Possibility(engine.name, True, _describe_way(found.checkpoints[0].measured.one_by_one))
    if engine.name != inputs.plan.engine:
        return Possibility(engine.name, False, "needs a recorded run, run=")
    if expected is None:
        return Possibility(engine.name, False, "see the problem")
    return Possibility(engine.name, True, _describe_way(expected.one_by_one))


def _try_readouts(
    inputs: Inputs, state: Parameters, stores: dict[str, Store | Exception], batch: Batch, count: int
) -> tuple[Possibility, ...]:
    """Try the readouts that the plan's store will have, and those of others beside them."""
    if inputs.plan.rules.removes:
        return (_try_removed(inputs, state, batch, count),)
    if not any(isinstance(found, Store) for found in stores.values()):
        return ()
    own = inputs.plan.engine
    stores = {own: stores[own], **stores}  # readouts are tried on its own store, if there is one
    perturbing = (engine for engine in engines.registered() if engine.rules.perturbs)
    paired = next(engine.name for engine in perturbing if engine.trial(inputs.plan).holds_pair)
    kinds: Iterator[ReadoutName] = (kind for kind in get_args(ReadoutName) if kind != "removed")
    return tuple(_try_readout(inputs.task, stores, paired, kind, batch, count) for kind in kinds)


def _try_removed(inputs: Inputs, state: Parameters, batch: Batch, count: int) -> Possibility:
    """Evaluate the measurement where two removals might have led."""
    descent = inputs.descent(inputs.first, state)
    base = Base(inputs.first, 1.0, descent.task, descent.start)
    rows = {name: tensor.new_full((2, *tensor.shape), 1e-3) for name, tensor in descent.start.items()}
    with forward_only(inputs.task):
        for vectorise, way in ((True, None), (False, "vmap does not take this model")):
            read = partial(base.removed, rows, 1, batch, count, vectorise=vectorise)
            _, failure = attempt(read)
            if failure is None:
                return Possibility("removed", True, _describe_way(way))
    return Possibility("removed", False, str(failure))


def _try_readout(
    task: Task, stores: dict[str, Store | Exception], paired: str, kind: ReadoutName, batch: Batch, count: int
) -> Possibility:
    """Try a readout on a store that holds what it needs.

    paired: the engine whose store holds both perturbed end points.
    """
    found = stores[paired] if kind == "literal" else next(s for s in stores.values() if isinstance(s, Store))
    if isinstance(found, Exception):
        return Possibility(kind, False, _explain(found))
    try:
        reader = Reader(task, found, readout=kind)
        reader.scores(batch, count)
    except (ImprintError, torch.OutOfMemoryError) as error:
        return Possibility(kind, False, _explain(error))
    if "fallback" in reader.details:
        return Possibility(kind, False, f"{reader.details['fallback']}; central takes its place")
    needs = f'; needs engine="{paired}" and keep_pair=True' if kind == "literal" else ""
    return Possibility(kind, True, _describe_way(reader.details.get("one_by_one")) + needs)


def _describe_way(alone: object) -> str:
    return f"sources one by one, {alone}" if alone else "many sources at once"


def _gather_queries(inputs: Inputs, queries: Any, collate_fn: Collate | None) -> tuple[Batch, int]:
    """Return a few queries as one batch, and how many they are."""
    if queries is None:
        count = min(_QUERIES, len(inputs.data))
        return inputs.data.gather(torch.arange(count)), count
    queries = as_tensors(queries)
    if is_columns(queries):
        queries, collate_fn = map_tensors(lambda t: t[:_QUERIES], queries), None
    elif hasattr(queries, "__getitem__") and hasattr(queries, "__len__"):
        queries = Subset(queries, range(min(_QUERIES, len(queries))))
    elif isinstance(queries, Iterable):
        queries = islice(queries, 1)
    ((count, batch),) = query_batches(queries, device=inputs.task.device, batch_size=_QUERIES, collate_fn=collate_fn)
    return batch, count


def _check_disk(expected: Estimate, out: str | os.PathLike[str] | None) -> Iterator[str]:
    """Explain that the disk is too small."""
    place = find_nearest_folder(out)
    free = shutil.disk_usage(place).free
    if expected.disk_bytes > free:
        yield (
            f"the simulation needs {expected.disk_bytes:,} bytes of disk, and {place} has {free:,} free: select fewer "
            "parameters, keep imprints in bfloat16, or give another folder."
        )


@contextmanager
def _silence() -> Iterator[None]:
    """Silence logs and warnings: fallbacks are part of the answer here."""
    log = logging.getLogger("imprint")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
