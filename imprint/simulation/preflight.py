"""Checks before a simulation: what is known to be wrong, and whether `vmap` supports the model."""

import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from imprint.errors import DataError, ImprintError, SimulationError, TaskError, first_line
from imprint.plan import first_order_engine
from imprint.simulation.derivatives import Weighted
from imprint.simulation.descent import Descent
from imprint.simulation.divergence import refuse_gradients, refuse_losses
from imprint.sources import Sources
from imprint.task import Parameters, Task
from imprint.tensors.batching import attempt

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


def check_device(task: Task, device: torch.device | str | None) -> None:
    """Refuse a device on which the model is not."""
    if device is None:
        return
    try:
        asked, has = torch.device(device), task.device
    except RuntimeError as error:
        raise TaskError(f"device={device!r} is not a device: {first_line(error)}") from error
    if asked.type != has.type or (asked.index is not None and asked.index != has.index):
        raise TaskError(f"device={str(asked)!r} was asked for, but the model is on {str(has)!r}: move the model there.")


def warn_half_precision(task: Task) -> None:
    """Warn where the parameters are too coarse for the steps of a simulation."""
    half = {p.dtype for p in map(task.model.get_parameter, task.names) if p.dtype.itemsize < 4}
    if half:
        warnings.warn(
            f"the selected parameters are {half.pop()}: the small steps of a simulation get lost in half precision, "
            "and scores come out wrong by a tenth or more. Simulate with model.float().",
            stacklevel=5,
        )


def refuse_nonfinite(state: Parameters, index: int, count: int) -> None:
    """Refuse weights with NaN or infinity."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            where = f"checkpoint {index}" if count > 1 else "the model"
            raise SimulationError(f"parameter or buffer {name!r} of {where} holds NaN or infinity.")


def refuse_loss(descent: Descent, parts: Iterable[Weighted]) -> None:
    """Run what the user gave once, plainly, so that an error of its own shows as such; then its gradient."""
    with torch.no_grad():
        for part in parts:
            losses = own(
                "loss function failed on the first batch", descent.task.losses, descent.start, part.batch, len(part)
            )
            if not bool(losses.isfinite().all()):
                refuse_losses(descent.sources, losses, part.examples, 0)
        if descent.task.task.regulariser is not None:
            own("regulariser failed", descent.task.regulariser, descent.start)
    try:
        slope = descent.base_gradient(descent.start, parts, 0)
    except (ImprintError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise TaskError(f"the {descent.plan.engine} engine cannot differentiate this model: {error}") from error
    if not all(bool(tensor.isfinite().all()) for tensor in slope.values()):
        refuse_gradients(descent.task, descent.start, descent.data, descent.sources, parts)


def own(what: str, call: Callable[..., Result], *given: Any) -> Result:
    """Call the user's own function; its errors are reported as such."""
    try:
        return call(*given)
    except (TaskError, DataError):
        raise
    except Exception as error:
        raise TaskError(f"the {what}: {type(error).__name__}: {error}{_hint(error)}") from error


def _hint(error: Exception) -> str:
    """Explain the errors of torch that a new user meets first."""
    if "same dtype" in str(error) or "expected scalar type" in str(error):
        return " (numbers of numpy are float64: is the model float32? Then give .float() or .astype('float32'))"
    return ""


def find_why_not_vmap(descent: Descent, simulate: Callable[[Descent], object]) -> str | None:
    """Return why `vmap` does not support this model, so that sources take a loop (logged); None if it does."""
    trial = first_step(descent, descent.sources.smallest(2))  # which are differentiated together, if anything is
    _, reason = attempt(lambda: simulate(replace(trial, vectorise=True)))
    if reason is None:
        return None
    _, alone = attempt(lambda: simulate(replace(trial, vectorise=False)))
    if alone is not None:
        engine = descent.plan.engine
        hint = (
            f' engine="{first_order_engine()}" needs first derivatives only.' if descent.plan.rules.second_order else ""
        )
        raise TaskError(f"the {engine} engine cannot differentiate this model: {alone.rstrip('.')}.{hint}")
    logger.warning("vmap does not support this model, so sources are simulated one by one: %s", reason)
    return reason


def first_step(descent: Descent, sources: Sources) -> Descent:
    """Return the first step of a descent for some of its sources, as a trial."""
    return replace(descent, sources=sources, steps=1)
