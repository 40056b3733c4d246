"""Remembers how large effects were on the queries that a service has answered, for the page about trust.

A query that is asked again counts once: probes and retries say nothing new about what is asked.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from imprint.attribution.result import Attribution
from imprint.batches import Batch
from imprint.statistics import Estimate, share_estimate
from imprint.store.fingerprint import hash_rows
from imprint.validation.drift import FEWEST, Drift, describe_sizes, measure_drift, measure_sizes
from imprint.validation.record import Validation

_KEPT = 5_000  # different queries, the latest


class _Query(NamedTuple):
    """What is kept of a query: the size of its effects, whether none is distinguishable from 0, and its noise."""

    size: float
    silent: bool | None
    noise: float | None


@dataclass(frozen=True)
class Summary:
    """What is known of the queries that a service answered since it started.

    answered: queries, however often each was asked. different: those that the rest is about, the latest.
    silent, judged: of how many of these no source's effect is distinguishable from 0, and of how many that is known.
    noise: the median over queries of how far chance moves the measurement; None if it is unknown.
    drift: how the latest queries differ from the validated ones; None without a validation, or with too few queries.
    typical: the size of effects: the smallest, the deciles and the largest; None with too few queries.
    """

    answered: int
    different: int
    silent: int
    judged: int
    noise: float | None
    drift: Drift | None
    typical: tuple[float, ...] | None

    @property
    def silent_share(self) -> Estimate | None:
        """The share of queries that no source moves clearly; None if that is unknown."""
        return share_estimate(self.silent, self.judged) if self.judged else None


class QueryStatistics:
    """Keeps figures of the different queries that were answered, the latest few thousand. For several threads."""

    def __init__(self, validation: Validation | None) -> None:
        self._validation, self._lock = validation, threading.Lock()
        self._answered, self._queries = 0, OrderedDict[bytes, _Query]()

    def add(self, result: Attribution, batches: Sequence[Batch]) -> None:
        """Take the queries of a result into account. batches: each as it was read, as a batch of one."""
        sizes, marks, noise = measure_sizes(result.removal_effect).tolist(), result.distinguishable, result.noise
        silent = [None] * len(result) if marks is None else (~marks.any(1)).tolist()
        chance = [None] * len(result) if noise is None else noise.tolist()
        names = [hash_rows(batch, 1)[0] for batch in batches]
        with self._lock:
            self._answered += len(result)
            for name, *known in zip(names, sizes, silent, chance, strict=True):
                self._queries[name] = _Query(*known)
            while len(self._queries) > _KEPT:
                self._queries.popitem(last=False)

    @property
    def summary(self) -> Summary:
        with self._lock:
            answered, queries = self._answered, list(self._queries.values())
        sizes = [query.size for query in queries]
        judged = [query.silent for query in queries if query.silent is not None]
        noise = sorted(query.noise for query in queries if query.noise is not None)
        known, drift = self._validation, None
        if known is not None and known.typical is not None:
            drift = measure_drift(known.typical, known.verdict.figures.queries, sizes)
        return Summary(
            answered,
            len(queries),
            sum(judged),
            len(judged),
            noise[len(noise) // 2] if noise else None,
            drift,
            describe_sizes(sizes) if len(sizes) >= FEWEST else None,
        )
