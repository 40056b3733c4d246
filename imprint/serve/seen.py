"""Remembers how large effects were on the queries that a service has answered, for the page about trust."""

import threading
from collections import deque
from dataclasses import dataclass

from imprint.attribution.result import Attribution
from imprint.validation.drift import FEWEST, Drift, describe_sizes, measure_drift, measure_sizes
from imprint.validation.record import Validation

_KEPT = 5_000  # queries, the latest


@dataclass(frozen=True)
class Summary:
    """What a service has seen since it started.

    silent: the share of queries of which no source's effect is distinguishable from 0; None if that is unknown.
    noise: the median over queries of how far chance moves the measurement; None if it is unknown.
    drift: how the latest queries differ from the validated ones; None without a validation, or with too few queries.
    sizes: of how many queries, the latest, the size of their effects is known.
    typical: the smallest of these, the deciles and the largest; None with too few queries.
    """

    queries: int
    silent: float | None
    noise: float | None
    drift: Drift | None
    sizes: int
    typical: tuple[float, ...] | None


class Seen:
    """Figures of the queries that were answered; of the latest few thousand, their sizes. For several threads."""

    def __init__(self, validation: Validation | None) -> None:
        self._validation, self._lock = validation, threading.Lock()
        self._queries, self._judged, self._silent = 0, 0, 0
        self._sizes: deque[float] = deque(maxlen=_KEPT)
        self._noise: deque[float] = deque(maxlen=_KEPT)

    def add(self, result: Attribution) -> None:
        """Take the queries of a result into account."""
        sizes, marks, noise = measure_sizes(result.removal_effect), result.distinguishable, result.noise
        with self._lock:
            self._queries += len(result)
            self._sizes.extend(sizes.tolist())
            if marks is not None:
                self._judged += len(result)
                self._silent += int((~marks.any(1)).sum())
            if noise is not None:
                self._noise.extend(noise.tolist())

    @property
    def summary(self) -> Summary:
        with self._lock:
            sizes, noise = list(self._sizes), sorted(self._noise)
            silent = self._silent / self._judged if self._judged else None
            queries = self._queries
        known = self._validation
        drift = None
        if known is not None and known.typical is not None:
            drift = measure_drift(known.typical, known.verdict.figures.queries, sizes)
        typical = describe_sizes(sizes) if len(sizes) >= FEWEST else None
        return Summary(queries, silent, noise[len(noise) // 2] if noise else None, drift, len(sizes), typical)
