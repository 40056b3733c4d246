"""Compares predicted removal effects with retraining without each source.

Figures come with a 95% jackknife interval over queries, or over runs and queries where there are several runs, and with
the ceiling set by the noise of retraining.
"""

import warnings
from collections.abc import Callable, Sequence
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
    mean_defined,
    mean_estimate,
    pearson,
    ranks,
    slope,
)


@dataclass(frozen=True)
class RemovalCheck:
    """Predicted effects (queries, sources) beside actual ones (runs, queries, sources).

    Figures over sources compare mean effects over queries; figures per query compare effects on that query.

    left_out: the predicted effects without each run that they rest on, (runs, queries, sources); None where they rest
        on one.
    """

    predicted: Array
    actual: Array
    left_out: Array | None = None

    def __post_init__(self) -> None:
        if self.actual.ndim != 3 or self.actual.shape[1:] != self.predicted.shape:
            shapes = f"predicted {self.predicted.shape}, actual {self.actual.shape}"
            raise DataError(f"expected predicted (queries, sources) and actual (runs, queries, sources), got {shapes}.")
        if self.left_out is not None and self.left_out.shape[1:] != self.predicted.shape:
            raise DataError(
                f"expected predicted effects without each run of shape (runs, {self.predicted.shape}), got "
                f"{self.left_out.shape}."
            )
        if not (np.isfinite(self.predicted).all() and np.isfinite(self.actual).all()):
            raise DataError("predicted and actual effects must be finite.")

    @classmethod
    def of(cls, predicted: Tensor, actual: Tensor, left_out: Sequence[Tensor] = ()) -> "RemovalCheck":
        """Build a check from tensors."""
        runs = torch.stack(list(left_out)).double().cpu().numpy() if left_out else None
        return cls(predicted.double().cpu().numpy(), actual.double().cpu().numpy(), runs)

    def without(self, source: int) -> "RemovalCheck":
        """Leave one source out of the check."""
        left_out = None if self.left_out is None else np.delete(self.left_out, source, 2)
        return RemovalCheck(np.delete(self.predicted, source, 1), np.delete(self.actual, source, 2), left_out)

    def with_guess(self, guess: Array) -> "RemovalCheck":
        """Replace the predictions by one guess per source for every query, such as its size."""
        return replace(self, predicted=np.broadcast_to(guess.astype(np.float64), self.predicted.shape), left_out=None)

    @cached_property
    def truth(self) -> Array:
        """Actual effects averaged over runs, shape (queries, sources)."""
        return np.asarray(self.actual.mean(0))

    @cached_property
    def standard_error(self) -> Array:
        """The standard error over runs of the actual mean effect of each source."""
        return np.asarray(self.actual.mean(1).std(0, ddof=1) / np.sqrt(len(self.actual)))

    @property
    def several_runs(self) -> bool:
        """Whether intervals are over runs too: those of the ground truth, or of the predictions."""
        return len(self.actual) > 1 or self.left_out is not None

    def without_runs(self, figure: Callable[[Array, Array], float]) -> list[Array]:
        """Return a figure of predicted and actual effects with each run left out, first of the actual ones."""
        count = len(self.actual)
        truths = ((self.truth * count - run) / (count - 1) for run in self.actual) if count > 1 else ()
        predictions = () if self.left_out is None else self.left_out
        return [
            np.array([figure(self.predicted, truth) for truth in truths]),
            np.array([figure(predicted, self.truth) for predicted in predictions]),
        ]

    def _jackknife(self, figure: Callable[[Array, Array], float], *, correlation: bool = False) -> Estimate:
        """Estimate a figure of predicted and actual effects, resampling runs and queries."""
        return jackknife(
            len(self.predicted),
            lambda chosen: figure(self.predicted[chosen], self.truth[chosen]),
            correlation=correlation,
            runs=self.without_runs(figure),
        )

    @cached_property
    def correlation(self) -> Estimate:
        """Pearson's correlation, over sources, of predicted and actual mean effects."""
        return self._jackknife(lambda predicted, truth: pearson(predicted.mean(0), truth.mean(0)), correlation=True)

    @cached_property
    def slope(self) -> Estimate:
        """The slope of actual on predicted effects, each query about its own mean; 1 if they have the right size."""
        away = centre(self.predicted)
        rises, squares = (away * self.truth).sum(1), np.square(away).sum(1)

        def pool(chosen: Chosen) -> float:
            return float(rises[chosen].sum() / squares[chosen].sum()) if squares[chosen].any() else float("nan")

        return jackknife(len(self.predicted), pool, runs=self.without_runs(_pool_slope))

    @cached_property
    def mean_slope(self) -> Estimate:
        """The slope of actual on predicted mean effects over queries."""
        return self._jackknife(lambda predicted, truth: slope(predicted.mean(0), truth.mean(0)))

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
        return mean_estimate(self.rank_correlations, within=(-1, 1), runs=self.without_runs(mean_rank_correlation))

    @cached_property
    def rank_ceiling(self) -> float:
        """The rank correlation that a perfect prediction would reach per query, from the agreement of single runs."""
        return ceiling(ranks(self.actual))


def _pool_slope(predicted: Array, truth: Array) -> float:
    """Compute the slope of actual on predicted effects over all queries, each about its own mean."""
    away = centre(predicted)
    return float((away * truth).sum() / np.square(away).sum()) if away.any() else float("nan")


def mean_rank_correlation(predicted: Array, truth: Array) -> float:
    """Compute Spearman's correlation of each query, averaged over the queries where it is defined."""
    return mean_defined(correlations(ranks(predicted), ranks(truth)))


def compare_changes(
    scores: Tensor, subsets: Subsets, actual: Tensor, replayed: bool = False, left_out: Sequence[Tensor] = ()
) -> RemovalCheck:
    """Compare predicted and actual changes of F over subsets, to find the slope.

    A model trained on S gives each example the weight 1/|S|, so F is predicted to be a constant + Σ s/|S| over the
    sources in S; a replay leaves the weight at 1/N. To first order exact scores have the slope 1, however much is
    removed and however unequal sources are.

    left_out: the scores without each run that they rest on.
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
    members, weights = subsets.membership()[compared].double().T, torch.tensor(seen, dtype=torch.float64)
    return RemovalCheck.of(scores @ members / weights, actual, [each @ members / weights for each in left_out])
