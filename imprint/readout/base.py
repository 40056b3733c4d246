"""One checkpoint made ready to be read: the task there, its selected parameters, and the kernels applied to both.

`Reader` has one for each checkpoint of a store, `imprint.export` one for the checkpoint that it exports.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from imprint.readout.kernels import (
    Measure,
    difference_scores,
    gradient_scores,
    jvp_scores,
    query_gradients,
    removed_scores,
)
from imprint.store.reading import Store
from imprint.task import Batch, Functional, Parameters, PerExample, Task
from imprint.tensors.vectors import scale


@dataclass(frozen=True)
class Base:
    """A checkpoint, by its index in the store and with its share in the mean over checkpoints.

    theta: everything that imprints displace there: the selected parameters and, of a replay, buffers.
    """

    index: int
    share: float
    functional: Functional
    theta: Parameters

    @property
    def state(self) -> Parameters:
        """Every parameter and buffer of the model there; not copied."""
        return {**self.functional.fixed, **self.theta}

    @cached_property
    def scale(self) -> float:
        """The length that steps are relative to."""
        return scale(self.theta, self.functional)

    def measure(self, batch: Batch, count: int) -> Measure:
        """Return F of the queries of a batch as a function of the selected parameters."""
        return lambda theta: self.functional.measures(theta, batch, count)

    def jvp(self, imprints: Parameters, batch: Batch, count: int, *, vectorise: bool) -> Tensor:
        """Score by forward mode, shape (sources, queries)."""
        return jvp_scores(self.measure(batch, count), self.theta, imprints, vectorise=vectorise)

    def central(self, imprints: Parameters, c: Tensor, batch: Batch, count: int, *, vectorise: bool) -> Tensor:
        """Score by differences between θ + c_b·u_b and θ − c_b·u_b, shape (sources, queries)."""
        return difference_scores(self.measure(batch, count), self.theta, imprints, c, c, vectorise=vectorise)

    def literal(
        self,
        imprints: Parameters,
        midpoints: Parameters | None,
        step: float,
        one_sided: bool,
        batch: Batch,
        count: int,
        *,
        vectorise: bool,
    ) -> Tensor:
        """Score by differences between the end points, `step` imprints off their midpoint, shape (sources, queries)."""
        up = (rows := next(iter(imprints.values()))).new_full((len(rows),), step)
        down = torch.zeros_like(up) if one_sided else up
        measure = self.measure(batch, count)
        return difference_scores(measure, self.theta, imprints, up, down, midpoints, vectorise=vectorise)

    def removed(
        self,
        removals: Parameters,
        n: int,
        batch: Batch,
        count: int,
        changed: Sequence[str] | None = None,
        *,
        vectorise: bool,
    ) -> Tensor:
        """Score finite removals u_b = N(θ − θ₋b) by evaluations at θ and θ₋b, shape (sources, queries)."""
        return removed_scores(self.measure(batch, count), self.theta, removals, n, changed, vectorise=vectorise)

    def gradients(self, batch: Batch, count: int, *, vectorise: bool) -> Parameters:
        """Return ∇F of each query, one row per query, for `gradient_scores`."""
        return query_gradients(self.functional, self.theta, batch, count, vectorise=vectorise)

    def gradient(self, imprints: Parameters, batch: Batch, count: int, *, vectorise: bool) -> Tensor:
        """Score by one backward pass per query, shape (sources, queries)."""
        return gradient_scores(imprints, self.gradients(batch, count, vectorise=vectorise))


def load_bases(task: Task, store: Store, measure: PerExample | None) -> list[Base]:
    """Return the checkpoints that count, made ready for the measurement."""
    weights, bases = [checkpoint.weight for checkpoint in store.checkpoints], []
    for index, weight in enumerate(weights):
        if weight > 0:
            state = store.state(index, task)
            functional, theta = task.at(state, measure)
            theta |= {name: state[name] for name in store.manifest.request.buffers}
            bases.append(Base(index, weight / sum(weights), functional, theta))
    return bases
