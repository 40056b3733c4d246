"""Brittleness: how few training examples must go for a prediction to flip, when an attribution says which."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.data import query_batches
from imprint.errors import DataError
from imprint.evaluation.metrics import (
    Metric,
    averaged,
    check_measures,
    check_origin,
    check_queries,
    check_sources,
    usable_scores,
)
from imprint.evaluation.retraining import Together, Train, retrain
from imprint.evaluation.statistics import constant
from imprint.evaluation.subsets import CHANCE, Subsets, derived, whole
from imprint.runtime.progress import Advance
from imprint.sources import Sources
from imprint.store.fingerprint import of_batches, of_data, probe_measures
from imprint.store.request import describe
from imprint.task import Task, require_task

_FEW = 0.1  # of the queries may be wrong from the start without a warning


@dataclass(frozen=True)
class Brittleness:
    """The share of queries that are wrong once so many sources are removed: chosen by effect, or at random.

    shares, at_random: one for each of `removed`; `per_query` has the share of the runs in which that query is wrong.
    before: the share that is wrong with nothing removed; about 0 if the queries were rightly predicted.
    """

    removed: tuple[int, ...]
    shares: tuple[Metric, ...]
    at_random: tuple[Metric, ...]
    before: float

    def __str__(self) -> str:
        parts = zip(self.removed, self.shares, self.at_random, strict=True)
        flips = (
            f"{count} removed: {share.estimate.value:.0%} flip (at random {chance.estimate.value:.0%})"
            for count, share, chance in parts
        )
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
    _check_task(task, result, sources)
    counts, runs = _counts(removed, len(sources)), whole("runs", runs, 1)
    batches = query_batches(queries, device=task.device, batch_size=512, collate_fn=None)
    scores = _scores(result, sources, sum(size for size, _ in batches), of_batches(batches))
    known = {"parameters": describe(task), "data": of_data(train.examples) if isinstance(train, Together) else None}
    check_origin(result.labels, known)
    check_measures(result.labels, probe_measures(task, batches) if result.labels.measure == "margin" else [])
    order = (scores * (1 if result.labels.better == "higher" else -1)).argsort(dim=1, descending=True)
    draw = np.random.default_rng(derived(seed, CHANCE))
    chance = torch.from_numpy(np.stack([draw.permutation(len(sources)) for _ in range(len(result))]))
    lists = [
        rows[query, :count].tolist() for rows in (order, chance) for count in counts for query in range(len(result))
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
    each = wrong[:, 1:].reshape(runs, 2, len(counts), len(result), len(result))
    flipped = each.diagonal(dim1=3, dim2=4).double().mean(0).numpy()  # (2, counts, queries)
    shares, at_random = (
        tuple(
            averaged(f"flipped without {count}{how}", row, within=(0, 1))
            for count, row in zip(counts, rows, strict=True)
        )
        for rows, how in zip(flipped, ("", " at random"), strict=True)
    )
    return Brittleness(counts, shares, at_random, before)


def _check_task(task: Task, result: Attribution, sources: Sources) -> None:
    """Refuse, before anything is trained, what cannot be answered."""
    require_task(task)
    if not isinstance(result, Attribution) or not isinstance(sources, Sources):
        raise DataError(
            f"brittleness needs an Attribution and the Sources it is of, got {type(result).__name__} and "
            f"{type(sources).__name__}."
        )
    if task.measure_name != "margin":
        raise DataError(
            f'brittleness needs measure="margin", whose sign is the prediction; this task has {task.measure_name!r}.'
        )
    if result.labels.better is None:
        raise DataError(
            f"the result is of {result.labels.measure!r}, of which nobody knows whether lower or higher is better: "
            'attribute with measure="margin".'
        )


def _counts(removed: Sequence[int], sources: int) -> tuple[int, ...]:
    """How many sources are removed, as whole numbers."""
    known = isinstance(removed, Sequence) and all(isinstance(n, int | np.integer) and 1 <= n < sources for n in removed)
    if not known or not removed:
        raise DataError(
            f"removed must be whole numbers from 1 to {sources - 1}, fewer than there are sources; got {removed!r}."
        )
    return tuple(map(int, removed))


def _scores(result: Attribution, sources: Sources, count: int, known: str) -> Tensor:
    """Scores of these queries and sources, none of which are the same for all sources."""
    if len(result) != count:
        raise DataError(f"the result is of {len(result)} queries, {count} are given: attribute these.")
    check_sources(result.labels, sources)
    scores = usable_scores(result.scores, count, len(sources))
    check_queries(result, count, known)
    if (flat := np.flatnonzero(constant(scores.numpy()))).size:
        raise DataError(f"the scores of query {flat[0]} are the same for every source: there is none to remove first.")
    return scores
