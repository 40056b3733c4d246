"""Adam's preconditioner M = diag(√v̂ + 1e-8), from second moments v̂ that stay as they are throughout a simulation.

`inputs` makes one for a checkpoint whose plan wants it, from the moments that were recorded with the checkpoint or else
from gradients there. The descent divides every step by M; plain gradient descent is M = I.
"""

from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch

from imprint.errors import SimulationError
from imprint.simulation.descent import Descent, minibatches
from imprint.simulation.preflight import refuse_loss
from imprint.task import Parameters

_ADAMS = 1e-8  # what Adam adds to √v̂
BATCHES = 16  # of which squared gradients are averaged
_LARGEST = 64  # examples in one of them, where the plan's steps take the full batch, whose gradient may vanish


@dataclass(frozen=True)
class Preconditioner:
    """M, one value for each value of the selected parameters.

    It is infinite where v̂ is 0: there Adam has seen no gradient and moved nothing, and 1e-8 alone would let the first
    one that comes throw the parameter far away.
    """

    diagonal: Parameters
    moments: Literal["recorded", "estimated"]

    @classmethod
    def adam(cls, moments: Parameters, origin: Literal["recorded", "estimated"]) -> "Preconditioner":
        """√v̂ + 1e-8 of second moments that are finite and not negative."""
        if not any(bool(v.any()) for v in moments.values()):
            raise SimulationError(
                f"the {origin} second moments are all 0, so that nothing would move: was the optimiser's state kept "
                "before its first step, or do the selected parameters not enter the loss?"
            )
        return cls({name: torch.where(v > 0, v.sqrt() + _ADAMS, torch.inf) for name, v in moments.items()}, origin)

    @property
    def unmoved(self) -> float:
        """The share of values that do not move, because their second moment is 0."""
        still = sum(int(diagonal.isinf().sum()) for diagonal in self.diagonal.values())
        return still / sum(diagonal.numel() for diagonal in self.diagonal.values())


def estimated_moments(descent: Descent) -> Parameters:
    """The mean of squared gradients of the objective over mini-batches, where the descent starts."""
    size = descent.plan.batch_size
    if size is None or descent.is_full_batch:
        size = max(1, min(_LARGEST, descent.n // 4))
    total = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in descent.start.items()
    }
    for index, examples in enumerate(islice(minibatches(descent.n, size, descent.plan.seed), BATCHES)):
        parts = descent.weighted(examples)
        if index == 0:
            refuse_loss(descent, parts)
        slope = descent.base_gradient(descent.start, parts, 0, draw=index)
        if not all(bool(tensor.isfinite().all()) for tensor in slope.values()):
            descent.refuse_gradients(parts)
        for name, tensor in total.items():
            tensor += slope[name].to(tensor.dtype).square() / BATCHES
    for name, tensor in total.items():
        if not bool(tensor.isfinite().all()):
            raise SimulationError(
                f"the second moments of parameter {name!r} cannot be estimated: squares of its gradients are not "
                "finite. Are the losses scaled by a large number?"
            )
    return total
