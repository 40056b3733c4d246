"""Measures brittleness: how few training examples must be removed to flip a prediction, chosen by an attribution."""

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
from imprint.evaluation.matching import check_measures, check_origin, check_queries, check_sources, require_scores
from imprint.evaluation.metrics import Metric, average_metric
from imprint.evaluation.retraining import retrain
from imprint.evaluation.subsets import CHANCE, Subsets, derive_seed, require_whole
from imprint.evaluation.together import Together, Train
from imprint.runtime.progress import Advance
from imprint.sources import Sources
from imprint.statistics import Array, is_constant
from imprint.store.fingerprint import of_batches, of_data, probe_measures
from imprint.store.request import describe
from imprint.task import Task, require_task

_FEW = 0.1  # of the queries; more that are wrong from the start trigger a warning


@dataclass(frozen=True)
class Brittleness:
    """The share of queries that are predicted wrongly after sources are removed, chosen by effect or at random.

    removed: how many sources are removed; `shares` and `at_random` have one metric for each number. `per_query` is the
        share of runs in which the query is predicted wrongly.
    before: the share that is wrong with nothing removed; about 0 if the queries were predicted correctly.
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
    """Retrain without the sources that support each query most, and see whether its prediction flips.

    task: must measure a margin, which is negative exactly where the prediction is wrong.
    queries: a few correctly predicted ones, which `result` attributes to `sources`.
    """
    _check_arguments(task, result, sources)
    counts, runs = _to_counts(removed, len(sources)), require_whole("runs", runs, 1)
    batches = query_batches(queries, device=task.device, batch_size=512, collate_fn=None)
    scores = _match_scores(result, sources, sum(size for size, _ in batches), of_batches(batches))
    known = {"parameters": describe(task), "data": of_data(train.examples) if isinstance(train, Together) else None}
    check_origin(result.labels, known)
    check_measures(result.labels, probe_measures(task, batches) if result.labels.measure == "margin" else [])
    order = (scores * (1 if result.labels.better == "higher" else -1)).argsort(dim=1, descending=True)
    draw = np.random.default_rng(derive_seed(seed, CHANCE))
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
            f"{before:.0%} of the queries are wrong with nothing removed, and count as flipped: use queries that are "
            "predicted correctly.",
            stacklevel=2,
        )
    each = wrong[:, 1:].reshape(runs, 2, len(counts), len(result), len(result))
    flipped = each.diagonal(dim1=3, dim2=4).double().numpy()  # (runs, 2, counts, queries)
    shares, at_random = (
        tuple(_average(f"flipped without {count}{how}", flipped[:, part, place]) for place, count in enumerate(counts))
        for part, how in enumerate(("", " at random"))
    )
    return Brittleness(counts, shares, at_random, before)


def _average(name: str, flipped: Array) -> Metric:
    """Average the flips of some runs, shape (runs, queries)."""
    runs, total = len(flipped), flipped.sum(0)
    left_out = np.array([(total - run).mean() / (runs - 1) for run in flipped]) if runs > 1 else np.empty(0)
    return average_metric(name, total / runs, within=(0, 1), runs=[left_out])


def _check_arguments(task: Task, result: Attribution, sources: Sources) -> None:
    """Refuse wrong arguments before anything is trained."""
    require_task(task)
    if not isinstance(result, Attribution) or not isinstance(sources, Sources):
        raise DataError(
            f"brittleness needs an Attribution and its Sources, got {type(result).__name__} and "
            f"{type(sources).__name__}."
        )
    if task.measure_name != "margin":
        raise DataError(
            f'brittleness needs measure="margin", whose sign is the prediction; this task has {task.measure_name!r}.'
        )
    if result.labels.better is None:
        raise DataError(
            f"the result measures {result.labels.measure!r}, for which it is unknown whether lower or higher is "
            "better: "
            'attribute with measure="margin".'
        )


def _to_counts(removed: Sequence[int], sources: int) -> tuple[int, ...]:
    """Return the numbers of removed sources as plain integers."""
    known = isinstance(removed, Sequence) and all(isinstance(n, int | np.integer) and 1 <= n < sources for n in removed)
    if not known or not removed:
        raise DataError(
            f"removed must be whole numbers from 1 to {sources - 1}, fewer than there are sources; got {removed!r}."
        )
    return tuple(map(int, removed))


def _match_scores(result: Attribution, sources: Sources, count: int, known: str) -> Tensor:
    """Return scores of these queries and sources; refuse a query whose scores are the same for all sources."""
    if len(result) != count:
        raise DataError(f"the result has {len(result)} queries, but {count} are given: attribute these.")
    check_sources(result.labels, sources)
    scores = require_scores(result.scores, count, len(sources))
    check_queries(result, count, known)
    if (flat := np.flatnonzero(is_constant(scores.numpy()))).size:
        raise DataError(f"the scores of query {flat[0]} are the same for every source, so none can be removed first.")
    return scores
