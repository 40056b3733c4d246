"""Runs a plan: every checkpoint, every chunk of sources, into a store."""

import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from imprint.data import Collate, HashData
from imprint.errors import StoreError, first_line
from imprint.plan import Plan, Settings, State
from imprint.runtime.memory import Peak
from imprint.runtime.progress import Advance, Progress
from imprint.runtime.turns import settle_child
from imprint.simulation.choices import check_choices
from imprint.simulation.curvature import Spectrum
from imprint.simulation.descent import Descent, joined
from imprint.simulation.engines import sides, simulated
from imprint.simulation.frozen import PASSES, Spectral
from imprint.simulation.guards import outweighing, too_long
from imprint.simulation.inputs import Inputs
from imprint.simulation.settling import advised, fit_batches, refitted, rows_at_once, settled
from imprint.simulation.snapshot import Snapshot
from imprint.sources import Sources
from imprint.store.checkpoint import Decided, Spread
from imprint.store.fingerprint import how_hashed, partly_hashed
from imprint.store.manifest import MANIFEST
from imprint.store.probing import see
from imprint.store.reading import DTYPES, FINGERPRINTS, LONGEST, Checkpoint, File, Manifest, Probes, Store, describe
from imprint.store.tensorfile import layout
from imprint.store.values import Value, parsed
from imprint.store.writing import Writer, compared_data, difference
from imprint.task import Parameters, Task
from imprint.tensors.vectors import minus, norm, row_norms, scale, six_digits

logger = logging.getLogger(__name__)


@torch.inference_mode(False)
def simulate(
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None = None,
    *,
    checkpoints: Sequence[State] | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int | None = None,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory: int | str | None = None,
    replay: Store | str | os.PathLike[str] | None = None,
    hash_data: HashData = "all",
    note: Any = None,
    progress: bool | Advance = True,
) -> Store:
    """Simulate the imprint of every source and keep them in a store.

    plan: how; "auto" lets `Plan.auto` choose from curvature and gradients at the checkpoints.
    data: the training data: a map-style dataset, or a tuple or mapping of tensors with one row per example.
    checkpoints: state dicts or .safetensors files; by default the model as it is. A pair (checkpoint, moments) brings
        Adam's second moments for a plan with that preconditioner, as a dict by parameter or a .safetensors file; those
        that a `Recorder` has kept beside a file are found without being named.
    out: folder of the store; without it the store is temporary and vanishes with the returned object. A simulation
        that was killed goes on where it stood when the same call is made again; a finished one is returned.
    batch_size: how many examples are evaluated at once, by default 1,024, on a GPU 8,192; memory and speed only (the
        plan has the mini-batch), but for the draw of dropout along the path.
    device: where the data goes; it must be the model's device, which is the default.
    dtype: of the stored imprints: that of the parameters by default, bfloat16 to halve it.
    memory: what the simulation may use, in bytes or as "4GiB"; by default a share of what is free.
    replay: a store, or its folder, to make again: other inputs than it was made from are refused, and what its
        simulation had to decide (step sizes, ε, chunk and batch sizes) is taken from it, so that on the same device
        with as many threads the imprints come out the same to the bit.
    hash_data: how the data is hashed, by which changed data is refused later. "sampled" hashes 1,024 examples, for data
        that is too large or slow to read once more; "none" takes data that is another one at each reading, such as
        randomly augmented images. Both are kept as a warning, and every later comparison says so.
    note: anything worth keeping with the store, as JSON values: it goes into the manifest.
    progress: True for a line on standard error, False for none, or a function of (done, total).
    """
    settle_child()
    if replay is not None:
        replay = Store.of(replay)
        plan = replay.manifest.plan if plan is None else plan
        batch_size = replay.manifest.execution.get("batch_size") if batch_size is None else batch_size
    if plan == "auto":
        given = (task, data, sources, checkpoints)
        plan = Plan.auto(*given, batch_size=batch_size, collate_fn=collate_fn, hash_data=hash_data, progress=progress)
    inputs = Inputs.checked(
        task,
        data,
        sources,
        plan,
        checkpoints,
        batch_size=batch_size,
        collate_fn=collate_fn,
        device=device,
        dtype=dtype,
        hash_data=hash_data,
    )
    _refuse_note(note)
    started, peak = time.monotonic(), Peak(task.device)
    with task.evaluating():
        if batch_size is None:
            fit_batches(inputs, memory)
        request = inputs.request()
        writer = Writer(out, request, inputs.seen, check_choices)
        if writer.finished:
            return writer.finished
        if told := partly_hashed(how_hashed(writer.request["data"]), len(inputs.data)):
            inputs.notices.add(told)  # of what is resumed, too
        resumed = writer.settled(inputs.first) is not None
        bar = Progress("simulating", *_work(inputs), progress)
        try:
            inputs.examine()
            if replay is not None:
                _take_over(replay, request, writer, inputs)
            run = _Run(inputs, memory, writer, bar)
            done = tuple(run.checkpoint(index, settings) for index, settings in enumerate(inputs.settings))
            inputs.notice(outweighing([c.weight for c in done], [c.measured.norms for c in done]))
            manifest = Manifest(
                n=len(inputs.data),
                dtype=inputs.stored_as,
                plan=inputs.plan,
                parameters=describe(task),
                fixed=request["fixed"],
                fingerprints={name: writer.request[name] for name in FINGERPRINTS},
                sources=writer.sources(sources),
                probes=run.probes(done),
                checkpoints=done,
                execution={
                    "device": str(task.device),
                    "threads": torch.get_num_threads(),
                    "batch_size": inputs.data.batch_size,
                },
                cost={"seconds": time.monotonic() - started, "peak_bytes": peak.bytes, "resumed": resumed},
                note=note,
                warnings=inputs.notices.messages,
            )
            return writer.finish(manifest)
        except BaseException as error:
            by_key = isinstance(error, KeyboardInterrupt) or "RuntimeError: KeyboardInterrupt" in str(error)
            if writer.stop(by_key or not isinstance(error, Exception)):  # such as SystemExit, from a signal's handler
                logger.warning("stopped: the same call again goes on where %s stands", writer.path)
            if by_key:  # within its own code torch makes a RuntimeError of it
                raise KeyboardInterrupt from error
            raise
        finally:
            bar.close()


def _work(inputs: Inputs) -> tuple[int, str]:
    """How much there is to do, and in what."""
    used = [settings for settings in inputs.settings if settings.weight > 0]
    if inputs.plan.engine == "spectral":
        one = PASSES * len(inputs.data) * inputs.plan.directions + sum(inputs.sources.sizes)
        return one * len(used), "example gradients"
    return len(inputs.sources) * sides(inputs.plan) * sum(settings.path for settings in used), "source-steps"


def _refuse_note(note: Any) -> None:
    """A note that cannot be written is refused before the work, not after it."""
    try:
        text = json.dumps(note, allow_nan=False)
        parsed(text.encode(), Path("note"))
        if len(text) > LONGEST // 2:
            raise ValueError(f"it has {len(text):,} characters, and at most {LONGEST // 2:,} fit a manifest")
    except (TypeError, ValueError, RecursionError, StoreError) as error:
        raise StoreError(f"note must be made of JSON values: {first_line(error)}.") from error


def _take_over(replay: Store, request: dict[str, Any], writer: Writer, inputs: Inputs) -> None:
    """Settle every checkpoint as an earlier simulation of the same did."""
    before = {**replay.manifest.request, "fixed": request["fixed"]}  # which does not change what is simulated
    if different := difference(before, request, inputs.seen):
        raise StoreError(f"{replay.path} cannot be replayed: {different}.")
    compared_data(before, request).warn()
    for index, checkpoint in enumerate(replay.checkpoints):
        found = writer.settled(index)
        if checkpoint.weight == 0:
            continue
        plain = parsed(json.dumps(asdict(checkpoint)).encode(), replay.path / MANIFEST)
        check_choices(checkpoint, index, before, replace(plain, field=f"checkpoints[{index}]"))
        if found is None:
            writer.settle(index, replace(checkpoint, base=None, imprints=(), midpoints=(), basis=None))
        elif _choices(found) != _choices(checkpoint):
            raise StoreError(
                f"{writer.path} holds an unfinished simulation that chose other steps than {replay.path}: give another "
                "folder."
            )


def _choices(checkpoint: Checkpoint) -> Decided:
    return checkpoint.choices


@dataclass(frozen=True)
class _Run:
    """A simulation under way."""

    inputs: Inputs
    memory: int | str | None
    writer: Writer
    bar: Progress

    def checkpoint(self, index: int, settings: Settings) -> Checkpoint:
        """Simulate and write one checkpoint."""
        if settings.weight == 0:
            return Checkpoint.planned(settings)
        if self.inputs.plan.engine == "spectral":
            skip, advance = self.bar.skip, self.bar.advance
            return Spectral(self.inputs, index, self.writer, self.memory, advance, skip).checkpoint()
        state = self.inputs.state(index)
        descent = self.inputs.descent(index, state, self.bar.advance)
        checkpoint = self.writer.settled(index)
        fresh = checkpoint is None
        if checkpoint is None:
            checkpoint = settled(descent, settings, index, self.memory)
            self.writer.settle(index, checkpoint)
        decided = checkpoint.choices
        assert checkpoint.measured.curvature is not None
        momentum, curvature = self.inputs.plan.momentum, Spectrum(*checkpoint.measured.curvature)
        self.inputs.notice(too_long(index, decided.lr, descent.shift, momentum, curvature))
        descent = replace(descent, on_skip=self.bar.skip, lr=decided.lr, vectorise=decided.vectorised)
        descent = advised(descent, curvature)
        fit = decided.rows_at_once
        if not fresh and self.memory is not None:
            fit = refitted(fit, rows_at_once(descent, self.memory, decided.epsilon, fit), self.memory)
        return self._simulate(checkpoint, descent, state, f"checkpoint-{index:03}", fit)

    def _simulate(
        self, checkpoint: Checkpoint, descent: Descent, state: Parameters, folder: str, fit: int
    ) -> Checkpoint:
        shards: list[_Shard] = []
        rows = checkpoint.choices.rows_per_file
        for number, start in enumerate(range(0, len(self.inputs.sources), rows)):
            chunk = descent.with_sources(self.inputs.sources.rows(start, start + rows))
            shard = self._finished_shard(chunk, state, folder, number, start)
            if shard is None:
                shard = self._shard(checkpoint, chunk, state, folder, number, start, fit)
            else:
                self.bar.skip(chunk.steps * len(chunk.sources) * sides(self.inputs.plan))
            shards.append(shard)
        linearity = [value for shard in shards for value in shard.linearity]
        measured = replace(
            checkpoint.measured,
            drift=shards[0].drift,
            norms=Spread.of([value for shard in shards for value in shard.norms]),
            linearity=Spread.of(linearity) if linearity else None,
        )
        return replace(
            checkpoint,
            base=shards[0].base,
            imprints=tuple(shard.imprints for shard in shards),
            midpoints=tuple(shard.midpoints for shard in shards if shard.midpoints is not None),
            measured=measured,
        )

    def _shard(
        self, checkpoint: Checkpoint, chunk: Descent, state: Parameters, folder: str, number: int, start: int, fit: int
    ) -> "_Shard":
        """Simulate a chunk of sources and write it. The imprints come last: where they are, all of it is."""
        parts = []
        for first in range(0, len(chunk.sources), fit):
            place = self.writer.snapshot(folder)
            snapshot = None if place is None else Snapshot(place, start + first)
            part = replace(chunk.with_sources(chunk.sources.rows(first, first + fit)), snapshot=snapshot)
            parts.append(simulated(part, checkpoint.choices.epsilon))
        result = joined(parts)
        span = (start, start + len(chunk.sources))
        base, midpoints = None, None
        if number == 0:
            kept = self.inputs.without_fixed({**state, **result.base})
            base = self.writer.tensors(f"{folder}/base.safetensors", kept)
        if result.midpoints is not None:
            name = f"{folder}/midpoints-{number:05}.safetensors"
            midpoints = self.writer.tensors(name, self._cast(result.midpoints), span)
        # six digits: the last ones depend on where tensors lie in memory, and a resumed store is the same to the bit
        norms = six_digits(row_norms(result.imprints).tolist())
        linearity = six_digits(result.linearity)
        (drift,) = six_digits([norm(minus(result.end, chunk.start)) / scale(chunk.start, chunk.task)])
        about = {"linearity": linearity, "norms": norms, "drift": drift}
        name = f"{folder}/imprints-{number:05}.safetensors"
        imprints = self.writer.tensors(name, self._cast(result.imprints), span, about)
        if snapshot is not None:
            snapshot.clear()
        return _Shard(imprints, linearity, norms, drift, base, midpoints)

    def _finished_shard(
        self, chunk: Descent, state: Parameters, folder: str, number: int, start: int
    ) -> "_Shard | None":
        """What an earlier run has left of this chunk, if it finished it."""
        rows = len(chunk.sources)
        span, stack = (start, start + rows), layout(chunk.start, rows, DTYPES[self.inputs.stored_as])
        base = midpoints = None
        if number == 0:
            whole = layout(self.inputs.without_fixed({**state, **chunk.start}))
            base = self.writer.done(f"{folder}/base.safetensors", None, whole, Value.mapping)
        if self.inputs.plan.keep_pair:
            midpoints = self.writer.done(f"{folder}/midpoints-{number:05}.safetensors", span, stack, Value.mapping)
        name = f"{folder}/imprints-{number:05}.safetensors"
        imprints = self.writer.done(name, span, stack, lambda about: _measured(about, rows))
        if imprints is None or (number == 0) != bool(base) or self.inputs.plan.keep_pair != bool(midpoints):
            return None
        file, (linearity, norms, drift) = imprints
        return _Shard(file, linearity, norms, drift, base[0] if base else None, midpoints[0] if midpoints else None)

    def probes(self, checkpoints: tuple[Checkpoint, ...]) -> Probes | None:
        """Keep a few training examples, with their losses where the first checkpoint is read out."""
        index = next(k for k, checkpoint in enumerate(checkpoints) if checkpoint.weight > 0)
        base = self.writer.read(f"checkpoint-{index:03}/base.safetensors", self.inputs.task.device)
        examples = self.writer.request["probes"]["examples"]
        batch = self.inputs.data.gather(torch.tensor(examples))
        return self.writer.probes(batch, see(*self.inputs.task.at({**self.inputs.fixed, **base}), batch, len(examples)))

    def _cast(self, tensors: Parameters) -> Parameters:
        return {name: tensor.to(DTYPES[self.inputs.stored_as]) for name, tensor in tensors.items()}


def _measured(about: Value, rows: int) -> tuple[list[float], list[float], float]:
    """What the file of a chunk of so many sources says was measured on it."""
    values = about.record("linearity", "norms", "drift")
    linearity, norms = (list(values[name].numbers()) for name in ("linearity", "norms"))
    if len(norms) != rows or len(linearity) not in (0, rows):
        about.fail(f"norms and linearity must be of {rows} sources")
    return linearity, norms, values["drift"].number()


@dataclass(frozen=True)
class _Shard:
    """The files of one chunk of sources, and what was measured on it."""

    imprints: File
    linearity: list[float]
    norms: list[float]
    drift: float
    base: File | None
    midpoints: File | None
