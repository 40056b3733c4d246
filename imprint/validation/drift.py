"""Notices queries unlike those that a store was validated on, by how large effects are on them.

A validation says that effects are right on its queries. It keeps the deciles of the size of their effects, the root
mean square over sources. Whoever attributes other queries compares theirs with these: by the largest distance of the
two distribution functions (Kolmogorov and Smirnov), and by the share that lies outside of what was seen then.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from imprint.statistics import Array

_LEVELS = np.linspace(0.0, 1.0, 11)
_QUANTILE = 1.358  # of Kolmogorov's distribution, at 95%
FEWEST = 20
"""Queries that it takes to compare."""


def find_typical(effects: Tensor) -> tuple[float, ...]:
    """Return the smallest, the deciles and the largest of the sizes of effects (queries, sources) on each query."""
    return describe_sizes(measure_sizes(effects))


def describe_sizes(sizes: Sequence[float] | Array) -> tuple[float, ...]:
    """Return the smallest, the deciles and the largest of some sizes."""
    return tuple(map(float, np.quantile(np.asarray(sizes, dtype=np.float64), _LEVELS)))


def measure_sizes(effects: Tensor) -> Array:
    """Return the root mean square over sources of the effects (queries, sources) on each query."""
    sizes: Array = effects.detach().double().square().mean(1).sqrt().cpu().numpy()
    return sizes


@dataclass(frozen=True)
class Drift:
    """How queries differ from the validated ones.

    distance: the largest difference of the two distribution functions, from 0 to 1.
    threshold: what the distance exceeds in 5% of comparisons of queries of one kind.
    outside: the share of queries whose effects are smaller or larger than any validated one's.
    """

    queries: int
    distance: float
    threshold: float
    outside: float

    @property
    def clear(self) -> bool:
        """Whether these queries are of another kind than the validated ones."""
        return self.distance > self.threshold


def measure_drift(typical: Sequence[float], validated: int, sizes: Sequence[float]) -> Drift | None:
    """Compare the sizes of effects on some queries with those of a validation; None if there are too few.

    validated: how many queries the deciles are from. Between them their distribution is taken to be even, so a decile
    that is met exactly counts as lying on both of its sides.

    >>> deciles = [float(decile) for decile in range(11)]
    >>> measure_drift(deciles, 100, [0.1 * place + 0.05 for place in range(100)]).clear
    False
    >>> measure_drift(deciles, 100, [9.0] * 50).clear
    True
    """
    if len(sizes) < FEWEST:
        return None
    found = np.sort(np.asarray(sizes, dtype=np.float64))
    ends = np.asarray(typical, dtype=np.float64)
    places = np.concatenate([found, ends])
    known_below, known_upto = _interpolate(ends, places, "left"), _interpolate(ends, places, "right")
    below, upto = (np.searchsorted(found, places, side) / len(found) for side in ("left", "right"))
    apart = np.maximum(np.abs(below - known_below), np.abs(upto - known_upto))
    threshold = _QUANTILE * math.sqrt(1 / len(found) + 1 / max(validated, 1))
    outside = float(((found < ends[0]) | (found > ends[-1])).mean())
    return Drift(len(found), float(apart.max()), threshold, outside)


def _interpolate(ends: Array, places: Array, side: str) -> Array:
    """Return the share of validated queries below some values, or up to them where several deciles are equal."""
    kept = np.unique(ends)
    order = [np.flatnonzero(ends == value)[0 if side == "left" else -1] for value in kept]
    levels = _LEVELS[order] if len(kept) > 1 else np.array([0.0 if side == "left" else 1.0])
    found: Array = np.interp(places, kept, levels, left=0.0, right=1.0)
    return found
