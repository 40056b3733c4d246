"""How much fits the memory budget: examples that are evaluated at once, and sources that are simulated together."""

import logging
import sys
from collections.abc import Callable

import torch

from imprint.display import count_of, format_size
from imprint.runtime.memory import Peak, activation_bytes, budget, most_that_fit, tensor_bytes
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.simulation.inputs import Inputs
from imprint.simulation.preflight import first_step, own
from imprint.simulation.source_gradients import choose_heaviest

logger = logging.getLogger(__name__)

_FEWEST_EXAMPLES = 16  # evaluated at once, however little memory there is
_LEAST = 64 << 20  # bytes that a batch may take in any case
_COPIES = 6  # vectors of one source alive at once in a step: response, its change, and the temporaries of both modes


def fit_batches(inputs: Inputs, memory: int | str | None, rows_per_source: int) -> None:
    """Lower the number of examples evaluated at once, where one source would take more than the caller allows.

    Only for an explicit `memory`, so that the same call has the same batches; and not where dropout is drawn along the
    path, which depends on them.
    """
    data, few = inputs.data, 8
    if memory is None or inputs.plan.dropout or data.batch_size <= _FEWEST_EXAMPLES or len(data) <= 2 * few:
        return
    allowed = max(budget(memory, data.device), _LEAST)
    functional, theta = inputs.task.at(inputs.states[inputs.first])

    def taken(count: int) -> int:
        batch = data.gather(torch.arange(count))
        return activation_bytes(
            lambda: own("loss function failed on the first batch", functional.losses, theta, batch, count)
        )

    copies = _COPIES * rows_per_source
    each = copies * max(1, (taken(2 * few) - taken(few)) // few)
    fit = max(_FEWEST_EXAMPLES, (allowed - copies * tensor_bytes(theta)) // each)
    if fit < min(data.batch_size, len(data)):
        data.batch_size = 1 << (int(fit).bit_length() - 1)
        logger.info("%d examples are evaluated at once, which memory=%s allows", data.batch_size, memory)


def rows_that_fit(
    descent: Descent,
    memory: int | str | None,
    attempt: Callable[[Descent], None],
    rows_per_source: int,
    before: int | None = None,
) -> int:
    """Return how many sources fit the memory budget together.

    On CUDA a step of some of them tells; the CPU keeps no such account, and an upper bound is estimated.

    attempt: makes a step of some sources.
    before: how many an earlier run took at once, which is tried first.
    """
    allowed, most = budget(memory, descent.data.device), len(descent.sources)
    if descent.vectorise and descent.data.device.type == "cuda":
        if before is not None:
            _measure_step(descent, 1, attempt)  # what torch makes for itself at the first call is not of a source
            if _measure_step(descent, before, attempt) <= allowed:
                return before
        rows = most_that_fit(lambda rows: _measure_step(descent, rows, attempt), allowed, most)
    else:
        rows = min(most, allowed // _bound_bytes(descent, rows_per_source))
    if rows < 1:
        logger.warning(
            "one source needs more than the memory budget of %s: simulating one source at a time", format_size(allowed)
        )
    return max(1, rows)


def _measure_step(descent: Descent, rows: int, attempt: Callable[[Descent], None]) -> int:
    """Measure what a step of so many sources takes on CUDA, beside what is allocated already."""
    device, taken = descent.data.device, []
    for sources in choose_heaviest(descent, rows):
        there, peak = torch.cuda.memory_allocated(device), Peak(device)
        try:
            attempt(first_step(descent, sources))
        except torch.OutOfMemoryError:
            return sys.maxsize
        taken.append((peak.bytes or 0) - there)
    return max(taken)


def _bound_bytes(descent: Descent, rows_per_source: int) -> int:
    """Return a bound of what a source takes."""
    part: Weighted = next(iter(next(descent.batches())))
    activations = activation_bytes(lambda: descent.task.losses(descent.start, part.batch, len(part)))
    each = _COPIES * (tensor_bytes(descent.start) + (activations if descent.vectorise else 0))
    each += tensor_bytes(descent.start) if descent.plan.momentum else 0  # its directions
    each += (len(descent.data) if descent.is_full_batch else 0) * descent.dtype.itemsize  # its weights of all examples
    return int(each * rows_per_source)


def refit(rows: int, fit: int, memory: int | str | None) -> int:
    """Return how many of the sources that an earlier run or another part took at once may be taken at once here."""
    if fit < rows:
        logger.warning(
            "simulating %s at once instead of %d, %s: their imprints are the same to rounding, not to the bit",
            *(count_of(fit, "source"), rows, "as memory allows" if memory is None else f"to respect memory={memory}"),
        )
    return min(fit, rows)
