"""Compares predicted removal effects with retraining without each source.

Figures come with a 95% jackknife interval over queries, and with the ceiling set by the noise of retraining.
"""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from imprint.errors import DataError
from imprint.evaluation.subsets import Subsets
from imprint.statistics import (
    Array,
    Chosen,
    Estimate,
    ceiling,
    centre,
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
        """Build a check from tensors."""
        return cls(predicted.double().cpu().numpy(), actual.double().cpu().numpy())

    def without(self, source: int) -> "RemovalCheck":
        """Leave one source out of the check."""
        return RemovalCheck(np.delete(self.predicted, source, 1), np.delete(self.actual, source, 2))

    def with_guess(self, guess: Array) -> "RemovalCheck":
        """Replace the predictions by one guess per source for every query, such as its size."""
        return replace(self, predicted=np.broadcast_to(guess.astype(np.float64), self.predicted.shape))

    @cached_property
    def truth(self) -> Array:
        """Actual effects averaged over runs, shape (queries, sources)."""
        return np.asarray(self.actual.mean(0))

    @cached_property
    def standard_error(self) -> Array:
        """The standard error over runs of the actual mean effect of each source."""
        return np.asarray(self.actual.mean(1).std(0, ddof=1) / np.sqrt(len(self.actual)))

    @cached_property
    def correlation(self) -> Estimate:
        """Pearson's correlation, over sources, of predicted and actual mean effects."""
        return jackknife(
            len(self.predicted),
            lambda chosen: pearson(self.predicted[chosen].mean(0), self.truth[chosen].mean(0)),
            correlation=True,
        )

    @cached_property
    def slope(self) -> Estimate:
        """The slope of actual on predicted effects, each query about its own mean; 1 if they have the right size."""
        away = centre(self.predicted)
        rises, squares = (away * self.truth).sum(1), np.square(away).sum(1)

        def pool(chosen: Chosen) -> float:
            return float(rises[chosen].sum() / squares[chosen].sum()) if squares[chosen].any() else float("nan")

        return jackknife(len(self.predicted), pool)

    @cached_property
    def mean_slope(self) -> Estimate:
        """The slope of actual on predicted mean effects over queries."""
        return jackknife(
            len(self.predicted), lambda chosen: slope(self.predicted[chosen].mean(0), self.truth[chosen].mean(0))
        )

    @cached_property
    def ceiling(self) -> float:
        """The correlation that a perfect prediction of mean effects would reach against this ground truth."""
        return ceiling(self.actual.mean(1))

    @cached_property
    def rank_correlations(self) -> Array:
        """Spearman's correlation, over sources, for each query; NaN where one side is constant."""
        return correlations(ranks(self.predicted), ranks(self.truth))

    @cached_property
    def rank_correlation(self) -> Estimate:
        """The mean of `rank_correlations` over the queries where it is defined."""
        return mean_estimate(self.rank_correlations, within=(-1, 1))

    @cached_property
    def rank_ceiling(self) -> float:
        """The rank correlation that a perfect prediction would reach per query, from the agreement of single runs."""
        return ceiling(ranks(self.actual))


def compare_changes(scores: Tensor, subsets: Subsets, actual: Tensor, replayed: bool = False) -> RemovalCheck:
    """Compare predicted and actual changes of F over subsets, to find the slope.

    A model trained on S gives each example the weight 1/|S|, so F is predicted to be a constant + Σ s/|S| over the
    sources in S; a replay leaves the weight at 1/N. To first order exact scores have the slope 1, however much is
    removed and however unequal sources are.
    """
    owners = sum(np.bincount(members, minlength=subsets.n) for members in subsets.sources.members)
    if np.any(owners > 1) or (np.any(owners < 1) and not replayed):
        how = "overlap" if np.any(owners > 1) else "leave examples out"
        warnings.warn(
            f"the sources {how}, but the slope assumes that each example is in exactly one source: it may be far from "
            "1 even for exact scores.",
            stacklevel=4,
        )
    compared = [index for index, removed in enumerate(subsets.removed) if removed]
    seen = [subsets.n if replayed else len(subsets.examples(index)) for index in compared]
    summed = scores @ subsets.membership()[compared].double().T
    return RemovalCheck.of(summed / torch.tensor(seen, dtype=torch.float64), actual)
