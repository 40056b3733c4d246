"""Runs the spectral engine at a checkpoint: the curvature first, then the sources, shard by shard, into the store."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from imprint.errors import ImprintError, SimulationError, TaskError, first_line
from imprint.plan import Settings
from imprint.runtime.memory import budget, tensor_bytes
from imprint.simulation.curvature import Spectrum, curvature_product
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.inputs import Inputs
from imprint.simulation.preflight import refuse_loss, why_not_together
from imprint.simulation.settling import refitted
from imprint.simulation.spectral import Frozen, freeze, imprints, projected, refuse_unstable
from imprint.store.checkpoint import Checkpoint, Decided, File, Measured, Spread
from imprint.store.reading import DTYPES, coefficients_dtype
from imprint.store.tensorfile import layout
from imprint.store.values import Value
from imprint.store.writing import Writer
from imprint.task import Parameters
from imprint.tensors.rows import MULTIPLIED, Rows, along, factorable, gradients, orthonormal, parameters_of
from imprint.tensors.vectors import Flat, six_digits

logger = logging.getLogger(__name__)
PASSES = 3  # over the data, in units of a gradient of every example, that a product with the curvature takes
COPIES = 5  # of the numbers of a source that are alive at once: its gradient, its imprint, and what is written
_SHARD = 4096  # sources in one file at most
_FILE = 256, 64 << 20  # sources or bytes that a file has at least, however few sources are in memory at once
_BESIDE = 4  # the part of the size of the basis that sources may take where the budget leaves them less
_ROUNDING = 1e-5  # a share of squared lengths that rounding may make
_TRIED = 32  # examples on which factors are tried


@dataclass(frozen=True)
class Spectral:
    """The spectral engine at one checkpoint: all that a run of it needs."""

    inputs: Inputs
    index: int
    writer: Writer
    memory: int | str | None
    on_work: Callable[[int], None]
    on_skip: Callable[[int], None]

    @property
    def settings(self) -> Settings:
        return self.inputs.settings[self.index]

    @property
    def _stored(self) -> torch.dtype:
        return DTYPES[self.inputs.stored_as]

    @property
    def folder(self) -> str:
        return f"checkpoint-{self.index:03}"

    def checkpoint(self) -> Checkpoint:
        """Simulate and write the checkpoint."""
        state = self.inputs.state(self.index)
        descent = self.inputs.descent(self.index, state)
        settled = self.writer.settled(self.index)
        if settled is None:
            descent, alone = together_or_alone(descent)
            frozen = self._frozen(descent)
            settled = self._settle(descent, frozen, alone)
            self.writer.settle(self.index, settled)
            fit = settled.choices.rows_at_once
        else:
            descent = replace(descent, vectorise=settled.choices.vectorised)
            frozen = self._left(descent, settled) or self._frozen(descent)
            fit = self._fit(descent, frozen, settled)
        base = self._kept("base", self.inputs.without_fixed(state))
        frozen, basis, turn = self._keep(descent, frozen, settled)
        files, norms, whole = self._shards(descent, frozen, turn, settled, fit)
        return replace(
            settled,
            base=base,
            basis=basis if self._on_basis(settled) else None,
            imprints=tuple(files),
            measured=replace(
                settled.measured,
                rest=frozen.rest,
                share=frozen.share,
                drift=0.0,
                norms=Spread.of(norms),
                lost=self._lost(norms, whole, len(frozen.values)) if self._projected else None,
            ),
        )

    def _on_basis(self, settled: Checkpoint) -> bool:
        """Whether imprints are kept as combinations of the basis, with factors beside them or without."""
        return bool(settled.choices.layers) or self._projected

    @property
    def _projected(self) -> bool:
        return self.inputs.plan.form == "projected"

    def _lost(self, norms: list[float], whole: list[float], directions: int) -> float:
        """Return the share of their squared length that imprints lost by projection."""
        kept, before = (sum(length**2 for length in lengths) for lengths in (norms, whole))
        lost = max(1 - kept / before, 0.0) if before else 0.0
        if lost > _ROUNDING:
            logger.warning(
                "checkpoint %d: on %d directions imprints lose %.2g of their squared length",
                *(self.index, directions, lost),
            )
        return float(f"{lost:.4g}")

    def _keep(self, descent: Descent, frozen: Frozen, settled: Checkpoint) -> tuple[Frozen, File, torch.Tensor | None]:
        """Write the curvature, so that a killed run need not measure it again; what is read later is what counts now.

        A basis that is rounded is orthonormal no more: imprints are found on the one nearest to it that is, and its
        matrix leads their coefficients to what is kept. Imprints that are kept in full do without the basis: then the
        file goes when the store is complete.
        """
        about = {"values": frozen.values.tolist(), "rest": frozen.rest, "share": frozen.share}
        kept = self._cast(frozen.basis) if self._on_basis(settled) else frozen.basis
        basis = {name: tensor.to(descent.dtype).contiguous() for name, tensor in kept.items()}
        file, turn = self._kept(self._basis(settled), kept, about), None
        if self._on_basis(settled) and self._rounds(descent):
            basis, turn = orthonormal(basis)
        return replace(frozen, basis=basis), file, turn

    def _rounds(self, descent: Descent) -> bool:
        """Whether the store keeps fewer digits than the parameters have."""
        return self._stored.itemsize < descent.dtype.itemsize

    def _left(self, descent: Descent, settled: Checkpoint) -> Frozen | None:
        """The curvature as an earlier run has left it."""
        name, directions = f"{self.folder}/{self._basis(settled)}.safetensors", settled.choices.directions or 0
        stack = layout(descent.start, directions, self._stored if self._on_basis(settled) else None)
        done = self.writer.done(name, None, stack, lambda about: _curvature(about, directions))
        if done is None:
            return None
        self.on_skip(PASSES * len(self.inputs.data) * self.inputs.plan.directions)
        (values, rest, share), found = done[1], self.writer.read(name, descent.data.device)
        # copied to where tensors lie as they do when fresh: products of others differ in the last bits
        basis = {name: found[name].to(descent.dtype, copy=True) for name in descent.start}
        return Frozen(torch.tensor(values, dtype=torch.float64), basis, rest, share)

    def _frozen(self, descent: Descent) -> Frozen:
        """The curvature, measured."""
        work = PASSES * len(self.inputs.data)
        frozen = freeze(
            descent.task,
            descent.start,
            FullBatch(descent.data, descent.dtype),
            self.inputs.plan.seen_curvature,
            self.inputs.plan.directions,
            on_product=lambda products: self.on_work(products * work),
        )
        self.on_skip((self.inputs.plan.directions - len(frozen.values)) * work)
        return frozen

    def _settle(self, descent: Descent, frozen: Frozen, alone: str | None) -> Checkpoint:
        """How the sources are simulated, with the figures that decided it."""
        settings = self.settings
        curvature = Spectrum(frozen.smallest, frozen.largest)
        step = curvature.step(settings.damping) if settings.lr == "auto" else settings.lr
        refuse_unstable(frozen, settings, step, self.index)
        layers = layers_of(descent)
        if self.index == self.inputs.first:
            warn_of_memory(descent, len(frozen.values), self.memory)
        decided = Decided(
            step,
            rows_at_once(descent, len(frozen.values), layers, self.memory),
            rows_in_memory(descent, len(frozen.values), layers, self.memory),
            descent.vectorise,
            directions=len(frozen.values),
            layers=layers,
        )
        measured = Measured(
            curvature=(curvature.smallest, curvature.largest),
            stability=curvature.growth(step, settings.damping),
            one_by_one=alone,
            rest=frozen.rest,
            share=frozen.share,
        )
        return replace(Checkpoint.planned(settings), decided=decided, measured=measured)

    def _fit(self, descent: Descent, frozen: Frozen, settled: Checkpoint) -> int:
        rows = settled.choices.rows_at_once
        if self.memory is None:
            return rows
        return refitted(
            rows, rows_in_memory(descent, len(frozen.values), settled.choices.layers, self.memory), self.memory
        )

    def _shards(
        self, descent: Descent, frozen: Frozen, turn: torch.Tensor | None, settled: Checkpoint, fit: int
    ) -> tuple[list[File], list[float], list[float]]:
        """The files of all sources, of which `fit` are in memory at once; how long imprints are, and were in full."""
        files: list[File] = []
        norms: list[float] = []
        whole: list[float] = []
        rows = settled.choices.rows_per_file
        for number, start in enumerate(range(0, len(self.inputs.sources), rows)):
            chunk = self.inputs.sources.rows(start, start + rows)
            name, span = f"{self.folder}/imprints-{number:05}.safetensors", (start, start + len(chunk))
            done = self.writer.done(name, span, None, partial(_lengths, count=len(chunk)))
            if done is not None:
                self.on_skip(sum(chunk.sizes))
                files.append(done[0])
                norms += done[1][0]
                whole += done[1][1]
                continue
            pieces = [chunk.rows(first, first + fit) for first in range(0, len(chunk), fit)]
            parts = [self._imprints(descent.with_sources(piece), frozen, turn, settled) for piece in pieces]
            tensors = parts[0][0]
            if len(parts) > 1:
                tensors = {key: torch.cat([part[key] for part, _, _ in parts]) for key in tensors}
            lengths = [length for _, lengths, _ in parts for length in lengths]
            before = [length for _, _, before in parts for length in before]
            about = {"norms": lengths, **({"whole": before} if self._projected else {})}
            files.append(self.writer.tensors(name, tensors, span, about))
            norms += lengths
            whole += before
            self.on_work(sum(chunk.sizes))
        return files, norms, whole

    def _imprints(
        self, descent: Descent, frozen: Frozen, turn: torch.Tensor | None, settled: Checkpoint
    ) -> tuple[Parameters, list[float], list[float]]:
        """The tensors that keep the imprints of some sources; how long each is, and was before it was projected."""
        slopes = source_gradients(descent, settled.choices.layers)
        outside = frozen.outside(self.settings, settled.choices.lr)
        if turn is not None and not self._projected and outside:
            # what lies along sharp directions cancels between factors and coefficients: the rounded ones must agree
            slopes = slopes.rounded(self._stored, -outside)
        seen = along(slopes, frozen.basis)
        found, whole = imprints(frozen, slopes, seen, self.settings, settled.choices.lr)
        lengths = whole
        if self._projected:
            found, lengths = projected(frozen, seen, self.settings, settled.choices.lr)
        if turn is not None and found.coefficients is not None:
            found = replace(found, coefficients=found.coefficients @ turn)
        tensors = self._cast(found.tensors() if self._on_basis(settled) else found.multiplied_out(descent.start))
        if settled.choices.layers and not self._projected and found.coefficients is not None:
            tensors["coefficients"] = found.coefficients.to(coefficients_dtype(self._stored))
        for identity, length in zip(descent.sources.ids, whole.tolist(), strict=True):
            if not math.isfinite(length):
                raise SimulationError(
                    f"the imprint of source {identity!r} is not finite: its gradient is not, or its response has "
                    f"grown beyond all numbers where curvature is negative (down to {frozen.smallest:.3g}). Take "
                    "fewer steps, or some damping."
                )
        # six digits, as of the path engines: the last ones depend on where tensors lie in memory
        return tensors, six_digits(lengths.tolist()), six_digits(whole.tolist())

    def _kept(self, kind: str, tensors: Parameters, about: dict[str, Any] | None = None) -> File:
        """A file of this checkpoint, as an earlier run has left it or written now."""
        name = f"{self.folder}/{kind}.safetensors"
        done = self.writer.done(name, None, layout(tensors), Value.mapping)
        return done[0] if done else self.writer.tensors(name, tensors, about=about)

    def _cast(self, tensors: Parameters) -> Parameters:
        return {name: tensor.to(self._stored) for name, tensor in tensors.items()}

    def _basis(self, settled: Checkpoint) -> str:
        """The name of the file with the curvature: a part of the store, or one that goes when it is complete."""
        return "basis" if self._on_basis(settled) else "snapshot"


def _curvature(about: Value, directions: int) -> tuple[tuple[float, ...], float, float]:
    """What the file of a basis says: the curvatures along its directions, that of the rest, and its share."""
    known = about.record("values", "rest", "share")
    if len(values := known["values"].numbers()) != directions:
        known["values"].refuse(f"{directions} curvatures, one for each direction")
    return values, known["rest"].number(), known["share"].number()


def _lengths(about: Value, count: int) -> tuple[list[float], list[float]]:
    """What the file of so many sources says: how long their imprints are, and were before they were projected."""
    known = about.mapping()
    norms = known.get("norms", Value(None, about.file, "norms"))
    found = list(norms.numbers()), list(known.get("whole", norms).numbers())
    if {len(lengths) for lengths in found} != {count}:
        norms.refuse(f"{count} lengths, one for each source")
    return found


def together_or_alone(descent: Descent) -> tuple[Descent, str | None]:
    """The descent for many sources at once if `vmap` takes the model; otherwise one by one, and the reason."""
    refuse_mixed(descent.start)
    refuse_loss(descent, FullBatch(descent.data, descent.dtype))
    batch = [next(iter(FullBatch(descent.data, descent.dtype)))]

    def attempt(trial: Descent) -> None:
        product = curvature_product(trial.task, trial.start, batch, trial.plan.seen_curvature)
        product(Flat(trial.start).vector(trial.start))
        trial.source_gradients(trial.start, 0, per_row=False)

    reason = why_not_together(descent, attempt)
    return replace(descent, vectorise=reason is None), reason


def refuse_mixed(theta: Parameters) -> None:
    """Refuse parameters that do not make one vector."""
    (first, one), *others = theta.items()
    for name, other in others:
        if other.dtype != one.dtype:
            raise TaskError(
                f"parameter {first!r} is {one.dtype} and {name!r} is {other.dtype}: the spectral engine takes selected "
                'parameters of one dtype. Convert the model, select fewer, or take engine="tangent".'
            )


def layers_of(descent: Descent) -> tuple[str, ...]:
    """The linear layers whose parts of an imprint are kept as products; none where imprints are kept in full.

    That is where the plan says so, where sources are groups, and where it fails (logged).
    """
    if descent.plan.form != "factored" or max(descent.sources.sizes) > 1:
        return ()
    some, two = (torch.arange(min(count, descent.n)) for count in (_TRIED, 2))
    try:
        found = factorable(descent.task, descent.start, descent.data.gather(some), len(some))
        gradients(descent.task.losses, descent.start, descent.data.gather(two), len(two), descent.task.task, found)
    except (ImprintError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        logger.warning(
            "gradients of single examples cannot be taken apart, imprints are kept in full: %s", first_line(error)
        )
        return ()
    return found


def source_gradients(descent: Descent, layers: tuple[str, ...]) -> Rows:
    """∇ℓ_b of each source; in factors where there are `layers`, which takes sources of one example each."""
    if not layers:
        return Rows({}, {}, descent.source_gradients(descent.start, 0, per_row=False))
    examples = torch.tensor([int(members[0]) for members in descent.sources.members])
    task = descent.task
    parts = [
        gradients(task.losses, descent.start, descent.data.gather(piece), len(piece), task.task, layers)
        for piece in torch.split(examples, descent.data.batch_size)
    ]
    return Rows.joined(parts)


def values_of_a_row(descent: Descent, directions: int, layers: tuple[str, ...]) -> int:
    """How many numbers keep the imprint of a source, or make it where it is projected afterwards."""
    covered = {name for layer in layers for name in parameters_of(layer)}
    factors = sum(sum(descent.start[parameters_of(layer)[0]].shape) for layer in layers)
    dense = sum(p.numel() for name, p in descent.start.items() if name not in covered)
    return factors + dense + (directions if layers else 0)


def rows_at_once(descent: Descent, directions: int, layers: tuple[str, ...], memory: int | str | None) -> int:
    """How many sources are in one file: those in memory at once, or more, so that files are not too many."""
    sources, size = _FILE
    size = min(size, budget(memory, descent.data.device) // 4)  # a file is put together in memory
    each = values_of_a_row(descent, directions, layers) * descent.dtype.itemsize
    rows = max(rows_in_memory(descent, directions, layers, memory), min(sources, size // each))
    return min(rows, len(descent.sources))


def rows_in_memory(descent: Descent, directions: int, layers: tuple[str, ...], memory: int | str | None) -> int:
    """How many sources fit the memory budget together, beside the basis.

    Factors are multiplied out to be compared with the basis, MULTIPLIED rows at a time, or all where fewer fit.
    """
    room, out = _room(descent, directions, memory), 2 * tensor_bytes(descent.start) if layers else 0
    room = max(room, directions * tensor_bytes(descent.start) // _BESIDE)
    each = COPIES * values_of_a_row(descent, directions, layers) * descent.dtype.itemsize
    fit = max(room // (each + out), (room - MULTIPLIED * out) // each)
    return int(max(1, min(fit, len(descent.sources), _SHARD)))


def warn_of_memory(descent: Descent, directions: int, memory: int | str | None) -> None:
    """Say that the basis does not fit the memory budget, where it does not."""
    if _room(descent, directions, memory) < 0:
        logger.warning(
            "the basis of %d directions takes %d bytes, more than the memory budget: going on with few sources at once",
            *(directions, directions * tensor_bytes(descent.start)),
        )


def _room(descent: Descent, directions: int, memory: int | str | None) -> int:
    """Bytes of the budget that the basis leaves."""
    return budget(memory, descent.data.device) - directions * tensor_bytes(descent.start)
