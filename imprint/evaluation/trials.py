"""Whether a `train(subset, seed)` does what it is asked: judged by how far its models, and F under them, are apart."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from imprint.display import strip_addresses
from imprint.store.values import clipped
from imprint.task import Parameters

SAME = 1e-3  # of the length of the parameters, or of F: what counts as the same model
SMALL = 0.1  # of the spread over subsets: a deviation that changes no truth
FEW = 3  # times what repeating does: what may come of repeating


class Trial(NamedTuple):
    """A trained model: the numbers in its state, and F of the queries under it, shape (1, queries)."""

    state: Parameters
    values: Tensor

    @classmethod
    def of(cls, model: nn.Module, values: Tensor) -> "Trial":
        tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        return cls({name: t.to("cpu", copy=True) for name, t in tensors.items() if t.is_floating_point()}, values)


def heard(first: Trial, again: Trial, other: Trial) -> bool:
    """Whether a change makes another model: one further away than a few times what repeating the same does.

    F decides where parameters do not, as in models that keep what they learn elsewhere. Where repeating gives another
    model altogether nothing can be told, and the change counts as heard.
    """
    repeated, moved = distance(first.state, again.state), distance(first.state, other.state)
    if repeated > SAME or moved > FEW * repeated:
        return True
    noise = max(FEW * size(again.values - first.values), SAME * size(first.values) if repeated else 0.0)
    return size(other.values - first.values) > noise


def distance(first: Parameters, second: Parameters) -> float:
    """Between two models, relative to the length of the first; infinite if they have other tensors."""
    if {name: t.shape for name, t in first.items()} != {name: t.shape for name, t in second.items()}:
        return float("inf")
    pairs = [(t.double(), second[name].double()) for name, t in first.items()]
    length = sum(float(a.square().sum()) for a, _ in pairs)
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((apart / length) ** 0.5) if length else (float("inf") if apart else 0.0)


def size(values: Tensor) -> float:
    """The root of the mean square."""
    return float(values.square().mean().sqrt())


def spread(kept: Mapping[int, Tensor], subsets: int) -> float | None:
    """By how much F differs among the kept models of a run, about its mean; None if no run has two of them.

    kept: F of the queries under each model, by its number.
    """
    runs: defaultdict[int, list[Tensor]] = defaultdict(list)
    for model, values in kept.items():
        runs[model // subsets].append(values)
    several = [torch.stack(rows) for rows in runs.values() if len(rows) > 1]
    if not several:
        return None
    squares = sum(float((rows - rows.mean(0)).square().mean(1).sum()) for rows in several)
    return float((squares / sum(len(rows) - 1 for rows in several)) ** 0.5)


def misfit(model: nn.Module, expected: nn.Module) -> str | None:
    """How the parameters of a model differ from those expected, in words; None if names and shapes are the same."""
    mine, theirs = shapes(model), shapes(expected)
    if lacking := [name for name in theirs if name not in mine]:
        return f"it lacks {lacking[0]!r}"
    if more := [name for name in mine if name not in theirs]:
        return f"it has {more[0]!r} beside them"
    others = (name for name in mine if mine[name] != theirs[name])
    return next((f"{name!r} has shape {mine[name]}, there {theirs[name]}" for name in others), None)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all parameters, by the names they have without the wrapper of `torch.compile`."""
    return {name.removeprefix("_orig_mod."): tuple(p.shape) for name, p in model.named_parameters()}


def called(train: object) -> str:
    """A function by its name; a partial one also by what it was given."""
    if isinstance(train, partial):
        given = [*map(_shown, train.args), *(f"{name}={_shown(value)}" for name, value in train.keywords.items())]
        return f"{called(train.func)}({', '.join(given)})"
    return str(getattr(train, "__qualname__", "train"))


def _shown(value: object) -> str:
    return clipped(strip_addresses(repr(value)), 100)
