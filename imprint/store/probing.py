"""Recognises a task by what it computes: losses, outputs and dropout cannot be hashed, but their values can be kept.

A store keeps some training examples, the probes (see `imprint.store.probe_examples`), and their losses: at a
checkpoint, at two places around it that a fixed sequence of numbers decides, and at the checkpoint with inputs and
labels of different probes put together. Where a fitted model has losses near 0, one loss function looks like another;
elsewhere, and with other labels, it does not.

A simulation depends on gradients, and two losses of equal values may have different ones, where one of them detaches
something. So its request has figures of the gradient too. A readout does without: it takes no gradient of the loss.
`imprint.store.comparison` compares the values.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imprint.batches import is_columnar, leaves, map_tensors
from imprint.compat import has_convolutions
from imprint.store.records import Positive
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.noise import draw_noise, move_parameters

GROUPS = 32  # of parameters, each with two figures of the gradient
DISTANCES = (0.03, 0.5)  # of the places around a checkpoint, relative to each parameter
ELSEWHERE = (*(f" at parameters {distance:.0%} away" for distance in DISTANCES), " with labels of another example")
REGULARISERS = 3

_AT_ONCE = 16  # examples evaluated together
_BACKWARD_AT_ONCE = 4  # … where a gradient is taken, which keeps activations

Values = list[float | None]
"""Of the probes, in order; None where one is not finite, or could not be computed."""


@dataclass(frozen=True)
class ProbeValues:
    """The values that a task computes on some probes.

    losses: at the checkpoint, and `moved` in the order of `ELSEWHERE`.
    outputs: one figure of the outputs of each probe, at the checkpoint and around it; None where they are not needed.
    precision: the coarsest rounding on the way.
    gradients: figures of the gradient of all probes together; none where they are not needed, or could not be had.
    """

    losses: list[float]
    moved: list[Values]
    outputs: list[Values] | None
    precision: Positive
    gradients: list[float] = field(default_factory=list)


@torch.inference_mode(False)
def evaluate_probes(
    functional: Functional,
    theta: Parameters,
    batch: Batch,
    count: int,
    *,
    outputs: bool = False,
    gradients: bool = False,
) -> ProbeValues:
    """Evaluate a task on the probes of a batch, at θ and around it."""
    parts = split_batch(batch, count)
    with torch.no_grad(), _track_precision(functional.task) as precision:
        losses = _compute_losses(functional, theta, parts)
        shown = [_summarise_outputs(functional, theta, parts)] if outputs else []
        moved = []
        for number, distance in enumerate(DISTANCES):
            place = move_parameters(theta, distance, number)
            moved.append(_attempt(_compute_losses, functional, place, parts, count))
            if outputs:
                shown.append(_attempt(_summarise_outputs, functional, place, parts, len(shown[0])))
        moved.append(_attempt(_compute_losses, functional, theta, _mix_rows(batch, count), count))
        slopes = _measure_gradient(functional, theta, batch, count) if gradients else []
    return ProbeValues([_round(loss) for loss in losses], moved, shown if outputs else None, max(precision), slopes)


def evaluate_losses(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """Compute ℓ(θ; i) of the examples of a batch."""
    with torch.no_grad():
        return _compute_losses(functional, theta, split_batch(batch, count))


def _measure_gradient(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """Measure the gradient by each group of parameters and along a fixed direction; return nothing if it fails.

    It is the gradient of a weighted sum of losses, with the probes' own labels and with those of others, away from θ:
    in this sum the gradients of a model that fits its data neither vanish nor cancel.
    """
    place = move_parameters(theta, DISTANCES[-1], len(DISTANCES) - 1)
    total = {name: torch.zeros_like(p) for name, p in place.items()}
    parts = [*split_batch(batch, count, _BACKWARD_AT_ONCE), *_mix_rows(batch, count, _BACKWARD_AT_ONCE)]
    weights = draw_noise(len(DISTANCES) + 1, sum(size for size, _ in parts))
    start = 0
    try:
        for size, part in parts:
            leafs = {name: p.detach().requires_grad_() for name, p in place.items()}
            with torch.enable_grad():
                losses = functional.losses(leafs, part, size)
                value = (losses * weights[start : start + size].to(losses)).sum()
                found = torch.autograd.grad(value, list(leafs.values()), allow_unused=True)
            for name, slope in zip(leafs, found, strict=True):
                if slope is not None:
                    total[name] += slope
            start += size
    except Exception:  # as it may be away from θ; what fails at θ is found elsewhere
        return []
    figures = _summarise_by_group(total)
    return [_round(value) for value in figures] if all(map(math.isfinite, figures)) else []


def _summarise_by_group(gradient: Parameters) -> list[float]:
    """Return the norms of the parts of a gradient, and then their components along a fixed direction."""
    groups = min(GROUPS, len(gradient))
    squares, along = [0.0] * groups, [0.0] * groups
    for index, slope in enumerate(gradient.values()):
        group, flat = index * groups // len(gradient), slope.detach().flatten().double()
        squares[group] += float(flat @ flat)
        along[group] += float(flat @ draw_noise(len(DISTANCES) + 2, len(flat), 7919 * index).to(flat))
    return [*map(math.sqrt, squares), *along]


def split_batch(batch: Batch, count: int, at_once: int = _AT_ONCE) -> list[tuple[int, Batch]]:
    """Cut a batch into small pieces where it can be cut: it must fit in memory wherever the store is read."""
    if not is_columnar(batch, count):
        return [(count, batch)]
    cuts = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    return [(cut.stop - cut.start, map_tensors(itemgetter(cut), batch)) for cut in cuts]


def _mix_rows(batch: Batch, count: int, at_once: int = _AT_ONCE) -> list[tuple[int, Batch]]:
    """Put the inputs and labels of different rows together; return nothing where a batch has no rows."""
    turns = itertools.count()
    if not is_columnar(batch, count):
        return []
    return split_batch(map_tensors(lambda t: t.roll(next(turns), 0), batch), count, at_once)


def _compute_losses(functional: Functional, theta: Parameters, parts: list[tuple[int, Batch]]) -> list[float]:
    return [v for count, part in parts for v in functional.losses(theta, part, count).double().tolist()]


def _summarise_outputs(functional: Functional, theta: Parameters, parts: list[tuple[int, Batch]]) -> Values:
    """Sum the outputs of each probe with fixed weights, or of each piece where outputs have no row for each."""
    found: Values = []
    for count, part in parts:
        z = functional.outputs(theta, part).detach()
        rows = z.reshape(count if z.dim() and len(z) == count else 1, -1).double()
        weights = 1 + draw_noise(len(DISTANCES), rows.shape[1]).to(
            rows
        )  # not around 0: a shift of all outputs shows too
        found += [_round_finite(value) for value in (rows @ weights / math.sqrt(rows.shape[1])).tolist()]
    return found


def _attempt(
    values: Callable[..., Sequence[float | None]],
    functional: Functional,
    place: Parameters,
    parts: list[tuple[int, Batch]],
    count: int,
) -> Values:
    """Try to compute values away from the checkpoint, where a function may fail or be undefined."""
    try:
        found = [_round_finite(value) for value in values(functional, place, parts)]
        return found or [None] * count
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return [None] * count


def _round_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else _round(value)


def _round(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else value


@contextmanager
def _track_precision(task: Task) -> Iterator[list[float]]:
    """Collect the rounding of everything that modules return meanwhile, such as half precision under autocast."""
    dtypes = {task.model.get_parameter(name).dtype for name in task.names}

    def note(module: nn.Module, given: Any, output: Any) -> None:
        dtypes.update(leaf.dtype for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())

    found = [0.0]
    handles = [module.register_forward_hook(note) for module in task.replica.modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        found += [torch.finfo(dtype).eps for dtype in dtypes]
        if torch.float32 in dtypes and task.device.type == "cuda" and _may_use_tensor_float(task.model):
            found.append(2.0**-10)


def _may_use_tensor_float(model: nn.Module) -> bool:
    """Tell whether a GPU may multiply with ten bits, as it does in convolutions and recurrent layers by default."""
    try:
        deep = has_convolutions(model) or any(isinstance(m, nn.RNNBase) for m in model.modules())
        return bool(torch.backends.cuda.matmul.allow_tf32) or (deep and bool(torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # newer settings are in use, which the older ones refuse to tell
        return True


def describe_modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the kind and the plain settings of every module of torch in a model, by its name.

    Other modules are left out: what they do in evaluation mode shows in losses, and they may count or note anything.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            plain = {
                key: _make_plain(value) for key, value in vars(module).items() if key[0] != "_" and _is_plain(value)
            }
            plain.pop("training", None)
            found[name] = {"kind": type(module).__name__, **plain}
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 8 and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= 60 and value.isprintable()
    return value is None or (isinstance(value, bool | int | float) and abs(value) < 2**62)


def _make_plain(value: Any) -> Any:
    return [_make_plain(item) for item in value] if isinstance(value, tuple) else value


def evaluate_regulariser(task: Functional, theta: Parameters) -> list[float]:
    """Compute the regulariser at θ and around it, where a pull towards θ shows too; zeros where there is none."""
    if task.task.regulariser is None:
        return [0.0] * REGULARISERS
    generator = torch.Generator().manual_seed(0)
    values = []
    for distance in np.linspace(0, 1, REGULARISERS):
        moved = {
            name: p + distance * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            for name, p in theta.items()
        }
        with torch.no_grad():
            values.append(float(task.regulariser(moved)))
    return values
