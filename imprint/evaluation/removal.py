"""Predicted removal effects against what retraining without each source really does.

Correlations come with a bootstrap 95% interval over queries, and with the ceiling that the noise of retraining sets:
against truth averaged over R runs whose single effects correlate r with each other, a perfect predictor reaches about
√(R·r / (1 + (R − 1)·r)).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from imprint.errors import DataError

Array = np.ndarray[Any, np.dtype[np.float64]]
Chosen = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class RemovalCheck:
    """Predicted effects (queries, sources) beside actual ones (runs, queries, sources).

    Figures over sources compare mean effects over queries; figures per query compare effects on that query.
    """

    predicted: Array
    actual: Array

    def __post_init__(self) -> None:
        if self.actual.ndim != 3 or self.actual.shape[1:] != self.predicted.shape:
            shapes = f"predicted {self.predicted.shape}, actual {self.actual.shape}"
            raise DataError(f"expected predicted (queries, sources) and actual (runs, queries, sources), got {shapes}.")
        if not (np.isfinite(self.predicted).all() and np.isfinite(self.actual).all()):
            raise DataError("predicted and actual effects must be finite.")

    @classmethod
    def of(cls, predicted: Tensor, actual: Tensor) -> "RemovalCheck":
        """From tensors."""
        return cls(predicted.double().cpu().numpy(), actual.double().cpu().numpy())

    def without(self, source: int) -> "RemovalCheck":
        """The same check with one source left out."""
        return RemovalCheck(np.delete(self.predicted, source, 1), np.delete(self.actual, source, 2))

    def guessed(self, guess: Array) -> "RemovalCheck":
        """The same truth against one guess per source for every query, such as its size."""
        return replace(self, predicted=np.broadcast_to(guess.astype(np.float64), self.predicted.shape))

    @cached_property
    def truth(self) -> Array:
        """Actual effects averaged over runs, shape (queries, sources)."""
        return np.asarray(self.actual.mean(0))

    @cached_property
    def standard_error(self) -> Array:
        """Of the actual mean effect of each source, over runs."""
        return np.asarray(self.actual.mean(1).std(0, ddof=1) / np.sqrt(len(self.actual)))

    @cached_property
    def correlation(self) -> Estimate:
        """Pearson, over sources, of predicted and actual mean effects."""
        return self._over_queries(lambda chosen: pearson(self.predicted[chosen].mean(0), self.truth[chosen].mean(0)))

    @cached_property
    def slope(self) -> Estimate:
        """Of actual on predicted mean effects; 1 means that the prediction has the right size."""
        return self._over_queries(lambda chosen: _slope(self.predicted[chosen].mean(0), self.truth[chosen].mean(0)))

    @cached_property
    def ceiling(self) -> float:
        """What a perfect prediction of mean effects would reach against this truth."""
        return ceiling(self.actual.mean(1))

    @cached_property
    def rank_correlations(self) -> Array:
        """Spearman, over sources, of each query; NaN where one side is constant."""
        return np.array([spearman(p, t) for p, t in zip(self.predicted, self.truth, strict=True)])

    @cached_property
    def rank_correlation(self) -> Estimate:
        """The mean of `rank_correlations` over the queries where it is defined."""
        values = self.rank_correlations
        return self._over_queries(lambda chosen: float(np.nanmean(values[chosen])))

    @cached_property
    def rank_ceiling(self) -> float:
        """What a perfect prediction would reach per query, from the mean agreement of single runs."""
        return ceiling(np.apply_along_axis(_ranks, 2, self.actual))

    def _over_queries(self, statistic: Callable[[Chosen], float], resamples: int = 500) -> Estimate:
        queries = len(self.predicted)
        generator = np.random.default_rng(0)
        draws = [statistic(generator.integers(0, queries, queries)) for _ in range(resamples)]
        low, high = np.nanquantile(draws, [0.025, 0.975])
        return Estimate(statistic(np.arange(queries, dtype=np.int64)), float(low), float(high))


def pearson(x: Array, y: Array) -> float:
    """Pearson's correlation; NaN where one side is constant."""
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else float("nan")


def spearman(x: Array, y: Array) -> float:
    """Spearman's rank correlation, ties sharing their mean rank."""
    return pearson(_ranks(x), _ranks(y))


def ceiling(runs: Array) -> float:
    """√(R·r/(1 + (R−1)·r)) for R runs of the truth, shape (runs, …, sources), with mean pairwise correlation r."""
    count = len(runs)
    if count < 2:
        return float("nan")
    centred = runs - runs.mean(-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        units = centred / np.sqrt(np.square(centred).sum(-1, keepdims=True))
    pairs = (np.square(units.sum(0)).sum(-1) - count) / (count * (count - 1))  # mean of their dot products
    r = float(np.nanmean(pairs))
    return float(np.sqrt(count * r / (1 + (count - 1) * r))) if r > 0 else 0.0


def mean_estimate(values: list[float]) -> Estimate:
    """The mean of a few independent values, with a bootstrap interval over them."""
    generator = np.random.default_rng(0)
    array = np.array(values)
    draws = array[generator.integers(0, len(array), (2000, len(array)))].mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(float(array.mean()), float(low), float(high))


def _slope(x: Array, y: Array) -> float:
    x = x - x.mean()
    return float(x @ y) / float(x @ x) if x.any() else float("nan")


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray(last - (counts - 1) / 2)[inverse]
