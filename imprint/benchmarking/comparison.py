"""What a benchmark found: the scores of methods and what they took, and how they compare, as a table and a picture."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from imprint.errors import MissingExtra
from imprint.evaluation.statistics import Array, Estimate, mean_estimate
from imprint.store.files import write


@dataclass(frozen=True)
class Scored:
    """Scores of every training example on every query, (queries, examples), where positive helps; and what they took.

    halves: the scores are of the halves of all draws instead, (queries, draws × halves): a half is a source too.
    prepare: seconds before any query is known; `query` seconds for all queries. bytes: what is kept in between.
    tried: of how many settings these scores are the best by LDS; `loo_scores` are those of the best by LOO, if asked.
    """

    scores: Tensor
    prepare: float
    query: float
    peak_bytes: int | None = None
    bytes: int = 0
    note: str = ""
    halves: bool = False
    tried: int = 1
    loo_scores: Tensor | None = None


Kind = Literal["lds", "loo"]
_KINDS: tuple[Kind, ...] = ("lds", "loo")


@dataclass(frozen=True)
class Comparison:
    """What a benchmark found: correlations of each method, (runs × draws, queries), and what its scores took."""

    name: str
    lds: dict[str, Array]
    loo: dict[str, Array]
    costs: dict[str, list[Scored]]
    ceiling: float

    @property
    def first(self) -> str:
        """The method that the others are held against."""
        return next(iter(self.lds))

    def estimate(self, method: str, kind: Kind = "lds") -> Estimate:
        """The mean over runs and draws, with an interval over queries."""
        return over_queries(getattr(self, kind)[method])

    def ahead(self, method: str, other: str, kind: Kind = "lds") -> Estimate:
        """By how much a method is ahead of another: the mean difference on the same queries."""
        table = getattr(self, kind)
        return mean_estimate(_over_runs(table[method]) - _over_runs(table[other]))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, None for what is undefined."""
        methods = {}
        for name, costs in self.costs.items():
            found: dict[str, Any] = {"lds": _plain(self.estimate(name))}
            if name in self.loo:
                found["loo"] = _plain(self.estimate(name, "loo"))
            if name != self.first:
                found["behind"] = {
                    kind: _plain(self.ahead(self.first, name, kind))
                    for kind in _KINDS
                    if name in getattr(self, kind) and self.first in getattr(self, kind)
                }
            found |= {
                key: [getattr(cost, key) for cost in costs] for key in ("prepare", "query", "peak_bytes", "bytes")
            }
            methods[name] = {**found, "notes": sorted({cost.note for cost in costs if cost.note})}
        limit = None if np.isnan(self.ceiling) else self.ceiling
        return {"benchmark": self.name, "ceiling": limit, "methods": methods}

    def markdown(self) -> str:
        """As a table, the best first: of each correlation also how far it is behind the first method's."""
        head = ["method", "LDS", "behind", *(["LOO", "behind"] if self.loo else [])]
        lines = [
            f"| {' | '.join(head)} | before queries | all queries | peak memory | kept |",
            f"|{'---|' * len(head)}---:|---:|---:|---:|",
        ]
        for name in _best_first({name: self.estimate(name) for name in self.lds}):
            costs = self.costs[name]
            found = [*self._cells(name, "lds", 3), *(self._cells(name, "loo", 4) if self.loo else [])]
            seconds = [f"{np.median([getattr(cost, key) for cost in costs]):.3g} s" for key in ("prepare", "query")]
            sizes = [
                f"{max(getattr(cost, key) or 0 for cost in costs) / 1e6:,.0f} MB" for key in ("peak_bytes", "bytes")
            ]
            lines.append(f"| {' | '.join([name, *found, *seconds, *sizes])} |")
        if not np.isnan(self.ceiling):
            lines.append(
                f"\nA perfect predictor would reach an LDS of about {self.ceiling:.2f} against one retraining."
            )
        return "\n".join(lines)

    def _cells(self, name: str, kind: Kind, digits: int) -> list[str]:
        """A correlation with its interval, and how far it is behind the first method's on the same queries."""
        table = getattr(self, kind)
        if name not in table:
            return ["", ""]
        own = _shown(self.estimate(name, kind), digits)
        if name == self.first or self.first not in table:
            return [own, ""]
        return [own, _shown(self.ahead(self.first, name, kind), digits)]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Bars with their intervals, as a picture."""
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingExtra("plot", "report") from error
        kinds = _KINDS if self.loo else _KINDS[:1]
        figure, axes = plt.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 0.4 * len(self.lds) + 1.4), squeeze=False)
        for axis, kind in zip(axes[0], kinds, strict=True):
            every = {name: self.estimate(name, kind) for name in getattr(self, kind)}
            names = _best_first(every)[::-1]
            found = [every[name] for name in names]
            away = np.array([[e.value - e.low for e in found], [e.high - e.value for e in found]])
            colours = ["#2a6f97" if name.startswith("Imprint") else "0.7" for name in names]
            axis.barh(names, [e.value for e in found], xerr=away, color=colours, error_kw={"elinewidth": 1})
            axis.set_xlabel(kind.upper())
            if kind == "lds" and not np.isnan(self.ceiling):
                axis.axvline(self.ceiling, color="#c8553d", linestyle="--", linewidth=1)
                axis.annotate("ceiling", (self.ceiling, -0.4), color="#c8553d", ha="right", fontsize=8)
        figure.tight_layout()
        write(Path(path), lambda beside: figure.savefig(beside, dpi=140))
        plt.close(figure)


def over_queries(values: Array) -> Estimate:
    """The mean over runs and draws, (runs × draws, queries), with an interval over queries."""
    return mean_estimate(_over_runs(values), within=(-1, 1))


def _over_runs(values: Array) -> Array:
    """The mean of each query over runs and draws, NaN where none is defined."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0.0).sum(0) / there.sum(0))


def _best_first(found: dict[str, Estimate]) -> list[str]:
    """Names by value; what is undefined comes last."""
    return sorted(found, key=lambda name: -np.nan_to_num(found[name].value, nan=-np.inf))


def _plain(found: Estimate) -> dict[str, float | None]:
    return {key: None if np.isnan(value) else value for key, value in asdict(found).items()}


def _shown(found: Estimate, digits: int) -> str:
    if np.isnan(found.value):
        return "undefined"
    return found.shown(digits)
