"""Tests whether a `train(subset, seed)` uses its arguments, by how much its models, and F under them, differ."""

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from imprint.display import strip_addresses
from imprint.store.values import clipped
from imprint.task import Parameters
from imprint.tensors.vectors import root_mean_square

SAME = 1e-3  # relative difference of parameters, or of F, up to which two models count as the same
SMALL = 0.1  # of the spread over subsets; a smaller deviation does not matter
FEW = 3  # how many times the difference of two repetitions still counts as repetition


class Trial(NamedTuple):
    """A trained model: the numbers in its state, and F of the queries under it, shape (1, queries)."""

    state: Parameters
    values: Tensor

    @classmethod
    def of(cls, model: nn.Module, values: Tensor) -> "Trial":
        tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
        return cls({name: t.to("cpu", copy=True) for name, t in tensors.items() if t.is_floating_point()}, values)


def differs(first: Trial, again: Trial, other: Trial) -> bool:
    """Tell whether a change of an argument gives a different model: further away than a few times a repetition.

    F decides where parameters do not, as in models that keep what they learn elsewhere. Where a repetition gives a
    different model altogether, nothing can be concluded, and the answer is True.
    """
    repeated, moved = distance(first.state, again.state), distance(first.state, other.state)
    if repeated > SAME or moved > FEW * repeated:
        return True
    noise = max(
        FEW * root_mean_square(again.values - first.values), SAME * root_mean_square(first.values) if repeated else 0.0
    )
    return root_mean_square(other.values - first.values) > noise


def distance(first: Parameters, second: Parameters) -> float:
    """Return the distance of two models relative to the norm of the first; infinite if their tensors do not match."""
    if {name: t.shape for name, t in first.items()} != {name: t.shape for name, t in second.items()}:
        return float("inf")
    pairs = [(t.double(), second[name].double()) for name, t in first.items()]
    length = sum(float(a.square().sum()) for a, _ in pairs)
    apart = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((apart / length) ** 0.5) if length else (float("inf") if apart else 0.0)


def spread(kept: Mapping[int, Tensor], subsets: int) -> float | None:
    """Return how much F varies among the models of a run; None if no run has two models.

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


def compare_parameters(model: nn.Module, expected: nn.Module) -> str | None:
    """Describe how the parameters of a model differ from those expected; None if names and shapes match."""
    mine, theirs = shapes(model), shapes(expected)
    if lacking := [name for name in theirs if name not in mine]:
        return f"it lacks {lacking[0]!r}"
    if more := [name for name in mine if name not in theirs]:
        return f"it has an extra {more[0]!r}"
    others = (name for name in mine if mine[name] != theirs[name])
    return next((f"{name!r} has shape {mine[name]}, there {theirs[name]}" for name in others), None)


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by name, without the prefix that `torch.compile` adds."""
    return {name.removeprefix("_orig_mod."): tuple(p.shape) for name, p in model.named_parameters()}


def describe_function(train: object) -> str:
    """Name a function; a partial one also by its arguments."""

    def describe(value: object) -> str:
        return clipped(strip_addresses(repr(value)), 100)

    if isinstance(train, partial):
        given = [*map(describe, train.args), *(f"{name}={describe(value)}" for name, value in train.keywords.items())]
        return f"{describe_function(train.func)}({', '.join(given)})"
    return str(getattr(train, "__qualname__", "train"))
