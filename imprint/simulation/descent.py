"""A descent from a checkpoint: the batches of its steps, the gradient of the objective on them, and a step down it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from imprint.data import Data
from imprint.plan import Plan
from imprint.simulation.derivatives import Weighted, gradient, regulariser_gradient
from imprint.simulation.divergence import refuse_losses
from imprint.simulation.preconditioner import Preconditioner
from imprint.sources import Sources
from imprint.task import Functional, Parameters
from imprint.tensors.vectors import add_scaled_


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
class Descent:
    """A descent of some sources from a checkpoint θ*: `steps` of size `lr`, with M and momentum as the plan says."""

    task: Functional
    start: Parameters
    data: Data
    sources: Sources
    plan: Plan
    steps: int
    lr: float
    damping: float = 0.0
    preconditioner: Preconditioner | None = None
    vectorise: bool = True

    def at_part(self, step: int, part: int) -> Functional:
        """Return the task as one part of a step sees it: with dropout drawn for it, if the plan says so."""
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
        """Return the same descent for other sources."""
        return replace(self, sources=sources)

    def batches(self, start: int = 0) -> Iterator[Iterable[Weighted]]:
        """Yield the weighted batches of each step from `start` on; one seed draws them for all sources and variants."""
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
        """Return a mini-batch with the weight of each of its examples."""
        weights = torch.full((len(examples),), 1 / len(examples), dtype=self.dtype, device=self.data.device)
        size = self.data.batch_size
        pieces = zip(torch.split(examples, size), torch.split(weights, size), strict=True)
        return [Weighted(piece.to(self.data.device), weight, self.data.gather(piece)) for piece, weight in pieces]

    def base_gradient(
        self, theta: Parameters, parts: Iterable[Weighted], step: int, draw: int | None = None
    ) -> Parameters:
        """Return ∇L(θ) on the batches of a step; a loss that is not finite stops the simulation.

        draw: the number of the step whose dropout is drawn, where that is another.
        """
        noisy = step if draw is None else draw
        total = {name: torch.zeros_like(p) for name, p in theta.items()}
        for index, part in enumerate(parts):
            piece, losses = gradient(self.at_part(noisy, index), theta, part.weights, part.batch, plain=True)
            if not bool(losses.isfinite().all()):
                refuse_losses(self.sources, losses, part.examples, step)
            add_scaled_(total, piece, 1.0)
        if self.task.task.regulariser is not None:
            add_scaled_(total, regulariser_gradient(self.task, theta, plain=True), 1.0)
        return total

    def at_rest(self, theta: Parameters) -> Parameters:
        """Return the directions that momentum keeps, before anything has moved."""
        return {name: torch.zeros_like(p) for name, p in theta.items()} if self.plan.momentum else {}

    def move_(self, theta: Parameters, pull: Parameters, kept: Parameters) -> None:
        """Move θ, or each row of it, one step downhill; everything is changed in place.

        kept: the directions of the last step, which momentum keeps a part of.
        """
        if self.preconditioner is not None:
            for name, tensor in pull.items():
                tensor.div_(self.preconditioner.diagonal[name])
        for name, direction in kept.items():
            direction.lerp_(pull[name], 1 - self.plan.momentum)
        add_scaled_(theta, kept or pull, -self.lr)


def minibatches(n: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield batches of indices without end: shuffled passes over the data, incomplete last batches dropped."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n, generator=generator)
        for start in range(0, n - n % size, size):
            yield order[start : start + size]
