"""Chooses the probes: training examples by whose losses `imprint.store.probing` recognises a task.

They are spread over the data, include every class that a column of the data holds, small, usual and large losses, and
the largest and smallest inputs, where rules that depend on the input show.
"""

import torch
from torch import Tensor

from imprint.batches import leaves
from imprint.data import Data, spread_examples
from imprint.store.probing import split_batch
from imprint.task import Batch, Functional, Parameters

SPREAD = 8  # probes that are spread over the data: the first ones
SIZES = 6  # probes chosen by the size of their losses
EXTREMES = 12  # probes with the largest and the smallest inputs
CLASSES = 48  # values of a column of the data that have a probe each
PROBES = SPREAD + SIZES + EXTREMES + CLASSES

_LOOKED = 128  # examples among which those with small and large losses are found
_BYTES = 16 << 20  # of all probes; the first are kept whatever they take
_SEARCHED = 1 << 20  # numbers at most that are searched for classes within a row
_NONE = torch.zeros(0, dtype=torch.int64)


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
        losses = torch.cat([functional.losses(theta, part, count) for count, part in split_batch(batch, len(looked))])
    order = looked[losses.detach().double().cpu().argsort(stable=True)]
    by_size = order[torch.linspace(0, len(order) - 1, min(SIZES, len(order))).round().long()]
    chosen = [*first.tolist(), *by_size.tolist(), *_find_classes(data, batch, looked)]
    chosen += _find_extremes(data, batch, looked)
    return list(dict.fromkeys(chosen))[:room]


def choose_class_examples(data: Data) -> list[int]:
    """Choose examples spread over the data, and then one of each class."""
    first, looked = spread_examples(len(data)), spread_examples(len(data), _LOOKED)
    return list(dict.fromkeys([*first.tolist(), *_find_classes(data, data.gather(looked), looked)]))


def _find_classes(data: Data, few: Batch, looked: Tensor) -> list[int]:
    """Find one example of each class, in columns that hold classes; in all of the data where it is kept as columns.

    few: the examples `looked` at, as one batch.
    """
    batch, examples = (few, looked) if data.stacked is None else (data.stacked, torch.arange(len(data)))
    found: dict[int, None] = {}
    for leaf, part in zip(leaves(batch), leaves(few), strict=False):
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == len(examples) and not leaf.is_complex():
            found |= dict.fromkeys(examples[_find_first_of_each(leaf)].tolist())
            found |= dict.fromkeys(looked[_find_first_within(part)].tolist())
    return list(found)[:CLASSES]


def _find_extremes(data: Data, few: Batch, looked: Tensor) -> list[int]:
    """Find the largest and the smallest inputs, in all of the data where it is kept as columns.

    few: the examples `looked` at, as one batch.
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


def _find_first_of_each(column: Tensor) -> Tensor:
    """Find the first row of each class; return nothing if the column does not hold classes.

    A row holds either a single class, or one zero or one for each class.
    """
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


def _find_first_within(column: Tensor) -> Tensor:
    """Find the first row that holds each of few integers somewhere, such as the classes of pixels."""
    rows = column.detach().reshape(len(column), -1)
    if rows.is_floating_point() or rows.shape[1] < 2 or rows.numel() > _SEARCHED:
        return _NONE
    values = torch.unique(rows)
    if len(values) > CLASSES:
        return _NONE
    return torch.stack([(rows == value).any(1).int().argmax() for value in values]).cpu()
