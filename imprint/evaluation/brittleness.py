"""Brittleness: how few training examples must go for a prediction to flip, when an attribution says which."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from imprint.attribution import Attribution
from imprint.data import query_batches
from imprint.errors import DataError
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.subsets import Subsets
from imprint.progress import Advance
from imprint.sources import Sources
from imprint.task import Task

_FEW = 0.1  # of the queries may be wrong from the start without a warning


@dataclass(frozen=True)
class Brittleness:
    """The share of queries that are wrong once so many sources are removed: chosen by effect, or at random.

    shares, at_random: one for each of `removed`, means over queries and runs.
    before: the share that is wrong with nothing removed; about 0 if the queries were rightly predicted.
    """

    removed: tuple[int, ...]
    shares: tuple[float, ...]
    at_random: tuple[float, ...]
    before: float

    def __str__(self) -> str:
        parts = zip(self.removed, self.shares, self.at_random, strict=True)
        flips = (f"{count} removed: {share:.0%} flip (at random {chance:.0%})" for count, share, chance in parts)
        return "; ".join([*flips, f"none removed: {self.before:.0%} wrong"])


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
    batches = query_batches(queries, device=task.device, batch_size=512, collate_fn=None)
    _check(task, sum(size for size, _ in batches), result, sources, removed)
    helpful = result.removal_effect * (1 if result.labels.better == "lower" else -1)
    order = helpful.argsort(dim=1, descending=True)
    draw = np.random.default_rng(seed)
    chance = torch.from_numpy(np.stack([draw.permutation(len(sources)) for _ in range(len(result))]))
    lists = [
        rows[query, :count].tolist() for rows in (order, chance) for count in removed for query in range(len(result))
    ]
    subsets = Subsets.without(sources, [[], *lists], n=result.labels.n)
    given = (batch for _, batch in batches)
    wrong = retrain(train, task, given, subsets, runs=runs, seed=seed, progress=progress).values < 0
    before = float(wrong[:, 0].double().mean())
    if before > _FEW:
        warnings.warn(
            f"{before:.0%} of the queries are wrong with nothing removed, and count as flipped: ask about queries "
            "that are rightly predicted.",
            stacklevel=2,
        )
    each = wrong[:, 1:].reshape(runs, 2, len(removed), len(result), len(result))
    flipped = each.diagonal(dim1=3, dim2=4).double().mean((0, 3))
    return Brittleness(tuple(removed), tuple(flipped[0].tolist()), tuple(flipped[1].tolist()), before)


def _check(task: Task, count: int, result: Attribution, sources: Sources, removed: Sequence[int]) -> None:
    """Refuse, before anything is trained, what cannot be answered."""
    if task.measure_name != "margin":
        raise DataError(
            f'brittleness needs measure="margin", whose sign is the prediction; this task has {task.measure_name!r}.'
        )
    if result.labels.better is None:
        raise DataError(
            f"the result is of {result.labels.measure!r}, of which nobody knows whether lower or higher is better: "
            'attribute with measure="margin".'
        )
    if len(result) != count:
        raise DataError(f"the result is of {len(result)} queries, {count} are given: attribute these.")
    if result.labels.source_ids != sources.ids:
        raise DataError("the result is of other sources than are given: give those it was simulated with, in order.")
    if not removed or not all(isinstance(number, int) and 1 <= number < len(sources) for number in removed):
        raise DataError(
            f"removed must be whole numbers from 1 to {len(sources) - 1}, fewer than there are sources; "
            f"got {tuple(removed)}."
        )
