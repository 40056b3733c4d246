"""Estimates confidence intervals for the shares of a period, by resampling runs first, and then queries.

The error of an imprint is shared by all queries, so a share over many queries is not surer by their number alone. Runs
are left out one by one, and every pot is divided again; what that changes is one level of variance for each store,
whatever the number of queries and policies. For a replayed run, effects are perturbed by what a tiny change of its
start does. The variance over queries is the other level.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from imprint.credit.drafting import SIGNS
from imprint.credit.leaves import Leaf
from imprint.credit.money import PARTS
from imprint.credit.policy import Policy
from imprint.statistics import Array, Level, mean_estimate

ESTIMATOR = 1
"""The version of this estimate. A closed period names it, because a later version may find other intervals."""
SAMPLE = 5_000
"""How many queries of a period intervals are found from, at most."""
_CELLS = 2_000_000  # queries × sources that are kept, at most
_DRAWS = 64  # of the noise of a replayed run

_Store = tuple[str | None, tuple[str, ...], tuple[float, ...]]
"""Queries whose effects rest on the same runs: of one store, with its sources and how much each run counts."""


def is_sampled(sequence: int, queries: int, sources: int) -> bool:
    """Decide by a hash whether a query is among those that intervals are found from."""
    most = min(SAMPLE, max(1, _CELLS // max(1, sources)))
    drawn = int.from_bytes(hashlib.sha256(b"sample %d" % sequence).digest()[:8]) / 2**64
    return drawn * queries < most


@dataclass
class _Queries:
    """Queries that one policy has credited by one rule. Rows are queries, columns sources.

    helps: empty where a fallback has credited them, which has no error.
    changes: what chance changes of each effect in each noise run, (queries, noise runs, sources).
    """

    policy: Policy
    freedom: int | None
    pots: list[float | None] = field(default_factory=list)
    shares: list[Array] = field(default_factory=list)
    helps: list[Array] = field(default_factory=list)
    errors: list[Array | None] = field(default_factory=list)
    deviations: list[Array] = field(default_factory=list)
    changes: list[Array] = field(default_factory=list)

    def weigh(self, waiting: float) -> Array:
        """Return what each query pays; `waiting` where a pot for the period does."""
        return np.array([waiting if pot is None else pot for pot in self.pots])

    def divide(self, helps: Array) -> Array:
        """Return the shares that the policy gives some effects, (queries, sources)."""
        errors = None if self.errors[0] is None else np.stack([each for each in self.errors if each is not None])
        paid, unpaid = self.policy.weigh(helps, errors, self.freedom)
        whole = (paid + unpaid).sum(1, keepdims=True)
        shares = np.divide(paid, whole, out=np.zeros_like(paid), where=whole > 0)
        fixed = self.policy.fixed
        return np.asarray(fixed / shares.shape[1] + (1 - fixed) * shares)


class ShareEstimator:
    """Collects queries of a period, and estimates how far their shares may be off."""

    def __init__(self) -> None:
        self._stores: defaultdict[_Store, dict[tuple[str, str], _Queries]] = defaultdict(dict)
        self._unsure = set[str]()  # sources some of whose effects have errors that nobody knows

    def add(self, entry: Leaf, policy: Policy) -> None:
        """Take a credited query into account."""
        about, rows = entry.about, entry.rows
        runs = () if about["runs"] is None else tuple(about["runs"]["shares"])
        store = (about["store"], tuple(row["source"] for row in rows), runs)
        queries = self._stores[store].setdefault((about["policy"], about["rule"]), _Queries(policy, about["freedom"]))
        queries.pots.append(about["pot"])
        queries.shares.append(np.array([row["share"] for row in rows], dtype=np.float64) / PARTS)
        if about["rule"] != policy.rule:
            return
        if about["noise"] is None and (about["runs"] is None or about["runs"]["over"] != "runs" or len(runs) < 2):
            self._unsure.update(store[1])
        known, unit = [row["error"] for row in rows], -SIGNS[about["better"]] / about["n"]
        errors = None if None in known else np.array(known, dtype=np.float64)
        queries.helps.append(np.array([row["helps"] for row in rows], dtype=np.float64))
        queries.errors.append(errors)
        queries.deviations.append(unit * np.array([row["deviations"] for row in rows], dtype=np.float64).T)
        queries.changes.append(_find_changes(about["noise"], errors, len(rows)))

    def estimate(self, waiting: float = 1.0) -> dict[str, tuple[float, float]]:
        """Return by how much the share of each source may be too large and too small, with 95% confidence.

        waiting: what a query pays that has no pot of its own. A source without an interval is left out.
        """
        sources = sorted({name for _, names, _ in self._stores for name in names})
        places = {name: place for place, name in enumerate(sources)}
        values, runs, levels = list[Array](), list[Array](), list[list[tuple[Array, int]]]()
        total = sum(float(q.weigh(waiting).sum()) for store in self._stores.values() for q in store.values())
        count = sum(len(q.pots) for store in self._stores.values() for q in store.values())
        scored_at_all = any(q.helps for store in self._stores.values() for q in store.values())
        if not total > 0 or count < 2 or not scored_at_all:  # fallbacks have fixed the shares
            return {}
        for (_, names, weights), store in self._stores.items():
            columns = [places[name] for name in names]

            def spread(found: Array, columns: list[int] = columns) -> Array:
                """Put values of this store's sources in the places of all."""
                wide = np.zeros((*found.shape[:-1], len(sources)))
                wide[..., columns] = found
                return wide

            for queries in store.values():
                values.append(spread(np.stack(queries.shares) * queries.weigh(waiting)[:, None] * count / total))
            scored = [queries for queries in store.values() if queries.helps]
            if scored and len(weights) > 1:
                runs.append(spread(_leave_out_runs(scored, weights, waiting) / total))
            if scored and scored[0].changes[0].size:
                variance, freedom = _perturb(scored, waiting)
                levels.append([(spread(variance / total**2), freedom)])
        whole = np.concatenate(values)
        mean = whole.mean(0)
        found = {}
        for name, place in places.items():
            left = [mean[place] + each[:, place] for each in runs]
            more: list[Level] = [(float(variance[place]), freedom) for level in levels for variance, freedom in level]
            one = mean_estimate(whole[:, place], (0.0, 1.0), runs=left, levels=more)
            if np.isfinite(one.low) and name not in self._unsure:
                found[name] = (one.value - one.low, one.high - one.value)
        return found


def _find_changes(noise: list[float] | None, errors: Array | None, sources: int) -> Array:
    """Return what chance changes of each effect of a query in each noise run, (noise runs, sources)."""
    if noise is None or errors is None:
        return np.zeros((0, sources))
    changes = np.array(noise, dtype=np.float64)
    size = float(np.sqrt(np.square(changes).mean()))
    return changes[:, None] * (errors / size if size > 0 else np.zeros(sources))  # sums of removals have more


def _leave_out_runs(scored: list[_Queries], weights: tuple[float, ...], waiting: float) -> Array:
    """Return by how much the total of each source changes without each run, (runs, sources)."""
    changes = []
    for run, weight in enumerate(weights):
        change: Array = np.zeros(len(scored[0].helps[0]))
        for queries in scored:
            helps, pots = np.stack(queries.helps), queries.weigh(waiting)
            without = helps - weight / (1 - weight) * np.stack([each[run] for each in queries.deviations])
            change = change + pots @ (queries.divide(without) - queries.divide(helps))
        changes.append(change)
    return np.array(changes)


def _perturb(scored: list[_Queries], waiting: float) -> tuple[Array, int]:
    """Return the variance of the total of each source by chance, and from how many noise runs it is known.

    Changes are independent from source to source, and the same for all queries.
    """
    draw, count = np.random.default_rng(0), len(scored[0].changes[0])
    squares = list[Array]()
    for signs in _draw_signs(draw, count, len(scored[0].helps[0])):
        change: Array = np.zeros(len(scored[0].helps[0]))
        for queries in scored:
            helps, pots = np.stack(queries.helps), queries.weigh(waiting)
            moved = helps + (signs * np.stack(queries.changes)).sum(1)
            change = change + pots @ (queries.divide(moved) - queries.divide(helps))
        squares.append(np.square(change))
    return np.mean(squares, axis=0), count


def _draw_signs(draw: np.random.Generator, runs: int, sources: int) -> Iterator[Array]:
    for _ in range(_DRAWS):
        yield runs**-0.5 * draw.standard_normal((runs, sources))
