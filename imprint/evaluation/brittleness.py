"""Brittleness: how few training examples must go for a prediction to flip, when an attribution says which."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from imprint.attribution import Attribution
from imprint.errors import DataError
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.subsets import Subsets
from imprint.progress import Advance
from imprint.sources import Sources
from imprint.task import Task


@dataclass(frozen=True)
class Brittleness:
    """The share of queries whose prediction flips once so many sources are removed: chosen by effect, or at random.

    shares, at_random: one for each of `removed`, means over queries and runs.
    """

    removed: tuple[int, ...]
    shares: tuple[float, ...]
    at_random: tuple[float, ...]

    def __str__(self) -> str:
        parts = zip(self.removed, self.shares, self.at_random, strict=True)
        return "; ".join(
            f"{count} removed: {share:.0%} flip (at random {chance:.0%})" for count, share, chance in parts
        )


def brittleness(
    train: Train | Together,
    task: Task,
    queries: Any,
    result: Attribution,
    sources: Sources,
    *,
    removed: Sequence[int] = (10, 20, 40, 80),
    runs: int = 1,
    seed: int = 0,
    progress: bool | Advance = True,
) -> Brittleness:
    """Retrain without the sources that hold up each query most, and see whether its prediction flips.

    task: must measure a margin, which is negative exactly where the prediction is wrong.
    queries: a few, rightly predicted; `result` attributes them to `sources`.
    """
    if task.measure_name != "margin":
        raise DataError(
            f'brittleness needs measure="margin", whose sign is the prediction; this task has {task.measure_name!r}.'
        )
    if max(removed) >= len(sources):
        raise DataError(f"{max(removed)} sources cannot be removed: there are {len(sources)}.")
    helpful = result.removal_effect * (1 if result.labels.better == "lower" else -1)
    order = helpful.argsort(dim=1, descending=True)
    draw = np.random.default_rng(seed)
    chance = torch.from_numpy(np.stack([draw.permutation(len(sources)) for _ in range(len(result))]))
    lists = [
        rows[query, :count].tolist() for rows in (order, chance) for count in removed for query in range(len(result))
    ]
    truth = retrain(train, task, queries, Subsets.without(sources, lists), runs=runs, seed=seed, progress=progress)
    each = truth.values.reshape(runs, 2, len(removed), len(result), len(result))
    flipped = (each.diagonal(dim1=3, dim2=4) < 0).double().mean((0, 3))
    return Brittleness(tuple(removed), tuple(flipped[0].tolist()), tuple(flipped[1].tolist()))
