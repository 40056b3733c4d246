"""What both path engines share: the batches of a step, the source's own gradient, and the checks on what moves."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from imprint.batches import is_columnar, map_tensors
from imprint.data import Data
from imprint.errors import SimulationError
from imprint.plan import Plan
from imprint.simulation.derivatives import Weighted, gradient, regulariser_gradient
from imprint.simulation.snapshot import Moment, Snapshot
from imprint.sources import Sources
from imprint.task import Batch, Functional, Parameters
from imprint.tensors.vectors import add_scaled_, row, row_norms, scale

if TYPE_CHECKING:
    from imprint.simulation.preconditioner import Preconditioner

_RUNAWAY = 1e3  # times what a steady pull, as strong as at the beginning, would have given by now
_BEGINNING = 3  # steps in which the pull of a source shows
_OWN = 1 << 30  # in place of the number of a part: a source's own members
_STACKED_MEMBERS = 32  # sources up to this size are differentiated together; larger ones fill the machine alone


@dataclass(frozen=True)
class FullBatch:
    """All examples with weight 1/N, read batch by batch whenever they are wanted: they need not fit memory at once."""

    data: Data
    dtype: torch.dtype

    def __iter__(self) -> Iterator[Weighted]:
        for examples, batch in self.data.batches():
            weights = torch.full((len(examples),), 1 / len(self.data), dtype=self.dtype, device=examples.device)
            yield Weighted(examples, weights, batch)


@dataclass(frozen=True)
class Simulated:
    """What an engine returns for a chunk of sources.

    base: the selected parameters at the read-out point.
    imprints: u_b, one row per source.
    end: θ_T⁰, from which the drift of the unperturbed path is known.
    midpoints: (θ⁺ + θ⁻)/2 − base, one row per source, where the pair was asked for.
    linearity: ‖θ⁺ + θ⁻ − 2θ⁰‖ / ‖θ⁺ − θ⁻‖ per source, where there are two trajectories; 0 is perfectly linear.
    """

    base: Parameters
    imprints: Parameters
    end: Parameters
    midpoints: Parameters | None = None
    linearity: list[float] = field(default_factory=list)


def joined(parts: list[Simulated]) -> Simulated:
    """The sources of several parts in one; what they share is that of the first."""
    if len(parts) == 1:
        return parts[0]

    def stacked(kind: str) -> Parameters:
        return {name: torch.cat([getattr(part, kind)[name] for part in parts]) for name in parts[0].imprints}

    return replace(
        parts[0],
        imprints=stacked("imprints"),
        midpoints=None if parts[0].midpoints is None else stacked("midpoints"),
        linearity=[value for part in parts for value in part.linearity],
    )


@dataclass(frozen=True)
class Descent:
    """One simulated descent of a chunk of sources: T steps of size η from θ*, with M and momentum as the plan says."""

    task: Functional
    start: Parameters
    data: Data
    sources: Sources
    plan: Plan
    steps: int
    lr: float
    damping: float = 0.0
    preconditioner: "Preconditioner | None" = None
    vectorise: bool = True
    advice: str = ""
    on_step: Callable[[int], None] = field(default=lambda rows: None)
    on_skip: Callable[[int], None] = field(default=lambda rows: None)
    snapshot: Snapshot | None = None

    def at_part(self, step: int, part: int) -> Functional:
        """The task as a part of a step sees it: with dropout drawn for it, if the plan says so."""
        return replace(self.task, noise=(self.plan.seed, step, part)) if self.plan.dropout else self.task

    @property
    def randomness(self) -> Literal["same", "error"]:
        """Whether sources that are simulated together may draw random numbers: dropout, the same for all of them."""
        return "same" if self.plan.dropout else "error"

    @property
    def n(self) -> int:
        return len(self.data)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.start.values())).dtype

    @property
    def shift(self) -> float:
        """What damping adds to measured curvatures: λ, or nothing where they are of M⁻¹(H + λI) already."""
        return self.damping if self.preconditioner is None else 0.0

    def with_sources(self, sources: Sources) -> "Descent":
        """The same descent for other sources."""
        return replace(self, sources=sources)

    def batches(self, start: int = 0) -> Iterator[Iterable[Weighted]]:
        """The weighted batches of each step from `start` on; one seed decides them for all sources and variants."""
        if self.plan.batch_size is None or self.is_full_batch:
            for _ in range(start, self.steps):
                yield FullBatch(self.data, self.dtype)
            return
        drawn = minibatches(self.n, self.plan.batch_size, self.plan.seed)
        for examples in islice(drawn, start, self.steps):
            yield self.weighted(examples)

    @property
    def is_full_batch(self) -> bool:
        return self.plan.batch_size is None or self.plan.batch_size >= self.n

    def weighted(self, examples: Tensor) -> list[Weighted]:
        """A mini-batch with the weight that each of its examples has in it."""
        weights = torch.full((len(examples),), 1 / len(examples), dtype=self.dtype, device=self.data.device)
        size = self.data.batch_size
        pieces = zip(torch.split(examples, size), torch.split(weights, size), strict=True)
        return [Weighted(piece.to(self.data.device), weight, self.data.gather(piece)) for piece, weight in pieces]

    def base_gradient(
        self, theta: Parameters, parts: Iterable[Weighted], step: int, draw: int | None = None
    ) -> Parameters:
        """∇L(θ) on the batches of a step; a loss that is not finite stops the simulation.

        draw: the number of the step whose dropout is drawn, where that is another.
        """
        noisy = step if draw is None else draw
        total = {name: torch.zeros_like(p) for name, p in theta.items()}
        for index, part in enumerate(parts):
            piece, losses = gradient(self.at_part(noisy, index), theta, part.weights, part.batch, plain=True)
            if not bool(losses.isfinite().all()):
                self.refuse_losses(losses, part.examples, step)
            add_scaled_(total, piece, 1.0)
        if self.task.task.regulariser is not None:
            add_scaled_(total, regulariser_gradient(self.task, theta, plain=True), 1.0)
        return total

    def at_rest(self, theta: Parameters) -> Parameters:
        """The directions that momentum keeps, where nothing has moved yet."""
        return {name: torch.zeros_like(p) for name, p in theta.items()} if self.plan.momentum else {}

    def move_(self, theta: Parameters, pull: Parameters, kept: Parameters) -> None:
        """One step of θ, or of each row of it, down a slope; all are changed in place.

        kept: the directions of the last step, which momentum keeps a part of.
        """
        if self.preconditioner is not None:
            for name, tensor in pull.items():
                tensor.div_(self.preconditioner.diagonal[name])
        for name, direction in kept.items():
            direction.lerp_(pull[name], 1 - self.plan.momentum)
        add_scaled_(theta, kept or pull, -self.lr)

    def refuse_gradients(self, parts: Iterable[Weighted]) -> None:
        """Name the example whose gradient is not finite."""
        for part in parts:
            for position, example in enumerate(part.examples.tolist()):
                batch = self.data.gather(torch.tensor([example]))
                slope = gradient(self.task, self.start, part.weights[position : position + 1], batch, plain=True)[0]
                bad = next((n for n, t in slope.items() if not bool(t.isfinite().all())), None)
                if bad is not None:
                    owner = self.sources.owner(example)
                    raise SimulationError(
                        f"the gradient of training example {example}{owner} is not finite at step 0, "
                        f"first in parameter {bad!r}: the loss has no derivative there."
                    )

    def refuse_losses(self, losses: Tensor, examples: Tensor, step: int) -> None:
        position = int((~losses.isfinite()).nonzero()[0, 0])
        example, value = int(examples[position]), float(losses[position])
        of_source = self.sources.owner(example)
        if step == 0:
            reason = "look for NaN or infinity in that example, or a loss that is undefined there"
        else:
            reason = f"the unperturbed path left the region where the loss is finite. {self.advice}"
        raise SimulationError(f"the loss of training example {example}{of_source} is {value} at step {step}: {reason}.")

    def source_gradients(self, theta: Parameters, step: int, *, per_row: bool) -> Parameters:
        """∇ℓ_b of each source's members (or an unbiased sample of them), one row per source.

        `theta` is shared by all sources, or has a row for each (`per_row`).
        """
        members = [self._members(index, step) for index in range(len(self.sources))]
        if per_row:  # the lighter side of a pair has the same sources, and the same samples of them, again
            members *= next(iter(theta.values())).shape[0] // len(members)
        if self.vectorise and max(len(chosen) for chosen, _ in members) <= _STACKED_MEMBERS:
            stacked = self._stacked_gradients(theta, members, step, per_row)
            if stacked is not None:
                return stacked
        rows = []
        for index, (chosen, factor) in enumerate(members):
            at = row(theta, index) if per_row else theta
            total = {name: torch.zeros_like(p) for name, p in at.items()}
            for piece in torch.split(chosen, self.data.batch_size):
                weights = torch.full((len(piece),), factor, dtype=self.dtype, device=self.data.device)
                piece_of = gradient(self.at_part(step, _OWN), at, weights, self.data.gather(piece), plain=True)[0]
                add_scaled_(total, piece_of, 1.0)
            rows.append(total)
        return {name: torch.stack([total[name] for total in rows]) for name in theta}

    def heaviest(self, count: int) -> list[Sources]:
        """Choices of so many sources of which one takes as much memory as any: large ones, and those done together."""
        sample = self.plan.source_sample
        sizes = [size if sample is None else min(size, sample) for size in self.sources.sizes]
        together = [index for index, size in enumerate(sizes) if size <= _STACKED_MEMBERS]
        choices = [self.sources.largest(count)]
        if not self.is_full_batch and 0 < len(together) < len(sizes):
            choices.append(self.sources.select(together).largest(count))
        return choices

    def _members(self, index: int, step: int) -> tuple[Tensor, float]:
        """The members that stand for a source in a step, and the factor that makes their sum unbiased.

        Steps go through all members in turn, shuffled anew each time: what one step leaves out comes soon after, so
        that the noise of sampling hardly adds up over a path.
        """
        members, sample = self.sources.members[index], self.plan.source_sample
        if sample is None or len(members) <= sample:
            return torch.from_numpy(members), 1.0
        identity = zlib.crc32(self.sources.ids[index].encode())  # not the row: the draw must not depend on the order
        first, start = divmod(step * sample, len(members))
        passes = range(first, first + 1 + (start + sample - 1) // len(members))
        order = [np.random.default_rng([self.plan.seed, each, identity]).permutation(members) for each in passes]
        return torch.from_numpy(np.concatenate(order)[start : start + sample]), len(members) / sample

    def _stacked_gradients(
        self, theta: Parameters, members: list[tuple[Tensor, float]], step: int, per_row: bool
    ) -> Parameters | None:
        """All small sources at once, padded with examples of weight 0; None where batches are not plain columns."""
        rows, width = len(members), max(len(chosen) for chosen, _ in members)
        examples = torch.zeros(rows, width, dtype=torch.int64)
        weights = torch.zeros(rows, width, dtype=self.dtype)
        for index, (chosen, factor) in enumerate(members):
            examples[index, : len(chosen)], examples[index, len(chosen) :] = chosen, chosen[0]
            weights[index, : len(chosen)] = factor
        batch = self.data.gather(examples.flatten())
        if not is_columnar(batch, rows * width):
            return None
        batch = map_tensors(lambda t: t.reshape(rows, width, *t.shape[1:]), batch)

        task = self.at_part(step, _OWN)

        def one(theta: Parameters, weights: Tensor, batch: Batch) -> Parameters:
            return gradient(task, theta, weights, batch)[0]

        each = vmap(one, in_dims=(0 if per_row else None, 0, 0), randomness=self.randomness)
        return each(theta, weights.to(self.data.device), batch)


class Watch:
    """Looks at the responses after every step and stops what is not finite or runs away.

    A runaway has grown far beyond its beginning, and to where removing the source (`removal` times its response) would
    move the parameters by more than their own length: a source that is only slow to show its pull does not.
    """

    def __init__(self, descent: Descent, removal: float) -> None:
        self.sources = descent.sources
        self.advice = descent.advice
        self._removal = removal
        self._runaway = _RUNAWAY / (1 - descent.plan.momentum)  # which takes a while to gather speed
        self._length = scale(descent.start, descent.task)
        self.pull: Tensor | None = None  # of each row: the largest displacement per step at the beginning

    def __call__(self, responses: Parameters, step: int) -> None:
        norms = row_norms(responses)
        largest = float(norms.max())
        if not np.isfinite(largest):
            index = int((~norms.isfinite()).nonzero()[0, 0])
            bad = next((n for n, t in responses.items() if not bool(t[index].isfinite().all())), "all parameters")
            raise SimulationError(
                f"the imprint of source {self._source(index)!r} is not finite at step {step}, first in "
                f"parameter {bad!r}: {self._cause(step)}"
            )
        steady = norms / (step + 1)
        if self.pull is None or step < _BEGINNING:
            self.pull = steady if self.pull is None else torch.maximum(self.pull, steady)
        growth = torch.where(self.pull > 0, steady / self.pull, 0.0)
        growth = torch.where(self._removal * norms > self._length, growth, 0.0)
        if float(growth.max()) > self._runaway:
            index = int(growth.argmax())
            raise SimulationError(
                f"the imprint of source {self._source(index)!r} runs away: its norm is {float(norms[index]):.3g} "
                f"at step {step}, {float(growth[index]):.1g} times what its first steps led to expect. {self.advice}"
            )

    def _source(self, row: int) -> str:
        return self.sources.ids[row % len(self.sources)]  # the lighter sides follow the heavier ones

    def _cause(self, step: int) -> str:
        if step == 0:
            return "look for NaN or infinity in the source's examples, or a loss whose derivative is undefined there."
        return f"the response has diverged. {self.advice}"


def follow(
    descent: Descent,
    rows: Parameters,
    moving: Callable[[Parameters, Parameters, Iterable[Weighted], int], Parameters],
    responses: Callable[[Parameters, Parameters], Parameters],
    removal: float,
) -> tuple[Parameters, Parameters]:
    """T steps of the base path and of every row beside it; both at the end.

    moving: what moves the rows, from (base, rows, batches, step); it is damped, then a step is made of it.
    responses: how far each row is displaced by its source, from (base, rows); `removal` times that is a removal.
    """
    base = {name: p.clone() for name, p in descent.start.items()}
    count = len(next(iter(rows.values())))
    watch = Watch(descent, removal)
    begin, kept, kept_rows = 0, descent.at_rest(base), descent.at_rest(rows)
    moment = descent.snapshot.restore(descent.data.device, count) if descent.snapshot else None
    if descent.snapshot and moment is not None:
        start = Moment(0, base, rows, moment.pull, kept, kept_rows)
        if different := moment.misfit(start, descent.steps):
            descent.snapshot.refuse(different)
            moment = None
    if moment is not None:
        base, rows, watch.pull, begin = moment.base, moment.rows, moment.pull, moment.step
        kept, kept_rows = moment.kept, moment.kept_rows
        descent.on_skip(begin * count)
    for step, parts in enumerate(descent.batches(begin), begin):
        downhill = descent.base_gradient(base, parts, step)
        change = moving(base, rows, parts, step)
        if descent.damping:
            add_scaled_(change, responses(base, rows), descent.damping)
        descent.move_(rows, change, kept_rows)
        descent.move_(base, downhill, kept)
        del downhill, change  # or the next step would be made beside them
        watch(responses(base, rows), step)
        descent.on_step(count)
        if descent.snapshot and watch.pull is not None:
            descent.snapshot.keep(Moment(step + 1, base, rows, watch.pull, kept, kept_rows))
    return base, rows


def minibatches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Index batches without end: shuffled passes over the data, incomplete last batches dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n, generator=generator)
        for start in range(0, n - n % size, size):
            yield order[start : start + size]
