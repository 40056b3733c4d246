"""Recognises a task by what it computes: losses, outputs and dropout cannot be hashed, but their values can be kept.

A store keeps some training examples, the probes, and their losses: at a checkpoint, at two places around it that a
fixed sequence of numbers decides, and at the checkpoint with inputs and labels of different probes put together. The
probes are spread over the data, have every class that a column of the data tells, and small, usual and large losses.
Where a fitted model has losses near 0, one loss function looks like another; elsewhere, and with other labels, it does
not. Some probes have the largest and smallest inputs, where rules by input show.

A simulation depends on gradients, and two losses of equal values may have different ones, where one of them detaches
something. So its request has figures of the gradient too. A readout does without: it takes no gradient of the loss.

Values are compared relative to their size and to how far rounding may move them. That is measured by the size of losses
that are not near 0, and by how much a small relative change of the parameters changes the loss.
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
from imprint.data import Data, spread_examples
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.noise import draw_noise, move_parameters

SPREAD = 8  # probes that are spread over the data: the first ones, and all that stores up to schema 5 have
SIZES = 6  # probes chosen by the size of their losses
EXTREMES = 12  # probes with the largest and the smallest inputs
CLASSES = 48  # values of a column of the data that have a probe each
PROBES = SPREAD + SIZES + EXTREMES + CLASSES
GROUPS = 32  # of parameters, each with two figures of the gradient
SINGLE = torch.finfo(torch.float32).eps
DISTANCES = (0.03, 0.5)  # of the places around a checkpoint, relative to each parameter
ELSEWHERE = (*(f" at parameters {distance:.0%} away" for distance in DISTANCES), " with labels of another example")
REGULARISERS = 3

_LOOKED = 128  # examples among which those with small and large losses are found
_BYTES = 16 << 20  # of all probes; the first are kept whatever they take
_SEARCHED = 1 << 20  # numbers at most that are searched for classes within a row
_AT_ONCE = 16  # examples evaluated together
_BACKWARD_AT_ONCE = 4  # … where a gradient is taken, which keeps activations
_RELATIVE = 1e-4  # of a value: what counts as the same
_SLOPE = 1e-3  # of the gradient: what counts as the same
_ROUNDING = 4.0  # how often the rounding of a loss may add up

_NONE = torch.zeros(0, dtype=torch.int64)

Values = list[float | None]
"""Of the probes, in order; None where one is not finite, or could not be computed."""


@dataclass(frozen=True)
class Seen:
    """What a task computes on some probes.

    losses: at the checkpoint, and `moved` in the order of `ELSEWHERE`.
    outputs: one figure of the outputs of each probe, at the checkpoint and around it; None where they are not needed.
    precision: the coarsest rounding on the way.
    gradients: figures of the gradient of all probes together; none where they are not needed, or could not be had.
    """

    losses: list[float]
    moved: list[Values]
    outputs: list[Values] | None
    precision: float
    gradients: list[float] = field(default_factory=list)


# --- which examples


def choose_probes(functional: Functional, theta: Parameters, data: Data) -> list[int]:
    """Choose examples to recognise a loss by: spread over the data, of all losses, inputs and classes."""
    first, looked = spread_examples(len(data)), spread_examples(len(data), min(_LOOKED, data.batch_size))
    few = data.gather(first)
    each = sum(leaf.nbytes for leaf in leaves(few) if isinstance(leaf, Tensor)) / len(first)
    room = min(PROBES, max(SPREAD, data.batch_size), int(_BYTES / max(each, 1.0)))
    if len(data) <= SPREAD or room <= SPREAD:
        return first.tolist()
    batch = data.gather(looked)
    with torch.no_grad():
        losses = torch.cat([functional.losses(theta, part, count) for count, part in _parts(batch, len(looked))])
    order = looked[losses.detach().double().cpu().argsort(stable=True)]
    by_size = order[torch.linspace(0, len(order) - 1, min(SIZES, len(order))).round().long()]
    chosen = [*first.tolist(), *by_size.tolist(), *_one_of_each_class(data, batch, looked)]
    chosen += _extremes(data, batch, looked)
    return list(dict.fromkeys(chosen))[:room]


def class_examples(data: Data) -> list[int]:
    """Examples spread over the data, and then one of each class."""
    first, looked = spread_examples(len(data)), spread_examples(len(data), _LOOKED)
    return list(dict.fromkeys([*first.tolist(), *_one_of_each_class(data, data.gather(looked), looked)]))


def _one_of_each_class(data: Data, few: Batch, looked: Tensor) -> list[int]:
    """One example of each value of the columns that tell classes, among all where they are kept as columns.

    few: the examples that were looked at, as one batch.
    """
    batch, examples = (few, looked) if data.stacked is None else (data.stacked, torch.arange(len(data)))
    found: dict[int, None] = {}
    for leaf, part in zip(leaves(batch), leaves(few), strict=False):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(examples) and not leaf.is_complex():
            found |= dict.fromkeys(examples[_first_of_each(leaf)].tolist())
            found |= dict.fromkeys(looked[_first_within(part)].tolist())
    return list(found)[:CLASSES]


def _extremes(data: Data, few: Batch, looked: Tensor) -> list[int]:
    """Examples with the largest and the smallest inputs, among all where they are kept as columns.

    few: the examples that were looked at, as one batch.
    """
    batch, examples = (few, looked) if data.stacked is None else (data.stacked, torch.arange(len(data)))
    found: dict[int, None] = {}
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(examples) and leaf.is_floating_point():
            rows = leaf.detach().reshape(len(leaf), -1)
            if rows.shape[1] > EXTREMES // 2:  # such as pixels: of all together
                rows = torch.stack([rows.mean(1), rows.amin(1), rows.amax(1)], 1)
            if rows.numel():
                ends = torch.stack([rows.argmax(0), rows.argmin(0)], 1).flatten().cpu()
                found |= dict.fromkeys(examples[ends].tolist())
    return list(found)[:EXTREMES]


def _first_of_each(column: Tensor) -> Tensor:
    """The first row of each class, where a row is one class, or several as zeros and ones; else none."""
    rows = column.detach().reshape(len(column), -1)
    if 1 < rows.shape[1] <= CLASSES and bool(((rows == 0) | (rows == 1)).all()):
        has = rows.bool()
        return has.int().argmax(0)[has.any(0)].cpu()
    if rows.shape[1] != 1:
        return _NONE
    values, inverse = torch.unique(rows[:, 0].cpu(), return_inverse=True)
    if len(values) > (CLASSES if rows.is_floating_point() else max(CLASSES, len(rows) // 2)):  # a number, no class
        return _NONE
    first = torch.full((len(values),), len(rows)).scatter_reduce(0, inverse, torch.arange(len(rows)), "amin")
    return first[spread_examples(len(values), CLASSES)]


def _first_within(column: Tensor) -> Tensor:
    """The first row that has each of few whole numbers somewhere, such as the classes of pixels."""
    rows = column.detach().reshape(len(column), -1)
    if rows.is_floating_point() or rows.shape[1] < 2 or rows.numel() > _SEARCHED:
        return _NONE
    values = torch.unique(rows)
    if len(values) > CLASSES:
        return _NONE
    return torch.stack([(rows == value).any(1).int().argmax() for value in values]).cpu()


# --- what is seen of them


@torch.inference_mode(False)
def see(
    functional: Functional,
    theta: Parameters,
    batch: Batch,
    count: int,
    *,
    outputs: bool = False,
    gradients: bool = False,
) -> Seen:
    """Evaluate a task on the probes of a batch, at θ and around it."""
    parts = _parts(batch, count)
    with torch.no_grad(), _precision(functional.task) as precision:
        losses = _losses(functional, theta, parts)
        shown = [_figures(functional, theta, parts)] if outputs else []
        moved = []
        for number, distance in enumerate(DISTANCES):
            place = move_parameters(theta, distance, number)
            moved.append(_attempt(_losses, functional, place, parts, count))
            if outputs:
                shown.append(_attempt(_figures, functional, place, parts, len(shown[0])))
        moved.append(_attempt(_losses, functional, theta, _mixed(batch, count), count))
        slopes = _slopes(functional, theta, batch, count) if gradients else []
    return Seen([_rounded(loss) for loss in losses], moved, shown if outputs else None, max(precision), slopes)


def see_losses(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """ℓ(θ; i) of the examples of a batch."""
    with torch.no_grad():
        return _losses(functional, theta, _parts(batch, count))


def _slopes(functional: Functional, theta: Parameters, batch: Batch, count: int) -> list[float]:
    """The size of the gradient by each group of parameters, and its share in a fixed direction; nothing if it fails.

    It is that of a weighted sum of losses, with the probes' own labels and with those of others, away from θ: in this
    sum the gradients of a model that fits its data neither vanish nor cancel.
    """
    place = move_parameters(theta, DISTANCES[-1], len(DISTANCES) - 1)
    total = {name: torch.zeros_like(p) for name, p in place.items()}
    parts = [*_parts(batch, count, _BACKWARD_AT_ONCE), *_mixed(batch, count, _BACKWARD_AT_ONCE)]
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
    figures = _by_group(total)
    return [_rounded(value) for value in figures] if all(map(math.isfinite, figures)) else []


def _by_group(gradient: Parameters) -> list[float]:
    """Norms of the parts of a gradient, and then their components along a fixed direction."""
    groups = min(GROUPS, len(gradient))
    squares, along = [0.0] * groups, [0.0] * groups
    for index, slope in enumerate(gradient.values()):
        group, flat = index * groups // len(gradient), slope.detach().flatten().double()
        squares[group] += float(flat @ flat)
        along[group] += float(flat @ draw_noise(len(DISTANCES) + 2, len(flat), 7919 * index).to(flat))
    return [*map(math.sqrt, squares), *along]


def _parts(batch: Batch, count: int, at_once: int = _AT_ONCE) -> list[tuple[int, Batch]]:
    """A batch in small pieces where it can be cut: it must fit in memory wherever the store is read."""
    if not is_columnar(batch, count):
        return [(count, batch)]
    cuts = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    return [(cut.stop - cut.start, map_tensors(itemgetter(cut), batch)) for cut in cuts]


def _mixed(batch: Batch, count: int, at_once: int = _AT_ONCE) -> list[tuple[int, Batch]]:
    """A batch in which each row has its parts from different rows; nothing where it has no rows."""
    turns = itertools.count()
    if not is_columnar(batch, count):
        return []
    return _parts(map_tensors(lambda t: t.roll(next(turns), 0), batch), count, at_once)


def _losses(functional: Functional, theta: Parameters, parts: list[tuple[int, Batch]]) -> list[float]:
    return [v for count, part in parts for v in functional.losses(theta, part, count).double().tolist()]


def _figures(functional: Functional, theta: Parameters, parts: list[tuple[int, Batch]]) -> Values:
    """A weighted sum of the outputs of each probe, or of each piece where outputs have no row for each."""
    found: Values = []
    for count, part in parts:
        z = functional.outputs(theta, part).detach()
        rows = z.reshape(count if z.dim() and len(z) == count else 1, -1).double()
        weights = 1 + draw_noise(len(DISTANCES), rows.shape[1]).to(
            rows
        )  # not around 0: a shift of all outputs shows too
        found += [_finite(value) for value in (rows @ weights / math.sqrt(rows.shape[1])).tolist()]
    return found


def _attempt(
    values: Callable[..., Sequence[float | None]],
    functional: Functional,
    place: Parameters,
    parts: list[tuple[int, Batch]],
    count: int,
) -> Values:
    """Values away from the checkpoint, where a function may fail, or not be defined."""
    try:
        found = [_finite(value) for value in values(functional, place, parts)]
        return found or [None] * count
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return [None] * count


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else _rounded(value)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else value


# --- how exactly


@contextmanager
def _precision(task: Task) -> Iterator[list[float]]:
    """Collect the rounding of all that modules return meanwhile, such as half precision under autocast."""
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
        if torch.float32 in dtypes and task.device.type == "cuda" and _tensor_float(task.model):
            found.append(2.0**-10)


def _tensor_float(model: nn.Module) -> bool:
    """Whether a GPU may multiply with ten bits: in convolutions and recurrent layers by default."""
    try:
        deep = has_convolutions(model) or any(isinstance(m, nn.RNNBase) for m in model.modules())
        return bool(torch.backends.cuda.matmul.allow_tf32) or (deep and bool(torch.backends.cudnn.allow_tf32))
    except RuntimeError:  # newer settings are in use, which the older ones refuse to tell
        return True


def other_loss(before: Seen, now: Seen) -> str | None:
    """The first probe whose loss is another one now, in words; None if all are the same."""
    was: list[Sequence[float | None]] = [before.losses, *before.moved]
    value: list[Sequence[float | None]] = [now.losses, *now.moved]
    return _other("loss on probe example", was, value, max(before.precision, now.precision))


def other_outputs(before: Seen, now: Seen) -> str | None:
    """The same of outputs, where they were kept."""
    if before.outputs is None or now.outputs is None:
        return None
    return _other("output on probe example", before.outputs, now.outputs, max(before.precision, now.precision))


def other_gradients(before: Seen, now: Seen) -> str | None:
    """How much the gradient of the probes is another one now, in words, where both could be had; else None."""
    if not before.gradients or len(before.gradients) != len(now.gradients):
        return None
    largest = max(map(abs, (*before.gradients, *now.gradients)))
    allowed = max(_SLOPE, _ROUNDING * max(before.precision, now.precision)) * largest
    apart = max(abs(was - value) for was, value in zip(before.gradients, now.gradients, strict=True))
    if apart <= allowed:
        return None
    return f"the gradient of the loss on probe examples is off by {100 * apart / largest:.2g}%"


def _other(
    what: str, before: Sequence[Sequence[float | None]], now: Sequence[Sequence[float | None]], precision: float
) -> str | None:
    """The first value that differs by more than its size and the rounding of all allow."""
    unit = _ROUNDING * precision
    usual = max(map(_usual, (*before, *now))) + max(_steepness(before), _steepness(now))
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


def _usual(values: Sequence[float | None]) -> float:
    """The size of a usual value, and so of what it is computed from."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    return float(np.median(sizes)) if sizes else 0.0


def _steepness(values: Sequence[Sequence[float | None]]) -> float:
    """How far a usual probe moves with a relative change of all parameters, for each unit of it."""
    if len(values) < 2:
        return 0.0
    pairs = [(a, b) for a, b in zip(values[0], values[1], strict=False) if a is not None and b is not None]
    return float(np.median([abs(b - a) for a, b in pairs])) / DISTANCES[0] if pairs else 0.0


# --- what losses do not show


def module_settings(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The kind and the plain settings of every module of torch in a model, by its name.

    Other modules are left out: what they do in evaluation mode shows in losses, and they may count or note anything.
    """
    found = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            plain = {key: _plain(value) for key, value in vars(module).items() if key[0] != "_" and _is_plain(value)}
            plain.pop("training", None)
            found[name] = {"kind": type(module).__name__, **plain}
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 8 and all(map(_is_plain, value))
    if isinstance(value, str):
        return len(value) <= 60 and value.isprintable()
    return value is None or (isinstance(value, bool | int | float) and abs(value) < 2**62)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def other_settings(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], *, dropout: bool) -> str | None:
    """The first module that is set otherwise now, in words, of those that both models have.

    dropout: whether the rate of dropout matters, as it does where a simulation draws it.
    """
    for name, was in before.items():
        value = now.get(name, {})
        for key in (key for key in was if key in value):
            if was[key] != value[key] and (dropout or not (was["kind"].startswith("Dropout") and key == "p")):
                about = f"{was['kind']}.{key} was {was[key]}, is {value[key]}"
                return f"module {name!r} of the model is another one: {about}"
    return None


def regulariser_values(task: Functional, theta: Parameters) -> list[float]:
    """r at θ and at places around it, where a pull towards θ shows too; zeros where there is no regulariser."""
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
