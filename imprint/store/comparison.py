"""Compares two requests, and what their tasks compute, and describes the first difference.

Values of probes are compared relative to their size and to how far rounding may move them. That is estimated from the
size of losses that are not near 0, and from how much a small relative change of the parameters changes the loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.store.fingerprint import Likeness, compare_data
from imprint.store.probing import DISTANCES, ELSEWHERE, ProbeValues
from imprint.store.request import Request

Evaluate = Callable[[list[int]], ProbeValues]
_RELATIVE = 1e-4  # of a value: what counts as the same
_SLOPE = 1e-3  # of the gradient: what counts as the same
_CLOSE = {torch.float64: 1e-10}  # relative to the largest value: what rounding may make of a path's end; else:
_CLOSE_ENOUGH = 1e-4
_ROUNDING = 4.0  # how often the rounding of a loss may add up


def difference(before: Request, now: Request, evaluate: Evaluate) -> str | None:
    """Describe what two requests differ in first; None if in nothing. The plan may depend on all that comes before it.

    evaluate: evaluates the task of now on the examples that were probes before.
    """
    if different := _compare_fields("the selected parameters'", before.parameters, now.parameters):
        return different
    if before.n != now.n:
        return f"the training data had {before.n} examples, has {now.n}"
    if len(before.states) != len(now.states):
        return f"there were {len(before.states)} checkpoints, are {len(now.states)}"
    if (index := _find_changed(before.states, now.states)) is not None:
        return f"the weights of checkpoint {index} changed"
    if (place := _find_changed(before.runs, now.runs)) is not None:
        return f"checkpoint {place} was of training run {before.runs[place]}, is of run {now.runs[place]}"
    if different := _compare_fields("the buffer", before.buffers, now.buffers):
        return different
    if before.recording != now.recording:
        return "the recorded run is another"
    if before.fixed != now.fixed:
        return "the frozen parameters that the model shares with all checkpoints changed"
    if (index := _find_changed(before.moments, now.moments)) is not None:
        return f"the second moments of checkpoint {index} changed"
    both = before.members is not None and now.members is not None
    if (before.members != now.members) if both else (before.sources != now.sources):
        return "the sources changed (their ids, names or members)"
    if not (data := compare_training_data(before, now)).same:
        return f"the training data changed{data.remark}"
    if different := _compare_fields("the plan's", before.plan.to_json(), now.plan.to_json()):
        return different
    if before.dtype != now.dtype:
        return f"imprints were kept as {before.dtype}, now as {now.dtype}"
    return _compare_tasks(before, now, evaluate)


def compare_training_data(before: Request, now: Request) -> Likeness:
    """Tell whether two requests are of the same training data."""
    return compare_data(vars(before.data), vars(now.data), now.n)


def describe_other_end(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Describe how two ends of a path differ by more than rounding; None if they do not."""
    for name, tensor in ours.items():
        apart = float((tensor.double() - theirs[name].double()).abs().max()) if tensor.numel() else 0.0
        size = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        if not apart <= _CLOSE.get(tensor.dtype, _CLOSE_ENOUGH) * size:
            return f"the path ends elsewhere ({name!r} is off by {apart:.2g})"
    return None


def _compare_fields(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            return f"{what} {name} was {before.get(name)}, is {now.get(name)}"
    return None


def _find_changed(before: Sequence[str | int | None], now: Sequence[str | int | None]) -> int | None:
    """Return the first index where two sequences differ."""
    return next((index for index, (was, value) in enumerate(zip(before, now, strict=True)) if was != value), None)


def _compare_tasks(before: Request, now: Request, evaluate: Evaluate) -> str | None:
    """Describe how the tasks of two requests differ: in modules, loss, outputs, gradients or regulariser."""
    if different := compare_modules(before.modules, now.modules, dropout=bool(now.plan.dropout)):
        return different
    if compare_training_data(before, now).by != "none":  # losses of data that reads differently each time tell nothing
        was, value = before.probes.values, evaluate(before.probes.examples)
        if different := compare_losses(was, value):
            return f"{different}: the loss function changed"
        if different := compare_outputs(was, value):
            return f"{different}: outputs changed, which the curvature is computed from"
        if different := compare_gradients(was, value):
            return f"{different}, though its values are the same: what it detaches changed"
    if len(before.regulariser) != len(now.regulariser):
        return f"the regulariser was evaluated at {len(before.regulariser)} places, is at {len(now.regulariser)}"
    for earlier, pull in zip(before.regulariser, now.regulariser, strict=True):
        if not abs(earlier - pull) <= 1e-3 * max(abs(earlier), abs(pull)):
            return f"the regulariser changed: its value was {earlier:.4g} where it is {pull:.4g}"
    return None


def compare_losses(before: ProbeValues, now: ProbeValues) -> str | None:
    """Describe the first probe whose loss has changed; None if none has."""
    was: list[Sequence[float | None]] = [before.losses, *before.moved]
    value: list[Sequence[float | None]] = [now.losses, *now.moved]
    return _find_difference("loss on probe example", was, value, max(before.precision, now.precision))


def compare_outputs(before: ProbeValues, now: ProbeValues) -> str | None:
    """Describe the first probe whose outputs have changed, where they were kept; None if none has."""
    if before.outputs is None or now.outputs is None:
        return None
    return _find_difference(
        "output on probe example", before.outputs, now.outputs, max(before.precision, now.precision)
    )


def compare_gradients(before: ProbeValues, now: ProbeValues) -> str | None:
    """Describe how much the gradient of the probes has changed, where both are known; None if it has not."""
    if not before.gradients or len(before.gradients) != len(now.gradients):
        return None
    largest = max(map(abs, (*before.gradients, *now.gradients)))
    allowed = max(_SLOPE, _ROUNDING * max(before.precision, now.precision)) * largest
    apart = max(abs(was - value) for was, value in zip(before.gradients, now.gradients, strict=True))
    if apart <= allowed:
        return None
    return f"the gradient of the loss on probe examples is off by {100 * apart / largest:.2g}%"


def _find_difference(
    what: str, before: Sequence[Sequence[float | None]], now: Sequence[Sequence[float | None]], precision: float
) -> str | None:
    """Describe the first value that differs by more than its size and the rounding of all allow."""
    unit = _ROUNDING * precision
    usual = max(map(_find_median_size, (*before, *now))) + max(_estimate_steepness(before), _estimate_steepness(now))
    for number, (earlier, values) in enumerate(zip(before, now, strict=False)):
        for index, was in enumerate(earlier):
            value = values[index] if index < len(values) else None
            if was is None:
                continue
            floor = unit * max(usual, *(abs(each[index] or 0.0) for each in before if index < len(each)))
            if value is None or not abs(value - was) <= _RELATIVE * abs(was) + floor:
                shown = "not finite" if value is None else f"{value:.4g}"
                return f"{what} {index} is {shown}, was {was:.4g}{ELSEWHERE[number - 1] if number else ''}"
    return None


def _find_median_size(values: Sequence[float | None]) -> float:
    """Return the median size of values, and so of what they are computed from."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    return float(np.median(sizes)) if sizes else 0.0


def _estimate_steepness(values: Sequence[Sequence[float | None]]) -> float:
    """Estimate how far the loss of a usual probe moves with a relative change of all parameters, per unit of it."""
    if len(values) < 2:
        return 0.0
    pairs = [(a, b) for a, b in zip(values[0], values[1], strict=False) if a is not None and b is not None]
    return float(np.median([abs(b - a) for a, b in pairs])) / DISTANCES[0] if pairs else 0.0


def compare_modules(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], *, dropout: bool) -> str | None:
    """Describe the first module whose settings have changed, of those that both models have; None if none has.

    dropout: whether the rate of dropout matters, as it does where a simulation draws it.
    """
    for name, was in before.items():
        value = now.get(name, {})
        for key in (key for key in was if key in value):
            if was[key] != value[key] and (dropout or not (was["kind"].startswith("Dropout") and key == "p")):
                about = f"{was['kind']}.{key} was {was[key]}, is {value[key]}"
                return f"module {name!r} of the model has changed: {about}"
    return None
