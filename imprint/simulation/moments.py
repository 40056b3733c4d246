"""Adam's second moments where they were not recorded: means of squared gradients at a checkpoint."""

from itertools import islice

import torch

from imprint.errors import SimulationError
from imprint.simulation.descent import Descent, minibatches
from imprint.simulation.divergence import refuse_gradients
from imprint.simulation.preflight import refuse_loss
from imprint.task import Parameters

BATCHES = 16  # of which squared gradients are averaged
COMPARED = 4  # batches that recorded moments are compared with: a factor of thirty shows on few
_LARGEST = 64  # examples in one of them, where the plan's steps take the full batch, whose gradient may vanish


def estimate_moments(descent: Descent, batches: int = BATCHES) -> Parameters:
    """Return the mean of squared gradients of the objective over mini-batches, where the descent starts."""
    size = descent.plan.batch_size
    if size is None or descent.is_full_batch:
        size = max(1, min(_LARGEST, descent.n // 4))
    total = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in descent.start.items()
    }
    for index, examples in enumerate(islice(minibatches(descent.n, size, descent.plan.seed), batches)):
        parts = descent.weighted(examples)
        if index == 0:
            refuse_loss(descent, parts)
        slope = descent.base_gradient(descent.start, parts, 0, draw=index)
        if not all(bool(tensor.isfinite().all()) for tensor in slope.values()):
            refuse_gradients(descent.task, descent.start, descent.data, descent.sources, parts)
        for name, tensor in total.items():
            tensor += slope[name].to(tensor.dtype).square() / batches
    for name, tensor in total.items():
        if not bool(tensor.isfinite().all()):
            raise SimulationError(
                f"the second moments of parameter {name!r} cannot be estimated: squares of its gradients are not "
                "finite. Are the losses scaled by a large number?"
            )
    return total
