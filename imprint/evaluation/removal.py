"""Predicted removal effects against what retraining without each source really does.

Figures come with a 95% interval over queries, by the jackknife, and with the ceiling that the noise of retraining sets.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch import Tensor

from imprint.errors import DataError
from imprint.evaluation.statistics import (
    Array,
    Chosen,
    Estimate,
    ceiling,
    centred,
    correlations,
    jackknife,
    mean_estimate,
    pearson,
    ranks,
    slope,
)


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
        return jackknife(
            len(self.predicted),
            lambda chosen: pearson(self.predicted[chosen].mean(0), self.truth[chosen].mean(0)),
            correlation=True,
        )

    @cached_property
    def slope(self) -> Estimate:
        """Of actual on predicted effects, each query about its own mean; 1 means that they have the right size."""
        away = centred(self.predicted)
        rises, squares = (away * self.truth).sum(1), np.square(away).sum(1)

        def pooled(chosen: Chosen) -> float:
            return float(rises[chosen].sum() / squares[chosen].sum()) if squares[chosen].any() else float("nan")

        return jackknife(len(self.predicted), pooled)

    @cached_property
    def mean_slope(self) -> Estimate:
        """The same of mean effects over queries."""
        return jackknife(
            len(self.predicted), lambda chosen: slope(self.predicted[chosen].mean(0), self.truth[chosen].mean(0))
        )

    @cached_property
    def ceiling(self) -> float:
        """What a perfect prediction of mean effects would reach against this truth."""
        return ceiling(self.actual.mean(1))

    @cached_property
    def rank_correlations(self) -> Array:
        """Spearman, over sources, of each query; NaN where one side is constant."""
        return correlations(ranks(self.predicted), ranks(self.truth))

    @cached_property
    def rank_correlation(self) -> Estimate:
        """The mean of `rank_correlations` over the queries where it is defined."""
        return mean_estimate(self.rank_correlations, within=(-1, 1))

    @cached_property
    def rank_ceiling(self) -> float:
        """What a perfect prediction would reach per query, from the mean agreement of single runs."""
        return ceiling(ranks(self.actual))
