"""Correlations, bootstrap intervals, and the ceiling that the noise of retraining sets.

Against truth averaged over R runs whose single values correlate r with each other, a perfect predictor reaches about
√(R·r / (1 + (R − 1)·r)). That is an upper estimate where queries differ in noise: the formula is concave in r, so at
the mean r it lies above the mean of what each query's own r allows (Jensen). What the mean of the other runs reaches
against one is the lower estimate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
ROUNDING = 1e-12  # relative: what equal values may differ by
Chosen = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def bootstrap(count: int, statistic: Callable[[Chosen], float], resamples: int = 500) -> Estimate:
    """A statistic of `count` independent things, with the interval of its values on resampled ones."""
    generator = np.random.default_rng(0)
    draws = np.array([statistic(generator.integers(0, count, count)) for _ in range(resamples)])
    value = statistic(np.arange(count, dtype=np.int64))
    if not np.isfinite(draws).any():
        return Estimate(value, float("nan"), float("nan"))
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Estimate(value, float(low), float(high))


def mean_estimate(values: Array | list[float]) -> Estimate:
    """The mean of independent values, those that are NaN left out, with a bootstrap interval over them."""
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if not len(array):
        return Estimate(float("nan"), float("nan"), float("nan"))
    draws = array[np.random.default_rng(0).integers(0, len(array), (2000, len(array)))].mean(1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Estimate(float(array.mean()), float(low), float(high))


def pearson(x: Array, y: Array) -> float:
    """Pearson's correlation; NaN where one side is constant."""
    return float(correlations(x[None], y[None])[0])


def correlations(x: Array, y: Array) -> Array:
    """Pearson's correlation of each row, shape (rows,); NaN where one side is constant."""
    return np.asarray((units(x) * units(y)).sum(-1))


def units(values: Array) -> Array:
    """Each row centred and scaled to length 1; NaN where it is constant."""
    away = centred(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(away / np.sqrt(np.square(away).sum(-1, keepdims=True)))


def centred(values: Array) -> Array:
    """Each row about its mean; zero where it is constant."""
    return np.where(constant(values), 0.0, values - values.mean(-1, keepdims=True))


def constant(values: Array, rounding: float = ROUNDING) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which rows are constant but for rounding, as sums of equally many equal scores are, shape (…, 1)."""
    spread = values.max(-1, keepdims=True) - values.min(-1, keepdims=True)
    return np.asarray(spread <= rounding * np.abs(values).max(-1, keepdims=True))


def ranks(values: Array) -> Array:
    """Ranks along the last axis, ties sharing their mean rank."""
    values = np.where(constant(values), 0.0, values)
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, -1)
    place, (before, after) = np.arange(values.shape[-1]), (ordered[..., :-1], ordered[..., 1:])
    differs = (before != after) & ~(np.isnan(before) & np.isnan(after))
    edge = np.ones((*values.shape[:-1], 1), dtype=bool)
    first = np.maximum.accumulate(np.where(np.concatenate([edge, differs], -1), place, 0), -1)
    last = np.minimum.accumulate(np.where(np.concatenate([differs, edge], -1), place, len(place))[..., ::-1], -1)
    found = np.empty(values.shape)
    np.put_along_axis(found, order, (first + last[..., ::-1]) / 2 + 1, -1)
    return found


def ceiling(runs: Array, averaged: int | None = None) -> float:
    """√(R·r/(1 + (R−1)·r)) for R runs of the truth, shape (runs, …, things), with mean pairwise correlation r.

    An upper estimate of what a perfect predictor reaches on average, the more so the more rows differ in their noise.
    averaged: R, where the truth is the mean of fewer runs than tell the noise.
    """
    count = len(runs)
    if count < 2:
        return float("nan")
    pairs = (np.square(units(runs).sum(0)).sum(-1) - count) / (count * (count - 1))  # mean of their dot products
    if not np.isfinite(pairs).any():
        return float("nan")
    r, mean = float(np.nanmean(pairs)), averaged or count
    return float(np.sqrt(mean * r / (1 + (mean - 1) * r))) if r > 0 else 0.0


def slope(x: Array, y: Array) -> float:
    """Of y on x, with an intercept; NaN where x is constant."""
    x = centred(x)
    return float(x @ y) / float(x @ x) if x.any() else float("nan")


def area(suspicion: Array, guilty: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """The area under the ROC curve: how often a guilty one is more suspicious than an innocent one, ties by half.

    >>> area(np.array([0.9, 0.8, 0.1, 0.8]), np.array([True, False, False, True]))
    0.875
    """
    bad = int(guilty.sum())
    good = len(guilty) - bad
    if not bad or not good:
        return float("nan")
    return float((ranks(suspicion)[guilty].sum() - bad * (bad + 1) / 2) / (bad * good))
