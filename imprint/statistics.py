"""Computes correlations, their intervals, and the ceiling set by the noise of retraining.

Against ground truth averaged over R runs, whose single runs correlate r with each other, a perfect predictor reaches
about √(R·r / (1 + (R − 1)·r)). This is an upper estimate where queries differ in noise: the formula is concave in r, so
at the mean r it lies above the mean over the r of each query (Jensen). What the mean of the other runs reaches against
one run is the lower estimate.

Runs share their error over all queries, so a figure over queries that rests on several runs is resampled on two levels:
runs first, then queries. Their variances add up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
ROUNDING = 1e-12  # relative difference that equal values may have
Chosen = np.ndarray[Any, np.dtype[np.int64]]
_NAN = float("nan")
_NORMAL = 1.959964  # the 97.5% quantile of the normal distribution
_FOLDS = 200  # of the jackknife; more items than this are left out several at a time


@dataclass(frozen=True)
class Estimate:
    """A number with its 95% interval, which contains it; `low` and `high` are NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.format(2)

    def format(self, digits: int) -> str:
        """Format the value and its interval with this many digits after the point."""
        if np.isnan(self.low):
            return f"{self.value:.{digits}f} [no interval]"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def jackknife(
    count: int, statistic: Callable[[Chosen], float], *, correlation: bool = False, runs: Sequence[Array] = ()
) -> Estimate:
    """Estimate a statistic of `count` independent items, with an interval from leaving each of them out in turn.

    With θ₍ᵢ₎ the value without item i, the interval is θ ± t·se, t Student's quantile, lengthened on one side by the
    jackknife's estimate of the bias, (n − 1)·(mean θ₍ᵢ₎ − θ). Quantiles of a bootstrap would be no interval here: where
    effects vary more between queries than between sources, every resample has a higher correlation than the data have,
    so percentiles lie above the estimate, reflected ones below it, and BCa is undefined.

    correlation: the statistic is one, so the interval is symmetric after Fisher's arctanh.
    runs: the statistic of all items with each run left out in turn: one array for each set of runs that it rests on,
        such as those of the ground truth. The variances over runs and over items add up. An array of one value says
        nothing, and is left out.
    """
    everyone = np.arange(count, dtype=np.int64)
    value = statistic(everyone)
    folds = np.array_split(np.random.default_rng(0).permutation(count), min(count, _FOLDS))
    left = np.array([statistic(np.delete(everyone, fold)) for fold in folds]) if count > 1 else np.empty(0)
    if count < 2 or not np.isfinite([value, *left]).all():
        return Estimate(value, _NAN, _NAN)
    to, back = (_fisher, np.tanh) if correlation else (np.asarray, np.asarray)
    centre, others, n = float(to(value)), to(left), len(folds)
    error = _add_levels([_leave_out(others), *(_leave_out(to(each)) for each in runs if len(each) > 1)])
    if not np.isfinite(error):
        return Estimate(value, _NAN, _NAN)
    unbiased = centre - (n - 1) * (others.mean() - centre)
    low, high = back(min(centre, unbiased) - error), back(max(centre, unbiased) + error)
    return Estimate(
        value, min(float(low), value), max(float(high), value)
    )  # arctanh and back may change the last digit


def _fisher(values: Array | float) -> Array:
    return np.asarray(np.arctanh(np.clip(values, -1 + 1e-15, 1 - 1e-15)))


Level = tuple[float, int]
"""The variance of a figure by sampling on one level, and the degrees of freedom it is known with."""


def _leave_out(left: Array) -> Level:
    """Return the jackknife's variance, from the values without each item."""
    return float((len(left) - 1) * left.var()), len(left) - 1


def _add_levels(levels: Sequence[Level]) -> float:
    """Return half the length of the 95% interval of a figure whose independent variances add up.

    The quantile is Cochran's, the mean of Student's weighted with the variances. Where a variance is known from two
    runs, Welch's interval covers in 88% of cases, this one in 94% or more.
    """
    variance = sum(each for each, _ in levels)
    if not variance > 0:
        return variance  # 0, or NaN where a value is undefined
    return sum(each * student_quantile(freedom) for each, freedom in levels) / math.sqrt(variance)


def student_quantile(freedom: int, level: float = 0.95) -> float:
    """Return the t that Student's distribution stays within, on both sides, with this probability.

    With t = √ν·tan φ, the probability of |T| < t is ∝ ∫₀^φ cos^(ν−1), where φ goes up to π/2.

    >>> [round(student_quantile(freedom), 2) for freedom in (1, 2, 3, 10, 100)]
    [12.71, 4.3, 3.18, 2.23, 1.98]
    """
    if not 0 < level < 1 or freedom < 1:
        raise ValueError(f"a quantile needs a level between 0 and 1 and some freedom, got {level} and {freedom}.")
    return float(_student_quantiles(freedom, np.array([level]))[0])


def _student_quantiles(freedom: int, levels: Array) -> Array:
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    low, high = np.zeros(len(levels)), np.full(len(levels), math.pi / 2)
    for _ in range(60):
        middle = (low + high) / 2
        inside = middle * (np.cos(middle[:, None] * (1 + _NODES) / 2) ** (freedom - 1) @ _WEIGHTS)
        below = inside < levels * whole
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return np.asarray(math.sqrt(freedom) * np.tan((low + high) / 2))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)  # of Gauss's quadrature on [-1, 1]


def mean_estimate(
    values: Array | list[float],
    within: tuple[float, float] = (-np.inf, np.inf),
    *,
    runs: Sequence[Array] = (),
    levels: Sequence[Level] = (),
) -> Estimate:
    """Average independent values, leaving out NaN, with Student's interval.

    A single value has no interval. Equal values, as of rank correlations over few sources, show no spread: n of them
    show that at most a share 1 - 0.025^(1/n) of all values differs, which may lie anywhere `within` the range.

    within: the range of a value, such as (-1, 1) for a correlation.
    runs: the mean with each run left out in turn, as in `jackknife`.
    levels: further variances of the mean, each with the degrees of freedom it is known with.
    """
    array = np.asarray(values, dtype=np.float64)
    array = array[~np.isnan(array)]
    if len(array) < 2:
        return Estimate(float(array[0]) if len(array) else _NAN, _NAN, _NAN)
    mean = float(array.mean())
    between = [*(_leave_out(each) for each in runs if len(each) > 1), *levels]
    error = _add_levels([(float(array.var(ddof=1)) / len(array), len(array) - 1), *between])
    if not np.isfinite(error):
        return Estimate(mean, _NAN, _NAN)
    low, high = within
    if bool(is_constant(array)[0]) and np.isfinite(within).all():
        other, more = 1 - 0.025 ** (1 / len(array)), _add_levels(between) if between else 0.0
        low, high = (
            max(low, mean - math.hypot(other * (mean - low), more)),
            min(high, mean + math.hypot(other * (high - mean), more)),
        )
        return Estimate(mean, min(mean, low), max(mean, high))
    return Estimate(mean, min(mean, max(low, mean - error)), max(mean, min(high, mean + error)))


def mean_defined(values: Array) -> float:
    """Average values, leaving out NaN; NaN where there is no other."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else _NAN


def pearson(x: Array, y: Array) -> float:
    """Compute Pearson's correlation; NaN where one side is constant."""
    return float(correlations(x[None], y[None])[0])


def correlations(x: Array, y: Array) -> Array:
    """Compute Pearson's correlation of each row, shape (rows,); NaN where one side is constant."""
    return np.asarray((standardise(x) * standardise(y)).sum(-1))


def standardise(values: Array) -> Array:
    """Centre each row and scale it to length 1; NaN where it is constant."""
    away = centre(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(away / np.sqrt(np.square(away).sum(-1, keepdims=True)))


def centre(values: Array) -> Array:
    """Subtract the mean of each row; zero where it is constant."""
    return np.where(is_constant(values), 0.0, values - values.mean(-1, keepdims=True))


def is_constant(values: Array, rounding: float = ROUNDING) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tell which rows are constant up to rounding, shape (…, 1)."""
    spread = values.max(-1, keepdims=True) - values.min(-1, keepdims=True)
    return np.asarray(spread <= rounding * np.abs(values).max(-1, keepdims=True))


def ranks(values: Array) -> Array:
    """Rank along the last axis; ties share their mean rank."""
    values = np.where(is_constant(values), 0.0, values)
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
    """Compute √(R·r/(1 + (R−1)·r)) for R runs, shape (runs, …, items), with mean pairwise correlation r.

    It is an upper estimate of what a perfect predictor reaches, the more so the more rows differ in noise.

    averaged: R, if the ground truth is the mean of fewer runs than are given.
    """
    count = len(runs)
    if count < 2:
        return float("nan")
    pairs = (np.square(standardise(runs).sum(0)).sum(-1) - count) / (count * (count - 1))  # mean of their dot products
    if not np.isfinite(pairs).any():
        return float("nan")
    r, mean = float(np.nanmean(pairs)), averaged or count
    return float(np.sqrt(mean * r / (1 + (mean - 1) * r))) if r > 0 else 0.0


def slope(x: Array, y: Array) -> float:
    """Compute the slope of y on x, with an intercept; NaN where x is constant."""
    x = centre(x)
    return float(x @ y) / float(x @ x) if x.any() else float("nan")


def find_p_values(differences: Array, levels: Sequence[tuple[Array, int]]) -> Array:
    """Return how often chance alone would make each difference as large, on either side, where all are 0.

    levels: independent variances of each difference, which add up, each with the degrees of freedom it is known with.

    The p-value is that at which the interval of `mean_estimate`, with Cochran's quantile, would just reach 0. Values
    below 1e-10 are given as 1e-10.
    """
    total = np.sum([variance for variance, _ in levels], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        reached = np.where(total > 0, np.abs(differences) / np.sqrt(total), np.where(differences == 0, 0.0, np.inf))
        weights = [np.where(total > 0, variance / total, 1 / len(levels)) for variance, _ in levels]
    quantiles = np.stack([_tabulate_quantiles(min(freedom, _MOST_FREEDOM)) for _, freedom in levels])
    found = [
        _invert(np.stack([each[start : start + _BLOCK] for each in weights], 1) @ quantiles, reached[start:])
        for start in range(0, len(differences), _BLOCK)
    ]
    return np.concatenate(found)


def _invert(quantiles: Array, reached: Array) -> Array:
    """Return the p-values of what is reached, from the quantiles of each, (differences, p-values)."""
    edges = np.concatenate([np.zeros((len(quantiles), 1)), quantiles], 1)
    reached = reached[: len(edges), None]
    place = np.minimum((quantiles <= reached).sum(1, keepdims=True), len(_P_VALUES) - 1)
    low, high = (np.take_along_axis(edges, place + step, 1) for step in (0, 1))
    share = np.minimum(1.0, (reached - low) / (high - low))
    ends = np.log(np.concatenate([[1.0], _P_VALUES]))
    return np.asarray(np.exp(ends[place] + share * (ends[place + 1] - ends[place])))[:, 0]


@cache
def _tabulate_quantiles(freedom: int) -> Array:
    """Return Student's quantiles for a table of p-values."""
    return _student_quantiles(freedom, 1 - _P_VALUES)


_P_VALUES = 10 ** -np.arange(0.01, 10.001, 0.01)
_BLOCK = 1000  # differences at once
_MOST_FREEDOM = 1000  # beyond which quantiles hardly change


def adjust_by_holm(p_values: Array) -> Array:
    """Return p-values of many hypotheses, adjusted by Holm's method, however they depend on each other.

    Where all those at or below 0.05 are rejected, the probability that any of them is true is at most 0.05.

    >>> adjust_by_holm(np.array([0.01, 0.04, 0.03])).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p_values, kind="stable")
    stepped = np.maximum.accumulate((len(p_values) - np.arange(len(p_values))) * p_values[order])
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(1.0, stepped)
    return adjusted


Flags = np.ndarray[Any, np.dtype[np.bool_]]


def share_estimate(count: int, total: int) -> Estimate:
    """Estimate a share from how many of some independent items have a property, with Wilson's interval.

    >>> str(share_estimate(0, 10)), str(share_estimate(30, 100))
    ('0.00 [0.00, 0.28]', '0.30 [0.22, 0.40]')
    """
    if not total:
        return Estimate(_NAN, _NAN, _NAN)
    share, square = count / total, _NORMAL**2
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _NORMAL / (1 + square / total) * np.sqrt(share * (1 - share) / total + square / (2 * total) ** 2)
    return Estimate(share, float(min(share, max(0.0, middle - half))), float(max(share, min(1.0, middle + half))))


def area(suspicion: Array, flagged: Flags) -> float:
    """Compute the area under the ROC curve: how often a flagged item has the larger suspicion, ties counting half.

    >>> area(np.array([0.9, 0.8, 0.1, 0.8]), np.array([True, False, False, True]))
    0.875
    """
    bad = int(flagged.sum())
    good = len(flagged) - bad
    if not bad or not good:
        return float("nan")
    return float((ranks(suspicion)[flagged].sum() - bad * (bad + 1) / 2) / (bad * good))


def area_estimate(suspicion: Array, flagged: Flags) -> Estimate:
    """Estimate the area with Newcombe's score interval: all θ within 1.96 of their own standard errors of it.

    The variance of an area θ is Hanley and McNeil's with both sample sizes at their mean. An observed area of 1 still
    has an interval, which is wider the fewer examples there are.
    """
    value, bad = area(suspicion, flagged), int(flagged.sum())
    good = len(flagged) - bad
    if np.isnan(value):
        return Estimate(value, _NAN, _NAN)
    theta = np.linspace(0, 1, 100_001)
    more = (bad + good) / 2 - 1
    variance = theta * (1 - theta) / (bad * good) * (1 + more * ((1 - theta) / (2 - theta) + theta / (1 + theta)))
    near = theta[np.square(theta - value) <= _NORMAL**2 * variance]
    return Estimate(value, float(min(value, near.min(initial=1.0))), float(max(value, near.max(initial=0.0))))


def area_difference(suspicion: Array, other: Array, flagged: Flags) -> Estimate:
    """Estimate how much larger the first area is, on the same examples, with DeLong's interval."""
    value = area(suspicion, flagged) - area(other, flagged)
    if flagged.sum() < 2 or (~flagged).sum() < 2:
        return Estimate(value, _NAN, _NAN)
    variance = 0.0
    for part in (flagged, ~flagged):  # how often each item exceeds the others, by both suspicions
        above = [(ranks(each)[part] - ranks(each[part])) / (~part).sum() for each in (suspicion, other)]
        variance += float((above[0] - above[1]).var(ddof=1)) / int(part.sum())
    error = _NORMAL * np.sqrt(variance)
    return Estimate(value, max(-1.0, value - error), min(1.0, value + error))
