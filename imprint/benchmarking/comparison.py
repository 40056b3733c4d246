"""Holds what a benchmark found, and shows it as a table and a figure: scores of methods, and their costs."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from imprint.attribution.labels import MEANINGS
from imprint.errors import MissingExtra
from imprint.plan import Question
from imprint.statistics import Array, Estimate, mean_estimate
from imprint.store.files import write


@dataclass(frozen=True)
class MethodScores:
    """A method's scores, (queries, examples), where positive helps; and what they cost.

    prepare, query: seconds before any query is known, and for all queries; `bytes` are kept in between.
    halves: the scores are those of the halves of all draws instead, (queries, draws × halves).
    tried: how many variants were tried; these scores are the best by LDS, and `loo_scores`, if computed, by LOO.
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


Statistic = Literal["lds", "loo"]
_STATISTICS: tuple[Statistic, ...] = ("lds", "loo")


@dataclass(frozen=True)
class Comparison:
    """The result of a benchmark: correlations of each method, (runs × draws, queries), and what its scores cost.

    question: which one the ground truth answers.
    """

    name: str
    lds: dict[str, Array]
    loo: dict[str, Array]
    costs: dict[str, list[MethodScores]]
    ceiling: float
    question: Question = "expected"

    @property
    def first(self) -> str:
        """The method that the others are compared with."""
        return next(iter(self.lds))

    def estimate(self, method: str, statistic: Statistic = "lds") -> Estimate:
        """Return the mean over runs and draws, with an interval over queries."""
        return average_queries(getattr(self, statistic)[method])

    def ahead(self, method: str, other: str, statistic: Statistic = "lds") -> Estimate:
        """Return the mean difference between two methods on the same queries; positive if the first is better."""
        table = getattr(self, statistic)
        return mean_estimate(_average_runs(table[method]) - _average_runs(table[other]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with None for undefined ones."""
        methods = {}
        for name, costs in self.costs.items():
            found: dict[str, Any] = {"lds": _to_json(self.estimate(name))}
            if name in self.loo:
                found["loo"] = _to_json(self.estimate(name, "loo"))
            if name != self.first:
                found["behind"] = {
                    statistic: _to_json(self.ahead(self.first, name, statistic))
                    for statistic in _STATISTICS
                    if name in getattr(self, statistic) and self.first in getattr(self, statistic)
                }
            found |= {
                key: [getattr(cost, key) for cost in costs] for key in ("prepare", "query", "peak_bytes", "bytes")
            }
            methods[name] = {**found, "notes": sorted({cost.note for cost in costs if cost.note})}
        limit = None if np.isnan(self.ceiling) else self.ceiling
        return {"benchmark": self.name, "question": self.question, "ceiling": limit, "methods": methods}

    def to_markdown(self) -> str:
        """Return a table, the best method first, with the distance of each correlation from the first method's."""
        head = ["method", "LDS", "behind", *(["LOO", "behind"] if self.loo else [])]
        lines = [
            f"| {' | '.join(head)} | before queries | all queries | peak memory | kept |",
            f"|{'---|' * len(head)}---:|---:|---:|---:|",
        ]
        for name in _sort_best_first({name: self.estimate(name) for name in self.lds}):
            costs = self.costs[name]
            found = [*self._cells(name, "lds", 3), *(self._cells(name, "loo", 4) if self.loo else [])]
            seconds = [f"{np.median([getattr(cost, key) for cost in costs]):.3g} s" for key in ("prepare", "query")]
            sizes = [
                f"{max(getattr(cost, key) or 0 for cost in costs) / 1e6:,.0f} MB" for key in ("peak_bytes", "bytes")
            ]
            lines.append(f"| {' | '.join([name, *found, *seconds, *sizes])} |")
        lines.append(f"\nThe ground truth answers {MEANINGS[self.question]}.")
        if not np.isnan(self.ceiling):
            lines.append(f"A perfect predictor would reach an LDS of about {self.ceiling:.2f} against one retraining.")
        return "\n".join(lines)

    def _cells(self, name: str, statistic: Statistic, digits: int) -> list[str]:
        """Return a correlation with its interval, and its distance from the first method's on the same queries."""
        table = getattr(self, statistic)
        if name not in table:
            return ["", ""]
        own = _format(self.estimate(name, statistic), digits)
        if name == self.first or self.first not in table:
            return [own, ""]
        return [own, _format(self.ahead(self.first, name, statistic), digits)]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw bars with their intervals."""
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingExtra("plot", "report") from error
        statistics = _STATISTICS if self.loo else _STATISTICS[:1]
        figure, axes = plt.subplots(
            1, len(statistics), figsize=(5.5 * len(statistics), 0.4 * len(self.lds) + 1.4), squeeze=False
        )
        for axis, statistic in zip(axes[0], statistics, strict=True):
            every = {name: self.estimate(name, statistic) for name in getattr(self, statistic)}
            names = _sort_best_first(every)[::-1]
            found = [every[name] for name in names]
            away = np.array([[e.value - e.low for e in found], [e.high - e.value for e in found]])
            colours = ["#2a6f97" if name.startswith("Imprint") else "0.7" for name in names]
            axis.barh(names, [e.value for e in found], xerr=away, color=colours, error_kw={"elinewidth": 1})
            axis.set_xlabel(statistic.upper())
            if statistic == "lds" and not np.isnan(self.ceiling):
                axis.axvline(self.ceiling, color="#c8553d", linestyle="--", linewidth=1)
                axis.annotate("ceiling", (self.ceiling, -0.4), color="#c8553d", ha="right", fontsize=8)
        figure.tight_layout()
        write(Path(path), lambda beside: figure.savefig(beside, dpi=140))
        plt.close(figure)


def average_queries(values: Array) -> Estimate:
    """Average (runs × draws, queries), with an interval over queries."""
    return mean_estimate(_average_runs(values), within=(-1, 1))


def _average_runs(values: Array) -> Array:
    """Average each query over runs and draws, NaN where none is defined."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0.0).sum(0) / there.sum(0))


def _sort_best_first(found: dict[str, Estimate]) -> list[str]:
    """Sort names by value, undefined ones last."""
    return sorted(found, key=lambda name: -np.nan_to_num(found[name].value, nan=-np.inf))


def _to_json(found: Estimate) -> dict[str, float | None]:
    return {key: None if np.isnan(value) else value for key, value in asdict(found).items()}


def _format(found: Estimate, digits: int) -> str:
    return "undefined" if np.isnan(found.value) else found.format(digits)
