"""Gradients of single examples in the factors that linear layers make of them, where that works."""

import logging

import torch

from imprint.simulation.descent import Descent
from imprint.simulation.source_gradients import source_gradients
from imprint.tensors.batching import attempt
from imprint.tensors.rows import Rows, factorable, gradients, parameters_of

logger = logging.getLogger(__name__)
_TRIED = 32  # examples on which factors are tried


def find_layers(descent: Descent) -> tuple[str, ...]:
    """Return the linear layers whose parts of an imprint are kept as products; none where imprints are kept in full.

    That is where the plan says so, where sources are groups, and where it fails (logged).
    """
    if descent.plan.form != "factored" or max(descent.sources.sizes) > 1:
        return ()
    some, two = (torch.arange(min(count, descent.n)) for count in (_TRIED, 2))

    def factor() -> tuple[str, ...]:
        found = factorable(descent.task, descent.start, descent.data.gather(some), len(some))
        gradients(descent.task.losses, descent.start, descent.data.gather(two), len(two), descent.task.task, found)
        return found

    layers, reason = attempt(factor)
    if reason is not None:
        logger.warning("per-example gradients cannot be factored, imprints are stored in full: %s", reason)
    return layers or ()


def take_gradients(descent: Descent, layers: tuple[str, ...]) -> Rows:
    """Return ∇ℓ_b of each source; in factors where there are `layers`, which takes sources of one example each."""
    if not layers:
        return Rows({}, {}, source_gradients(descent, descent.start, 0))
    examples = torch.tensor([int(members[0]) for members in descent.sources.members])
    task = descent.task
    parts = [
        gradients(task.losses, descent.start, descent.data.gather(piece), len(piece), task.task, layers)
        for piece in torch.split(examples, descent.data.batch_size)
    ]
    return Rows.joined(parts)


def count_values(descent: Descent, directions: int, layers: tuple[str, ...]) -> int:
    """Count the numbers that keep the imprint of a source, or make it where it is projected afterwards."""
    covered = {name for layer in layers for name in parameters_of(layer)}
    factors = sum(sum(descent.start[parameters_of(layer)[0]].shape) for layer in layers)
    dense = sum(p.numel() for name, p in descent.start.items() if name not in covered)
    return factors + dense + (directions if layers else 0)
