"""How well predicted effects of leaving out sets of presidents rank the real ones; used by benchmarks/publishers.py."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import combinations

import numpy as np
from torch import Tensor

from imprint.statistics import Array, Chosen, Estimate, ceiling, centre, correlations, jackknife, ranks

Figure = Callable[[Chosen, Chosen, Chosen], float]
"""Computes something from some runs of the ground truth, some queries and some sets."""


class Sets:
    """Sets that were really left out, with the Spearman correlation over them of scores and effects, per query.

    Intervals are a jackknife's, over sets, queries and runs of the ground truth. They say nothing about the training
    run that the scores are of.
    """

    def __init__(self, removed: Tensor, actual: Array, n: int) -> None:
        """removed: (sets, sources), true where a set lacks a source. actual: effects, (runs, queries, sets)."""
        self.removed, self.actual, self.n = removed.double(), actual, n

    def select(self, sets: Tensor, queries: slice = slice(None)) -> "Sets":
        """Return some of the sets, on some of the queries."""
        return Sets(self.removed[sets], self.actual[:, queries][:, :, sets.numpy()], self.n)

    @property
    def ceiling(self) -> float:
        """What a perfect predictor would reach, from the agreement of runs; NaN with one run."""
        return ceiling(ranks(self.actual))

    @property
    def agreement(self) -> float:
        """The mean correlation of one run's effects with another's; NaN with one run."""
        pairs = combinations(self.actual, 2)
        found = [mean_correlation(one, two) for one, two in pairs]
        return float(np.mean(found)) if found else float("nan")

    def value(self, scores: Tensor) -> float:
        """Return the mean correlation alone."""
        return mean_correlation(self._predict(scores), self.actual.mean(0))

    def correlate(self, scores: Tensor) -> dict[str, float]:
        """Return the mean correlation with its interval, and the slope of real on predicted effects."""
        predicted = self._predict(scores)
        away, rises = centre(predicted), centre(self.actual.mean(0))
        slope = float((away * rises).sum() / max(np.square(away).sum(), 1e-300))
        return {**asdict(self._estimate(partial(self._figure, predicted), correlation=True)), "slope": slope}

    def differ(self, scores: Tensor, others: Tensor) -> dict[str, float]:
        """Return by how much the mean correlation exceeds that of other scores, with its interval."""
        one, two = (partial(self._figure, self._predict(each)) for each in (scores, others))
        return asdict(self._estimate(lambda *chosen: one(*chosen) - two(*chosen), correlation=False))

    def _predict(self, scores: Tensor) -> Array:
        found: Array = (-(scores.double() @ self.removed.T) / self.n).numpy()
        return found

    def _figure(self, predicted: Array, runs: Chosen, queries: Chosen, sets: Chosen) -> float:
        truth = self.actual[runs].mean(0)
        return mean_correlation(predicted[np.ix_(queries, sets)], truth[np.ix_(queries, sets)])

    def _estimate(self, figure: Figure, *, correlation: bool) -> Estimate:
        runs, queries, sets = (np.arange(size) for size in self.actual.shape)
        levels = [
            np.array([figure(np.delete(runs, one), queries, sets) for one in runs[: len(runs) * (len(runs) > 1)]]),
            np.array([figure(runs, np.delete(queries, one), sets) for one in queries]),
        ]
        return jackknife(len(sets), partial(figure, runs, queries), correlation=correlation, runs=levels)


def mean_correlation(predicted: Array, truth: Array) -> float:
    """Return the Spearman correlation over sets, averaged over the queries for which it is defined."""
    found = correlations(ranks(predicted), ranks(truth))
    return float(np.nanmean(found)) if np.isfinite(found).any() else float("nan")


def find_removed(membership: Tensor) -> Tensor:
    """Return which sources each set lacks, (sets, sources), without the baseline."""
    lacking = ~membership
    return lacking[lacking.any(1)]
