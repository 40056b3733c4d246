"""Read factored imprints without multiplying them out.

A linear readout of u_b = Σ_i c_bi q_i + r_b is Σ_i c_bi F'[q_i] + F'[r_b]: derivatives along the basis are taken once
for all sources, and those along the factors cost as little as the factors are.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from imprint.errors import TaskError, first_line
from imprint.runtime.turns import jvp
from imprint.store.reading import Store
from imprint.task import Batch, Functional, Parameters
from imprint.tensors.batching import attempt
from imprint.tensors.rows import Rows, along, forward_along, gradients
from imprint.tensors.vectors import over_rows

_AGREEING = 1e-2  # relative difference that rounding may make


class FactoredReadout:
    """The factored imprints of one checkpoint, made ready for queries of a task at its base.

    keep: the basis stays in memory between calls; otherwise it is read whenever it is wanted.
    """

    def __init__(
        self, store: Store, checkpoint: int, functional: Functional, theta: Parameters, *, keep: bool = True
    ) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._functional, self._theta = functional, theta
        self._device = next(iter(theta.values())).device
        self._kept_basis = store.basis(checkpoint, self._device) if keep else None
        self._last: tuple[Batch, Tensor, Rows | None] | None = None  # of the last batch, for its next chunk of sources
        self._rows: tuple[tuple[int, int], Rows] | None = None

    def multiplied_out(self, start: int, stop: int) -> Parameters:
        """Return the imprints of some sources in full."""
        return replace(self._factored(start, stop), basis=self._basis).multiplied_out(self._theta)

    @property
    def _basis(self) -> Parameters:
        return self._store.basis(self._checkpoint, self._device) if self._kept_basis is None else self._kept_basis

    def forward(self, start: int, stop: int, batch: Batch, count: int) -> Tensor:
        """Score by forward mode, shape (sources, queries)."""
        rows = self._factored(start, stop)
        if self._last is None or self._last[0] is not batch:
            self._last = batch, self._along_basis(batch, count), None
        assert rows.coefficients is not None
        inside = rows.coefficients @ self._last[1]
        return inside if rows.only_basis else inside + self._forward(rows, batch, count)

    def backward(self, start: int, stop: int, batch: Batch, count: int) -> Tensor:
        """Score by one gradient of each query, shape (sources, queries)."""
        rows = self._factored(start, stop)
        if self._last is None or self._last[0] is not batch:
            found = self._gradients(batch, count)
            self._last = batch, along(found, self._basis).T, found
        _, seen, slopes = self._last
        assert slopes is not None and rows.coefficients is not None
        inside = rows.coefficients @ seen
        return inside if rows.only_basis else inside + rows.dots(slopes, self._theta)

    def why_unusable(
        self, in_full: Callable[[Parameters], Tensor], forward: bool, batch: Batch, count: int
    ) -> str | None:
        """Return why factors do not give what `in_full` gives for displacements in full; None if they do.

        Layers were chosen by how the loss uses them. A measurement may use one differently: twice, or its weight
        itself. Random factors show it.
        """
        rows, draw = self._factored(0, 1), torch.Generator().manual_seed(0)

        def drawn(tensors: Parameters) -> Parameters:
            return {n: torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t) for n, t in tensors.items()}

        probe = Rows(drawn(rows.inputs), drawn(rows.outputs), drawn(rows.dense))

        def agree() -> bool:
            if rows.only_basis:
                self._along_basis(batch, count) if forward else self._gradients(batch, count)
                return True
            if forward:
                found = self._forward(probe, batch, count)
            else:
                found = probe.dots(self._gradients(batch, count), self._theta)
            expected = in_full(probe.multiplied_out(self._theta))
            return float((found - expected).norm()) <= _AGREEING * float(expected.norm())

        try:
            agreeing, reason = attempt(agree)
        except TaskError as error:  # a layer that the measurement uses more than once
            return first_line(error)
        return "the measurement uses linear layers in another way than the loss" if agreeing is False else reason

    def _forward(self, rows: Rows, batch: Batch, count: int) -> Tensor:
        return forward_along(self._functional.measures, self._theta, batch, count, self._functional.task, rows)

    def _gradients(self, batch: Batch, count: int) -> Rows:
        layers = self._store.checkpoints[self._checkpoint].choices.layers
        return gradients(self._functional.measures, self._theta, batch, count, self._functional.task, layers)

    def forget(self) -> None:
        """Drop what was computed for the last batch, which the caller may have changed in place."""
        self._last = None

    def _factored(self, start: int, stop: int) -> Rows:
        if self._rows is None or self._rows[0] != (start, stop):
            rows = self._store.factored(self._checkpoint, start, stop, {}, self._device)
            self._rows = (start, stop), rows
        return self._rows[1]

    def _along_basis(self, batch: Batch, count: int, at_once: int = 64) -> Tensor:
        """Return F'[q_i] for every direction of the basis, shape (directions, queries)."""

        def measure(theta: Parameters) -> Tensor:
            return self._functional.measures(theta, batch, count)

        def one(direction: Parameters) -> Tensor:
            return jvp(measure, (self._theta,), (direction,))[1]  # type: ignore[no-any-return]

        basis = self._basis
        directions = len(next(iter(basis.values())))
        parts = [
            over_rows(one, {name: q[i : i + at_once] for name, q in basis.items()}, vectorise=True)
            for i in range(0, directions, at_once)
        ]
        return torch.cat(parts)
