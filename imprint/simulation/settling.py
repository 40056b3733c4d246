"""What a plan leaves open, decided at each checkpoint: the step, ε, and how many sources are simulated at once.

`run` asks before it simulates a checkpoint, and keeps the answer in the journal; `estimate` measures what asking costs.
"""

import logging
import sys
from dataclasses import replace

import torch

from imprint.plan import Settings
from imprint.runtime.memory import Peak, activation_bytes, budget, most_that_fit, tensor_bytes
from imprint.simulation.curvature import Spectrum, longer
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.simulation.engines import sides, simulated, trial_epsilon
from imprint.simulation.inputs import Inputs
from imprint.simulation.preflight import first_step, own, refuse_loss, why_not_together
from imprint.simulation.step import settle, starting_curvature
from imprint.simulation.trajectories import choose_epsilon
from imprint.store.checkpoint import Checkpoint, Decided, Measured

logger = logging.getLogger(__name__)

_FEWEST_EXAMPLES = 16  # evaluated at once, however little memory there is
_LEAST = 64 << 20  # bytes that a batch may take in any case
_COPIES = 6  # vectors of one source alive at once in a step: response, its change, and the temporaries of both modes


def settled(descent: Descent, settings: Settings, index: int, memory: int | str | None) -> Checkpoint:
    """How checkpoint number `index` is simulated, with the figures that decided it."""
    descent, alone = together_or_alone(descent)
    curvature = starting_curvature(descent)
    step, curvature = settle(descent, curvature) if settings.lr == "auto" else (settings.lr, curvature)
    stability = curvature.growth(step, descent.shift, descent.plan.momentum)
    descent = advised(replace(descent, lr=step), curvature)
    if stability > 1 + 1e-6:
        logger.info(
            "checkpoint %d: a step multiplies some direction by %.3g, from negative curvature %.3g",
            *(index, stability, curvature.smallest),
        )
    epsilon, disagreement = _epsilon(descent)
    rows = rows_at_once(descent, memory, epsilon)
    measured = Measured(
        curvature=(curvature.smallest, curvature.largest),
        stability=stability,
        one_by_one=alone,
        moments=None if descent.preconditioner is None else descent.preconditioner.moments,
        unmoved=None if descent.preconditioner is None else descent.preconditioner.unmoved,
        epsilon_disagreement=disagreement,
    )
    decided = Decided(step, rows, rows, descent.vectorise, epsilon)
    return replace(Checkpoint.planned(settings), decided=decided, measured=measured)


def together_or_alone(descent: Descent) -> tuple[Descent, str | None]:
    """The descent of many sources at once if `vmap` takes the model; otherwise one by one, and the reason."""
    refuse_loss(descent, next(descent.batches()))
    reason = why_not_together(descent, lambda trial: simulated(trial, trial_epsilon(trial.plan)))
    return replace(descent, vectorise=reason is None), reason


def fit_batches(inputs: Inputs, memory: int | str | None) -> None:
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

    copies = _COPIES * sides(inputs.plan)
    each = copies * max(1, (taken(2 * few) - taken(few)) // few)
    fit = max(_FEWEST_EXAMPLES, (allowed - copies * tensor_bytes(theta)) // each)
    if fit < min(data.batch_size, len(data)):
        data.batch_size = 1 << (int(fit).bit_length() - 1)
        logger.info("%d examples are evaluated at once, which memory=%s allows", data.batch_size, memory)


def rows_at_once(descent: Descent, memory: int | str | None, epsilon: float | None, before: int | None = None) -> int:
    """How many sources fit the memory budget together.

    On CUDA a step of some of them tells; the CPU keeps no such account, and an upper bound is estimated.

    before: how many an earlier run took at once, which is tried first.
    """
    allowed, most = budget(memory, descent.data.device), len(descent.sources)
    if descent.vectorise and _tells(descent.data.device):
        if before is not None:
            _step_bytes(descent, 1, epsilon)  # what torch makes for itself at the first call is not of a source
            if _step_bytes(descent, before, epsilon) <= allowed:
                return before
        rows = most_that_fit(lambda rows: _step_bytes(descent, rows, epsilon), allowed, most)
    else:
        rows = min(most, allowed // _estimated_bytes(descent))
    if rows < 1:
        logger.warning("one source needs more than the memory budget of %d bytes: going on one by one", allowed)
    return max(1, rows)


def _tells(device: torch.device) -> bool:
    """Whether a device keeps account of its memory to the byte."""
    return device.type == "cuda"


def _step_bytes(descent: Descent, rows: int, epsilon: float | None) -> int:
    """What a step of so many sources takes at once on CUDA, beside what is there already; no end if it is too much."""
    device, taken = descent.data.device, []
    for sources in descent.heaviest(rows):
        there, peak = torch.cuda.memory_allocated(device), Peak(device)
        try:
            simulated(first_step(descent, sources), epsilon)
        except torch.OutOfMemoryError:
            return sys.maxsize
        taken.append((peak.bytes or 0) - there)
    return max(taken)


def _estimated_bytes(descent: Descent) -> int:
    """A bound of what a source takes."""
    part: Weighted = next(iter(next(descent.batches())))
    activations = activation_bytes(lambda: descent.task.losses(descent.start, part.batch, len(part)))
    each = _COPIES * (tensor_bytes(descent.start) + (activations if descent.vectorise else 0))
    each += tensor_bytes(descent.start) if descent.plan.momentum else 0  # its directions
    each += (len(descent.data) if descent.is_full_batch else 0) * descent.dtype.itemsize  # its weights of all examples
    return int(each * sides(descent.plan))


def refitted(rows: int, fit: int, memory: int | str) -> int:
    """How many of the sources that an earlier run took at once may be taken at once now."""
    if fit < rows:
        logger.warning(
            "going on with %d sources at once instead of %d, which memory=%s does not allow: their imprints are "
            "the same to rounding, not to the bit",
            *(fit, rows, memory),
        )
    return min(fit, rows)


def _epsilon(descent: Descent) -> tuple[float | None, dict[str, float]]:
    if descent.plan.engine == "trajectories" and descent.plan.epsilon == "auto":
        return choose_epsilon(descent)
    return trial_epsilon(descent.plan), {}


def advised(descent: Descent, curvature: Spectrum) -> Descent:
    """The descent with what to do should it diverge, given the curvature that was measured."""
    sharpest = max(curvature.largest, -curvature.smallest) + descent.shift
    holds = f" A step below {2 * longer(descent.plan.momentum) / sharpest:.2g} holds;" if sharpest > 0 else ""
    advice = (
        f"The step is lr={descent.lr:.3g} and the measured curvature runs from {curvature.smallest:.3g} to "
        f'{curvature.largest:.3g}.{holds} lr="auto" chooses one; fewer steps or some damping help where curvature is '
        "negative."
    )
    return replace(descent, advice=advice)
