"""A task in the metric of a preconditioner M: what plain descent sees there, preconditioned descent sees in θ.

With θ = θ* + M^(−½) φ, a step of gradient descent on φ is one of M⁻¹ times the gradient on θ, curvature is
M^(−½) H M^(−½), and gradients are M^(−½) g. So whatever is measured or walked for plain descent, from φ = 0, serves
the preconditioned one as it is. A factor in M, such as that of a training loss on another scale, cancels from all
figures that are compared with a curvature.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imprint.simulation.descent import Descent
from imprint.task import Batch, Functional, Parameters


@dataclass(frozen=True)
class InMetric(Functional):
    """A task as pure functions of φ; where M is infinite, parameters stay where they are.

    origin: θ*.
    roots: M^(−½).
    """

    origin: Parameters | None = None
    roots: Parameters | None = None

    def losses(self, parameters: Mapping[str, Tensor], batch: Batch, count: int) -> Tensor:
        return super().losses(self._place(parameters), batch, count)

    def outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return super().outputs(self._place(parameters), batch)

    def measures(self, parameters: Mapping[str, Tensor], batch: Batch, count: int) -> Tensor:
        return super().measures(self._place(parameters), batch, count)

    def regulariser(self, parameters: Mapping[str, Tensor]) -> Tensor:
        return super().regulariser(self._place(parameters))

    def _place(self, parameters: Mapping[str, Tensor]) -> Parameters:
        assert self.origin is not None and self.roots is not None
        return {name: self.origin[name] + self.roots[name] * phi for name, phi in parameters.items()}


def in_metric(descent: Descent) -> Descent:
    """Return a descent as plain descent in the metric of its preconditioner; without one, as it is."""
    if descent.preconditioner is None:
        return descent
    roots = {name: m.rsqrt().to(descent.start[name]) for name, m in descent.preconditioner.diagonal.items()}
    task = InMetric(
        descent.task.task, descent.task.fixed, descent.task.noise, descent.task.measure, descent.start, roots
    )
    at_rest = {name: torch.zeros_like(p) for name, p in descent.start.items()}
    plan = replace(descent.plan, preconditioner=None)
    return replace(descent, task=task, start=at_rest, plan=plan, preconditioner=None)
