"""Correlations, their intervals, and the ceiling that the noise of retraining sets.

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
_NAN = float("nan")
_NORMAL = 1.959964  # the 97.5% quantile of the normal distribution
_FOLDS = 200  # of the jackknife: more things than this are left out several at a time


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval, which contains it; `low` and `high` are NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.shown(2)

    def shown(self, digits: int) -> str:
        """For a person, with so many digits after the point."""
        if np.isnan(self.low):
            return f"{self.value:.{digits}f} [no interval]"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def jackknife(count: int, statistic: Callable[[Chosen], float], *, correlation: bool = False) -> Estimate:
    """A statistic of `count` independent things, with an interval from leaving each of them out in turn.

    With θ₍ᵢ₎ the value without thing i, the interval is θ ± t·se, t Student's quantile, lengthened on one side by the
    jackknife's estimate of the bias, (n − 1)·(mean θ₍ᵢ₎ − θ). Quantiles of a bootstrap would be no interval here: where
    effects vary more between queries than between sources, every resample has a higher correlation than the data have,
    so percentiles lie above the estimate, reflected ones below it, and BCa is undefined.

    correlation: the statistic is one, so Fisher's arctanh is what gets the symmetric interval.
    """
    everyone = np.arange(count, dtype=np.int64)
    value = statistic(everyone)
    folds = np.array_split(np.random.default_rng(0).permutation(count), min(count, _FOLDS))
    left = np.array([statistic(np.delete(everyone, fold)) for fold in folds]) if count > 1 else np.empty(0)
    if count < 2 or not np.isfinite([value, *left]).all():
        return Estimate(value, _NAN, _NAN)
    to, back = (_fisher, np.tanh) if correlation else (np.asarray, np.asarray)
    centre, others, n = float(to(value)), to(left), len(folds)
    error = student(n - 1) * np.sqrt((n - 1) * others.var())
    unbiased = centre - (n - 1) * (others.mean() - centre)
    low, high = back(min(centre, unbiased) - error), back(max(centre, unbiased) + error)
    return Estimate(value, min(float(low), value), max(float(high), value))  # arctanh and back may lose a last digit


def _fisher(values: Array | float) -> Array:
    return np.asarray(np.arctanh(np.clip(values, -1 + 1e-15, 1 - 1e-15)))


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t, by its expansion in 1/freedom about the normal one.

    >>> [round(student(freedom), 2) for freedom in (1, 2, 3, 10, 100)]
    [12.71, 4.3, 3.18, 2.23, 1.98]
    """
    if freedom < 3:
        return {1: 12.706205, 2: 4.302653}[freedom]
    z = _NORMAL
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return float(sum(term / freedom**power for power, term in enumerate(terms)))


def mean_estimate(values: Array | list[float], within: tuple[float, float] = (-np.inf, np.inf)) -> Estimate:
    """The mean of independent values, those that are NaN left out, with Student's interval over them.

    within: what a value can be, such as (-1, 1) of a correlation. A single value has no interval. Equal ones, as of
        rank correlations over few sources, tell no spread: so many of them show that at most a share 1 - 0.025^(1/n)
        of all values is another, which may lie anywhere within.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if len(array) < 2:
        return Estimate(float(array[0]) if len(array) else _NAN, _NAN, _NAN)
    mean = float(array.mean())
    error = student(len(array) - 1) * float(array.std(ddof=1)) / np.sqrt(len(array))
    low, high = within
    if bool(constant(array)[0]) and np.isfinite(within).all():
        other = 1 - 0.025 ** (1 / len(array))
        return Estimate(mean, mean - other * (mean - low), mean + other * (high - mean))
    return Estimate(mean, min(mean, max(low, mean - error)), max(mean, min(high, mean + error)))


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


Guilty = np.ndarray[Any, np.dtype[np.bool_]]


def area(suspicion: Array, guilty: Guilty) -> float:
    """The area under the ROC curve: how often a guilty one is more suspicious than an innocent one, ties by half.

    >>> area(np.array([0.9, 0.8, 0.1, 0.8]), np.array([True, False, False, True]))
    0.875
    """
    bad = int(guilty.sum())
    good = len(guilty) - bad
    if not bad or not good:
        return float("nan")
    return float((ranks(suspicion)[guilty].sum() - bad * (bad + 1) / 2) / (bad * good))


def area_estimate(suspicion: Array, guilty: Guilty) -> Estimate:
    """The area with Newcombe's score interval: all θ that lie within 1.96 of their own standard errors of it.

    The variance of an area θ is Hanley and McNeil's with both sample sizes at their mean. It is not zero at θ = 1 for
    an observed 1, so a perfect separation of few examples has an interval that says how few.
    """
    value, bad = area(suspicion, guilty), int(guilty.sum())
    good = len(guilty) - bad
    if np.isnan(value):
        return Estimate(value, _NAN, _NAN)
    theta = np.linspace(0, 1, 100_001)
    more = (bad + good) / 2 - 1
    variance = theta * (1 - theta) / (bad * good) * (1 + more * ((1 - theta) / (2 - theta) + theta / (1 + theta)))
    near = theta[np.square(theta - value) <= _NORMAL**2 * variance]
    return Estimate(value, float(min(value, near.min(initial=1.0))), float(max(value, near.max(initial=0.0))))


def area_difference(suspicion: Array, other: Array, guilty: Guilty) -> Estimate:
    """By how much the first area is larger, on the same examples, with DeLong's interval of the difference."""
    value = area(suspicion, guilty) - area(other, guilty)
    if guilty.sum() < 2 or (~guilty).sum() < 2:
        return Estimate(value, _NAN, _NAN)
    variance = 0.0
    for part in (guilty, ~guilty):  # how often each of them is above the others, for both
        above = [(ranks(each)[part] - ranks(each[part])) / (~part).sum() for each in (suspicion, other)]
        variance += float((above[0] - above[1]).var(ddof=1)) / int(part.sum())
    error = _NORMAL * np.sqrt(variance)
    return Estimate(value, max(-1.0, value - error), min(1.0, value + error))
