"""Runs a plan: every checkpoint, every chunk of sources, into a store."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from imprint.data import Collate, Data
from imprint.errors import PlanError, TaskError
from imprint.fingerprint import of_data, of_sources, of_tensors, probe_examples, probe_losses
from imprint.memory import activation_bytes, budget, tensor_bytes
from imprint.progress import Advance, Progress
from imprint.simulation.curvature import Spectrum
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent, Simulated
from imprint.simulation.plan import Plan, Settings
from imprint.simulation.preflight import (
    check_device,
    own,
    refuse_loss,
    refuse_nonfinite,
    vectorises,
    warn_half_precision,
)
from imprint.simulation.step import settle, starting_curvature
from imprint.simulation.tangent import tangent
from imprint.simulation.trajectories import choose_epsilon, trajectories
from imprint.sources import Sources
from imprint.store import DTYPES, Checkpoint, File, Manifest, Probes, Store, describe
from imprint.task import Parameters, Task
from imprint.vectors import minus, norm
from imprint.writer import Writer

logger = logging.getLogger(__name__)

State = Mapping[str, Tensor] | str | os.PathLike[str]
_COPIES = 6  # vectors of one source alive at once in a step: response, its change, and the temporaries of both modes


@torch.inference_mode(False)
def simulate(
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | None = None,
    *,
    checkpoints: Sequence[State] | None = None,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 1024,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Store:
    """Simulate the imprint of every source and keep them in a store.

    data: the training data: a map-style dataset, or a tuple or mapping of tensors with one row per example.
    checkpoints: state dicts or .safetensors files; by default the model as it is.
    out: folder of the store; without it the store is temporary and vanishes with the returned object. A simulation
        that was killed goes on where it stood when the same call is made again; a finished one is returned.
    batch_size: how many examples are evaluated at once; memory and speed only (the plan has the mini-batch).
    device: where the data goes; it must be the model's device, which is the default.
    dtype: of the stored imprints: that of the parameters by default, bfloat16 to halve it.
    memory: what the simulation may use, in bytes or as "4GiB"; by default a share of what is free.
    progress: True for a line on standard error, False for none, or a function of (done, total).
    """
    plan = plan or Plan()
    check_device(task, device)
    training = Data(data, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    sources.check(len(training))
    states = _States(task, checkpoints)
    settings = [plan.at(k, len(states)) for k in range(len(states))]
    stored_as = _stored_dtype(task, dtype)
    warn_half_precision(task)
    total = sum(s.steps for s in settings if s.weight) * len(sources) * _sides(plan)
    with task.evaluating():
        request = _request(task, training, sources, plan, states, stored_as)
        writer = Writer(out, request)
        if writer.finished:
            return writer.finished
        bar = Progress("simulating", total, "source-steps", progress)
        try:
            prepared = _Prepared(task, training, sources, plan, memory, stored_as, writer, bar)
            done = tuple(prepared.checkpoint(k, setting, states) for k, setting in enumerate(settings))
            manifest = Manifest(
                n=len(training),
                dtype=stored_as,
                plan=plan,
                parameters=describe(task),
                fingerprints=request,
                sources=writer.sources(sources),
                probes=prepared.probes(done),
                checkpoints=done,
                execution={"device": str(task.device), "threads": torch.get_num_threads(), "batch_size": batch_size},
            )
            return writer.finish(manifest)
        except BaseException:
            if writer.stop():
                logger.warning("stopped: the same call again goes on where %s stands", writer.path)
            raise
        finally:
            bar.close()


def _request(task: Task, data: Data, sources: Sources, plan: Plan, states: "_States", stored_as: str) -> dict[str, Any]:
    """Everything the imprints depend on, as far as it can be known."""
    first = next(k for k in range(len(states)) if plan.at(k, len(states)).weight > 0)
    hashes: list[str] = []
    losses: list[float] = []
    for index in range(len(states)):
        state = states[index]
        hashes.append(of_tensors(state))
        if index == first:
            refuse_nonfinite(state, index, len(states))
            functional, theta = task.at(state)
            losses = own("loss function failed on a few examples", probe_losses, functional, theta, data)
    return {
        "n": len(data),
        "dtype": stored_as,
        "plan": plan.to_json(),
        "parameters": describe(task),
        "states": hashes,
        "sources": of_sources(sources),
        "data": of_data(data),
        "losses": losses,
    }


@dataclass(frozen=True)
class _Prepared:
    """What is the same for all checkpoints."""

    task: Task
    data: Data
    sources: Sources
    plan: Plan
    memory: int | str | None
    stored_as: str
    writer: Writer
    bar: Progress

    def checkpoint(self, index: int, settings: Settings, states: "_States") -> Checkpoint:
        """Simulate and write one checkpoint."""
        if settings.weight == 0:
            step = 0.0 if settings.lr == "auto" else settings.lr
            return Checkpoint(0.0, settings.steps, step, settings.damping, None, {})
        state = states[index]
        refuse_nonfinite(state, index, len(states))
        functional, theta = self.task.at(state)
        descent = Descent(
            functional,
            theta,
            self.data,
            self.sources,
            self.plan,
            settings.steps,
            lr=1.0,
            damping=settings.damping,
            on_step=self.bar.advance,
        )
        checkpoint = self.writer.settled(index)
        if checkpoint is None:
            checkpoint = self._settle(descent, settings, index)
            self.writer.settle(index, checkpoint)
        figures = checkpoint.figures
        descent = replace(
            descent,
            lr=checkpoint.lr,
            vectorise=figures["vectorised"],
            advice=_advice(Spectrum(*figures["curvature"]), checkpoint.lr, settings.damping),
        )
        return self._simulate(checkpoint, descent, state, f"checkpoint-{index:03}")

    def _settle(self, descent: Descent, settings: Settings, index: int) -> Checkpoint:
        """Decide what the plan leaves open: the step, ε, and how many sources are simulated at once."""
        first = next(descent.batches())
        refuse_loss(descent, first)
        descent = replace(descent, vectorise=vectorises(descent, self._trial))
        curvature = starting_curvature(descent)
        step, curvature = settle(descent, curvature) if settings.lr == "auto" else (settings.lr, curvature)
        stability = curvature.norm_of_step(step, settings.damping)
        descent = replace(descent, lr=step, advice=_advice(curvature, step, settings.damping))
        if stability > 1 + 1e-6:
            _warn_unstable(index, stability, curvature, step, settings.damping)
        epsilon, agreement = self._epsilon(descent)
        figures = {
            "curvature": [curvature.smallest, curvature.largest],
            "stability": stability,
            "vectorised": descent.vectorise,
            "rows_at_once": self._rows_at_once(descent, next(iter(first))),
        }
        if agreement:
            figures["epsilon_disagreement"] = agreement
        return Checkpoint(settings.weight, settings.steps, step, settings.damping, epsilon, figures)

    def _simulate(self, checkpoint: Checkpoint, descent: Descent, state: Parameters, folder: str) -> Checkpoint:
        shards: list[_Shard] = []
        rows = checkpoint.figures["rows_at_once"]
        for number, start in enumerate(range(0, len(self.sources), rows)):
            chunk = descent.with_sources(self.sources.rows(start, start + rows))
            shard = self._finished_shard(chunk, folder, number, start)
            if shard is None:
                shard = self._shard(checkpoint, chunk, state, folder, number, start)
            else:
                self.bar.advance(chunk.steps * len(chunk.sources) * _sides(self.plan))
            shards.append(shard)
        linearity = [value for shard in shards for value in shard.linearity]
        figures = {**checkpoint.figures, "drift": shards[0].drift}
        if linearity:
            figures["linearity"] = {"median": sorted(linearity)[len(linearity) // 2], "largest": max(linearity)}
        return replace(
            checkpoint,
            base=shards[0].base,
            imprints=tuple(shard.imprints for shard in shards),
            midpoints=tuple(shard.midpoints for shard in shards if shard.midpoints is not None),
            figures=figures,
        )

    def _shard(
        self, checkpoint: Checkpoint, chunk: Descent, state: Parameters, folder: str, number: int, start: int
    ) -> "_Shard":
        """Simulate a chunk of sources and write it. The imprints come last: where they are, all of it is."""
        snapshot = self.writer.snapshot(folder, start)
        result = _engine(replace(chunk, snapshot=snapshot), checkpoint.epsilon)
        span = (start, start + len(chunk.sources))
        base, midpoints = None, None
        drift = norm(minus(result.end, chunk.start)) / max(norm(chunk.start), 1e-300)
        if number == 0:
            base = self.writer.tensors(f"{folder}/base.safetensors", {**state, **result.base})
        if result.midpoints is not None:
            name = f"{folder}/midpoints-{number:05}.safetensors"
            midpoints = self.writer.tensors(name, self._cast(result.midpoints), span)
        about = {"linearity": result.linearity, "drift": drift}
        name = f"{folder}/imprints-{number:05}.safetensors"
        imprints = self.writer.tensors(name, self._cast(result.imprints), span, about)
        if snapshot is not None:
            snapshot.clear()
        return _Shard(imprints, result.linearity, drift, base, midpoints)

    def _finished_shard(self, chunk: Descent, folder: str, number: int, start: int) -> "_Shard | None":
        """What an earlier run has left of this chunk, if it finished it."""
        span = (start, start + len(chunk.sources))
        imprints = self.writer.done(f"{folder}/imprints-{number:05}.safetensors", span)
        if imprints is None:
            return None
        base = self.writer.done(f"{folder}/base.safetensors") if number == 0 else None
        midpoints = self.writer.done(f"{folder}/midpoints-{number:05}.safetensors", span)
        file, about = imprints
        return _Shard(
            file, about["linearity"], about["drift"], base[0] if base else None, midpoints[0] if midpoints else None
        )

    def probes(self, checkpoints: tuple[Checkpoint, ...]) -> Probes | None:
        """Keep a few training examples, with their losses where the first checkpoint is read out."""
        index = next(k for k, checkpoint in enumerate(checkpoints) if checkpoint.weight > 0)
        base = load_file(self.writer.path / f"checkpoint-{index:03}" / "base.safetensors", str(self.task.device))
        losses = probe_losses(*self.task.at(base), self.data)
        return self.writer.probes(self.data.gather(probe_examples(len(self.data))), losses)

    def _cast(self, tensors: Parameters) -> Parameters:
        return {name: tensor.to(DTYPES[self.stored_as]) for name, tensor in tensors.items()}

    def _trial(self, descent: Descent) -> Simulated:
        return _engine(descent, None if self.plan.engine == "tangent" else 1.0)

    def _epsilon(self, descent: Descent) -> tuple[float | None, dict[str, float]]:
        if self.plan.engine == "tangent":
            return None, {}
        return choose_epsilon(descent) if self.plan.epsilon == "auto" else (float(self.plan.epsilon), {})

    def _rows_at_once(self, descent: Descent, part: Weighted) -> int:
        """How many sources fit the memory budget together."""
        activations = activation_bytes(lambda: descent.task.losses(descent.start, part.batch, len(part)))
        each = _COPIES * (tensor_bytes(descent.start) + (activations if descent.vectorise else 0))
        each += len(self.data) * descent.dtype.itemsize  # its row of example weights
        rows = budget(self.memory, self.task.device) // (each * _sides(self.plan))
        if rows < 1:
            logger.warning("one source needs about %d bytes, more than the memory budget: going on one by one", each)
        return int(max(1, min(rows, len(self.sources))))


@dataclass(frozen=True)
class _Shard:
    """The files of one chunk of sources, and what was measured on it."""

    imprints: File
    linearity: list[float]
    drift: float
    base: File | None
    midpoints: File | None


class _States:
    """The checkpoints as complete states on the model's device, each read when it is its turn."""

    def __init__(self, task: Task, checkpoints: Sequence[State] | None) -> None:
        if isinstance(checkpoints, Mapping | str | os.PathLike):
            raise PlanError("checkpoints must be a list: for one checkpoint, give a list of one.")
        if checkpoints is not None and len(checkpoints) == 0:
            raise PlanError("checkpoints is empty: leave it out to take the model as it is.")
        self._task = task
        self._checkpoints: Sequence[State] = checkpoints if checkpoints is not None else [task.state()]

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __getitem__(self, index: int) -> Parameters:
        given = self._checkpoints[index]
        if isinstance(given, str | os.PathLike):
            if not Path(given).is_file():
                raise TaskError(f"checkpoint file {given} does not exist.")
            try:
                given = load_file(given)
            except (OSError, SafetensorError) as error:
                raise TaskError(f"checkpoint file {given} cannot be read as safetensors: {error}") from error
        return self._task.complete(given)


def _engine(descent: Descent, epsilon: float | None) -> Simulated:
    return tangent(descent) if epsilon is None else trajectories(descent, epsilon)


def _sides(plan: Plan) -> int:
    """How many trajectories a source has."""
    return 2 if plan.engine == "trajectories" and plan.variant == "two_sided" else 1


def _stored_dtype(task: Task, dtype: torch.dtype | None) -> str:
    if dtype is None:
        widest = max((task.model.get_parameter(name).dtype for name in task.names), key=lambda d: d.itemsize)
        dtype = widest if widest in (torch.float32, torch.float64) else torch.float32
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise PlanError(f"imprints can be stored as {', '.join(DTYPES)}, not as {dtype}.")


def _advice(curvature: Spectrum, lr: float, damping: float) -> str:
    sharpest = max(curvature.largest, -curvature.smallest)
    holds = f" A step below {2 / (sharpest + damping):.2g} holds;" if sharpest + damping > 0 else ""
    return (
        f"The step is lr={lr:.3g} and the measured curvature runs from {curvature.smallest:.3g} to "
        f'{curvature.largest:.3g}.{holds} lr="auto" chooses one; fewer steps or some damping help where curvature is '
        "negative."
    )


def _warn_unstable(index: int, stability: float, curvature: Spectrum, lr: float, damping: float) -> None:
    if lr * (curvature.largest + damping) > 2:
        warnings.warn(
            f"checkpoint {index}: ‖I − ηH‖ is {stability:.3g} at lr={lr:.3g}, above 1 (curvature up to "
            f"{curvature.largest:.3g}): the descent may diverge; "
            f"lr={1 / (curvature.largest + damping):.2g} would be safe.",
            stacklevel=7,
        )
    else:
        logger.info(
            "checkpoint %d: ‖I − ηH‖ is %.3g, from negative curvature %.3g", index, stability, curvature.smallest
        )
