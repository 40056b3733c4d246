"""Runs a plan: every checkpoint, every chunk of sources, into a store."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from imprint.data import Collate, HashData
from imprint.errors import PlanError, StoreError, first_line
from imprint.plan import Checkpoints, Plan, Settings
from imprint.runtime.memory import Peak
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import settle_child
from imprint.simulation import engines
from imprint.simulation.checkpoint_files import CheckpointFiles
from imprint.simulation.engines import Chunk, Engine
from imprint.simulation.figures import check_rows, summarise
from imprint.simulation.guards import check_weights
from imprint.simulation.inputs import Inputs
from imprint.simulation.path import Hooks
from imprint.simulation.recorded import Recorded, open_run, settle_states
from imprint.simulation.sizing import fit_batches, refit
from imprint.simulation.snapshot import Snapshot
from imprint.simulation.taking_over import check_choices
from imprint.sources import Sources
from imprint.store.checkpoint import Checkpoint, File, ShardFigures, read_figures
from imprint.store.comparison import compare_training_data, difference
from imprint.store.fingerprint import how_hashed, partly_hashed
from imprint.store.layouts import coefficients_dtype, layout
from imprint.store.manifest import LONGEST, MANIFEST, Cost, Execution, Manifest, Probes
from imprint.store.probing import evaluate_probes
from imprint.store.reading import Store
from imprint.store.request import DTYPES, Request
from imprint.store.values import Value, parsed
from imprint.store.writing import Writer
from imprint.task import Parameters, Task

logger = logging.getLogger(__name__)


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
    """
    settle_child()
    recorded = open_run(run)
    if validate is None and record is not None:
        raise PlanError("record is for a validation: give the queries to validate on as validate=.")
    if repeat is not None:
        repeat = Store.of(repeat)
        plan = repeat.manifest.plan if plan is None else plan
        batch_size = repeat.manifest.execution.batch_size if batch_size is None else batch_size
    options: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "hash_data": hash_data}
    if plan == "auto":
        plan = Plan.auto(task, data, sources, checkpoints, run=recorded, progress=progress, **options)
        recorded, checkpoints = settle_states(plan, recorded, checkpoints, task)
    inputs = Inputs.checked(task, data, sources, plan, checkpoints, device=device, dtype=dtype, run=recorded, **options)
    _refuse_note(note)
    with task.evaluating():
        if batch_size is None:
            fit_batches(inputs, memory, engines.get(inputs.plan).rows_per_source(inputs.plan))
        request = inputs.request()
        writer = Writer(out, request, inputs.seen, check_choices)
        store = writer.finished or _fill(inputs, writer, request, repeat, memory, note, progress)
    store.origin = {"task": task, "data": data, "sources": sources, "run": recorded, "collate_fn": collate_fn}
    if validate is not None:
        _validators[-1](store, validate, record=record, memory=memory, progress=progress)
    return store


_validators: list[Callable[..., object]] = []


def register_validator(validate: Callable[..., object]) -> None:
    """Make `simulate(validate=...)` call this function; `evaluation.validating`, above this, registers its own."""
    _validators.append(validate)


def _fill(
    inputs: Inputs,
    writer: Writer,
    request: Request,
    repeat: Store | None,
    memory: int | str | None,
    note: Any,
    progress: bool | Advance,
) -> Store:
    """Simulate what an empty or unfinished folder lacks."""
    started, peak, task = time.monotonic(), Peak(inputs.task.device), inputs.task
    if warning := partly_hashed(how_hashed(vars(writer.request.data)), len(inputs.data)):
        inputs.notices.add(warning)  # of what is resumed, too
    resumed = writer.settled(inputs.first) is not None
    with _resumable(writer), closing(_count_work(inputs, progress)) as bar:
        inputs.examine()
        if repeat is not None:
            _take_over(repeat, request, writer, inputs)
        work = _Work(inputs, memory, writer, bar)
        done: tuple[Checkpoint, ...] = ()
        for index, settings in enumerate(inputs.settings):
            done = (*done, work.checkpoint(index, settings))
        inputs.notice(check_weights([c.weight for c in done], [c.measured.norms for c in done]))
        manifest = Manifest(
            request=writer.request,
            sources=writer.sources(inputs.sources),
            probes=work.probes(done),
            checkpoints=done,
            execution=Execution(str(task.device), torch.get_num_threads(), inputs.data.batch_size),
            cost=Cost(time.monotonic() - started, peak.bytes, resumed),
            question=inputs.plan.rules.question,
            shared=inputs.sources.shared,
            note=note,
            warnings=inputs.notices.messages,
        )
        return writer.finish(manifest)


@contextmanager
def _resumable(writer: Writer) -> Iterator[None]:
    """Leave the folder of a simulation that fails or is interrupted in a state from which the same call resumes."""
    try:
        yield
    except BaseException as error:
        by_key = isinstance(error, KeyboardInterrupt) or "RuntimeError: KeyboardInterrupt" in str(error)
        if writer.stop(by_key or not isinstance(error, Exception)):  # such as SystemExit, from a signal's handler
            logger.warning("stopped: the same call again resumes the simulation in %s", writer.path)
        if by_key:  # within its own code torch makes a RuntimeError of it
            raise KeyboardInterrupt from error
        raise


def _count_work(inputs: Inputs, progress: bool | Advance) -> Progress:
    """Make a progress line for the work of all checkpoints."""
    engine, plan = engines.get(inputs.plan), inputs.plan
    used = [settings for settings in inputs.settings if settings.weight > 0]
    units = [engine.shared_units(plan, len(inputs.data)) + engine.units(plan, s, inputs.sources) for s in used]
    return Progress("simulating", sum(units), engine.unit, progress)


def _refuse_note(note: Any) -> None:
    """Refuse a note that cannot be written: before the work, not after it."""
    try:
        text = json.dumps(note, allow_nan=False)
        parsed(text.encode(), Path("note"))
        if len(text) > LONGEST // 2:
            raise ValueError(f"it has {len(text):,} characters, and at most {LONGEST // 2:,} fit a manifest")
    except (TypeError, ValueError, RecursionError, StoreError) as error:
        raise StoreError(f"note must be made of JSON values: {first_line(error)}.") from error


def _take_over(repeat: Store, request: Request, writer: Writer, inputs: Inputs) -> None:
    """Settle every checkpoint as an earlier simulation of the same request did."""
    before = replace(repeat.manifest.request, fixed=request.fixed)  # which does not change what is simulated
    if different := difference(before, request, inputs.seen):
        raise StoreError(f"{repeat.path} cannot be repeated: {different}.")
    compare_training_data(before, request).warn()
    for index, checkpoint in enumerate(repeat.checkpoints):
        found = writer.settled(index)
        if checkpoint.weight == 0:
            continue
        plain = parsed(json.dumps(asdict(checkpoint)).encode(), repeat.path / MANIFEST)
        check_choices(checkpoint, index, before, replace(plain, field=f"checkpoints[{index}]"))
        if found is None:
            writer.settle(index, replace(checkpoint, base=None, imprints=(), midpoints=(), basis=None, noise=None))
        elif found.choices != checkpoint.choices:
            raise StoreError(
                f"{writer.path} holds an unfinished simulation that chose other steps than {repeat.path}: give another "
                "folder."
            )


class _Work:
    """A simulation under way: every checkpoint, every chunk of sources."""

    def __init__(self, inputs: Inputs, memory: int | str | None, writer: Writer, bar: Progress) -> None:
        self.inputs, self.memory, self.writer, self.bar = inputs, memory, writer, bar
        self._reached = 0  # units of work that are behind, whoever did them

    def checkpoint(self, index: int, settings: Settings) -> Checkpoint:
        """Simulate and write one checkpoint."""
        if settings.weight == 0:
            return Checkpoint.planned(settings)
        state, files = self.inputs.state(index), CheckpointFiles(self.writer, index)
        hears = self.bar.advance, self.bar.announce
        engine = engines.at_checkpoint(self.inputs, index, state, self.memory, files, *hears)
        settled = self.writer.settled(index)
        if settled is None:
            engine.settle()
            checkpoint = replace(Checkpoint.planned(settings), decided=engine.choices, measured=engine.measured)
            self.writer.settle(index, checkpoint)
        else:
            engine.take_over(settled.choices, settled.measured)
        engine.warn(self.inputs.notices.add)
        basis = engine.prepare()
        self._reach(engine.shared_units(engine.plan, len(self.inputs.data)), fresh=settled is None)
        fit = engine.choices.rows_at_once
        if settled is not None and self.memory is not None:
            fit = refit(fit, engine.rows_that_fit(fit), self.memory)
        shards = list(self._shards(engine, files, state, fit))
        return replace(
            Checkpoint.planned(settings),
            decided=engine.choices,
            measured=summarise(engine, [shard.figures for shard in shards], self.inputs.notices.add),
            base=shards[0].base,
            imprints=tuple(shard.imprints for shard in shards),
            midpoints=tuple(shard.midpoints for shard in shards if shard.midpoints is not None),
            basis=basis,
            noise=shards[0].noise,
        )

    def _shards(self, engine: Engine, files: CheckpointFiles, state: Parameters, fit: int) -> "Iterator[_Shard]":
        """Simulate the sources file by file; those that an earlier run has finished are taken from it."""
        rows = engine.choices.rows_per_file
        for number, start in enumerate(range(0, len(self.inputs.sources), rows)):
            sources = self.inputs.sources.rows(start, start + rows)
            place = _Place(files, number, (start, start + len(sources)))
            shard = self._find(engine, place, state)
            found = shard is not None
            if shard is None:
                chunk, snapshots = self._simulate(engine, place, sources, fit)
                shard = self._write(place, state, chunk, check_rows(engine, sources, chunk))
                for snapshot in snapshots:
                    snapshot.clear()
            self._reach(engine.units(engine.plan, engine.work.settings, sources), fresh=not found)
            yield shard

    def _simulate(self, engine: Engine, place: "_Place", sources: Sources, fit: int) -> tuple[Chunk, list[Snapshot]]:
        """Simulate the sources of a file, so many at once; return also where their state was kept meanwhile."""
        chunks, snapshots = [], []
        for first in range(0, len(sources), fit):
            if path := self.writer.snapshot(place.files.folder):
                snapshots.append(Snapshot(path, place.rows[0] + first))
            begins = place.number == 0 and first == 0
            hooks = Hooks(self.bar.advance, self.bar.skip, snapshots[-1] if snapshots else None, begins)
            chunks.append(engine.simulate(engine.descent.with_sources(sources.rows(first, first + fit)), hooks))
        return engines.join(chunks), snapshots

    def _write(self, place: "_Place", state: Parameters, chunk: Chunk, figures: ShardFigures) -> "_Shard":
        """Write the imprints of a file. They come last: where they are, all of it is."""
        base = midpoints = noise = None
        if place.number == 0:
            base = place.files.write("base", self.inputs.without_fixed({**state, **chunk.base}))
            noise = place.files.write("noise", self._cast(chunk.noise)) if chunk.noise is not None else None
        if chunk.midpoints is not None:
            midpoints = place.files.write(place.name("midpoints"), self._cast(chunk.midpoints), place.rows)
        tensors = self._cast(chunk.imprints, chunk.exact)
        imprints = place.files.write(place.name("imprints"), tensors, place.rows, asdict(figures))
        return _Shard(imprints, figures, base, midpoints, noise)

    def _find(self, engine: Engine, place: "_Place", state: Parameters) -> "_Shard | None":
        """Find what an earlier run has left of a file of imprints, if it finished it."""
        count, keeps_pair = place.rows[1] - place.rows[0], self.inputs.plan.keep_pair
        base = midpoints = noise = None
        noise_rows = engine.choices.noise_rows if place.number == 0 else 0
        if noise_rows:
            stack = layout(engine.descent.start, noise_rows, engine.work.stored)
            noise = place.files.find("noise", None, stack, Value.mapping)
        if place.number == 0:
            whole = layout(self.inputs.without_fixed({**state, **engine.descent.start}))
            base = place.files.find("base", None, whole, Value.mapping)
        if keeps_pair:
            stack = layout(engine.descent.start, count, engine.work.stored)
            midpoints = place.files.find(place.name("midpoints"), place.rows, stack, Value.mapping)
        imprints = place.files.find(
            place.name("imprints"), place.rows, engine.layout(count), partial(read_figures, count=count)
        )
        if imprints is None or (place.number == 0) != bool(base) or keeps_pair != bool(midpoints):
            return None
        if bool(noise_rows) != bool(noise):
            return None
        return _Shard(*imprints, *(found[0] if found else None for found in (base, midpoints, noise)))

    def _reach(self, units: int, *, fresh: bool) -> None:
        """Bring the progress to where so much more work is behind."""
        self._reached += units
        if (left := self._reached - self.bar.done) > 0:
            (self.bar.advance if fresh else self.bar.skip)(left)

    def _cast(self, tensors: Parameters, exact: frozenset[str] = frozenset()) -> Parameters:
        stored = DTYPES[self.inputs.stored_as]
        return {name: t.to(coefficients_dtype(stored) if name in exact else stored) for name, t in tensors.items()}

    def probes(self, checkpoints: tuple[Checkpoint, ...]) -> Probes | None:
        """Keep a few training examples, with their losses where the first checkpoint is read out."""
        index = next(k for k, checkpoint in enumerate(checkpoints) if checkpoint.weight > 0)
        base = CheckpointFiles(self.writer, index).load("base", self.inputs.task.device)
        examples = self.writer.request.probes.examples
        batch = self.inputs.data.gather(torch.tensor(examples))
        at_base = self.inputs.task.at({**self.inputs.fixed, **base})
        return self.writer.probes(batch, evaluate_probes(*at_base, batch, len(examples)))


@dataclass(frozen=True)
class _Place:
    """Where a chunk of sources goes: the number of its file, and its rows."""

    files: CheckpointFiles
    number: int
    rows: tuple[int, int]

    def name(self, what: str) -> str:
        return f"{what}-{self.number:05}"


@dataclass(frozen=True)
class _Shard:
    """The files of one chunk of sources, and what was measured on it."""

    imprints: File
    figures: ShardFigures
    base: File | None
    midpoints: File | None
    noise: File | None
