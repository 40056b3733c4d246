"""Measures how faithful scores are: each metric with its values per query, a 95% interval, and a ceiling.

Signs are never flipped. F of a model trained on a subset is predicted by F + Σ s(b, q)/N over the added sources, so
summed scores and F rise together, whatever F is; a removal is predicted to change F by −s/N.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from imprint.attribution.result import Attribution
from imprint.attribution.top import limit_top
from imprint.display import count_of
from imprint.errors import DataError
from imprint.evaluation.matching import leave_out_runs, question_of, rounding_of
from imprint.evaluation.removal import RemovalCheck, compare_changes, mean_rank_correlation
from imprint.evaluation.truth import Truth
from imprint.plan import Question
from imprint.statistics import (
    Array,
    Estimate,
    ceiling,
    correlations,
    is_constant,
    mean_defined,
    mean_estimate,
    ranks,
)

_NAN = float("nan")


@dataclass(frozen=True)
class Metric:
    """A figure of merit.

    estimate: its value with a 95% interval over queries; the interval is NaN for a single query. `over` is "runs and
        queries" where the ground truth or the scores rest on several runs: their error is shared by all queries.
    per_query: its value for each query; NaN where it is undefined, because scores or ground truth are constant.
    undefined: how many queries are undefined; they are left out of the mean.
    ceiling: about what a perfect predictor would reach against this ground truth, from the agreement of its runs; NaN
        with one run. It is an upper estimate, the more so the more queries differ in noise.
    single_run: what the mean of the other runs reaches against one run; a lower estimate of the ceiling for one run.
    question: which question the ground truth answers; None where there is no ground truth.
    scores_question: which one the scores answer; None where they do not say, as a bare tensor.
    """

    name: str
    estimate: Estimate
    per_query: Array = field(default_factory=lambda: np.empty(0))
    undefined: int = 0
    ceiling: float = _NAN
    single_run: float = _NAN
    question: Question | None = None
    scores_question: Question | None = None
    over: Literal["queries", "runs and queries"] = "queries"

    def __str__(self) -> str:
        return f"{self._describe()}{self._describe_questions()}"

    def _describe_questions(self) -> str:
        if self.question is None or self.scores_question in (None, self.question):
            return "" if self.question is None else f" ({self.question})"
        return f" (scores of {self.scores_question} against ground truth of {self.question})"

    def _describe(self) -> str:
        limits = "" if np.isnan(self.ceiling) else f", ceiling {self.ceiling:.3f}"
        if np.isnan(self.estimate.value):
            return f"{self.name} undefined: scores or ground truth are constant{limits}"
        lacking = f", undefined for {count_of(self.undefined, 'query', 'queries')}" if self.undefined else ""
        return f"{self.name} {self.estimate.format(3)}{limits}{lacking}"

    def __repr__(self) -> str:
        return f"Metric({self})"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, None for what is undefined."""

        def plain(value: float) -> float | None:
            return None if np.isnan(value) else float(value)

        return {
            "name": self.name,
            **{key: plain(getattr(self.estimate, key)) for key in ("value", "low", "high")},
            **{"undefined": self.undefined, "ceiling": plain(self.ceiling), "single_run": plain(self.single_run)},
            **{"question": self.question, "scores_question": self.scores_question, "interval_over": self.over},
            "per_query": [plain(value) for value in self.per_query],
        }


def evaluate(result: Attribution | Tensor, truth: Truth, *, across: bool = False) -> list[Metric]:
    """Compute the metrics that this ground truth allows.

    across: compare scores with ground truth of the other question. What removing a source does to one run says little
        about the mean over runs, and the reverse, so that this is refused by default.
    """
    if not isinstance(truth, Truth):
        raise DataError(f"expected a Truth, got a {type(truth).__name__}: retrain returns one, Truth.load reads one.")
    if truth.subsets.kind == "halves":
        return [lds(result, truth, across=across)]
    if all(len(removed) == 1 for removed in truth.lacking) and max(truth.subsets.sources.sizes) == 1:
        return [loo(result, truth, across=across)]
    check = removal(result, truth, across=across)
    _refuse_few(len(truth.lacking))
    over_queries = check.actual.mean(1, keepdims=True)
    found = [
        Metric(
            "correlation of removals, mean over queries",
            check.correlation,
            undefined=len(check.predicted) if np.isnan(check.correlation.value) else 0,
            ceiling=check.ceiling,
            single_run=_correlate_runs(over_queries),
            over=_name_levels(check.several_runs),
        ),
        average_metric(
            "rank correlation of removals, per query",
            check.rank_correlations,
            check.rank_ceiling,
            _correlate_runs(check.actual, ranks),
            runs=check.without_runs(mean_rank_correlation),
        ),
    ]
    return [*(_ask(metric, result, truth) for metric in found), slope(result, truth, across=across)]


def _ask(metric: Metric, result: Attribution | Tensor, truth: Truth) -> Metric:
    """Say which questions scores and ground truth answer."""
    return replace(metric, question=truth.question, scores_question=question_of(result))


def lds(result: Attribution | Tensor, truth: Truth, *, across: bool = False) -> Metric:
    """Compute the linear datamodelling score: the rank correlation of summed scores with F over subsets."""
    if truth.subsets.kind != "halves":
        raise DataError(
            "the linear datamodelling score needs ground truth from random halves, this one removes sources."
        )
    members = truth.subsets.membership().double().T
    left_out = [each @ members for each in truth.match_left_out(result, across=across)]
    return _ask(predicted_lds(truth.match(result, across=across) @ members, truth, left_out), result, truth)


def predicted_lds(predicted: Tensor, truth: Truth, left_out: Sequence[Tensor] = ()) -> Metric:
    """Compute the linear datamodelling score from scores of the halves themselves, (queries, halves).

    left_out: these scores without each run that they rest on.
    """
    _refuse_few(len(truth.subsets))
    check = RemovalCheck.of(predicted, truth.values.transpose(1, 2), left_out)
    limits = ceiling(ranks(check.actual)), _correlate_runs(check.actual, ranks)
    runs = check.without_runs(mean_rank_correlation)
    return _ask(average_metric("LDS", check.rank_correlations, *limits, runs=runs), predicted, truth)


def loo(result: Attribution | Tensor, truth: Truth, *, across: bool = False) -> Metric:
    """Compute the leave-one-out score: Pearson's correlation of predicted and actual effects of removals, per query."""
    check = removal(result, truth, across=across)
    if any(len(removed) != 1 for removed in truth.lacking):
        raise DataError("leave-one-out needs ground truth in which single sources were removed.")
    _refuse_few(len(truth.lacking))
    values = correlations(check.predicted, check.truth)
    limits = ceiling(check.actual), _correlate_runs(check.actual)
    runs = check.without_runs(lambda predicted, actual: mean_defined(correlations(predicted, actual)))
    return _ask(average_metric("LOO", values, *limits, runs=runs), result, truth)


def removal(result: Attribution | Tensor, truth: Truth, *, across: bool = False) -> RemovalCheck:
    """Compare the predicted effects of the removals in a ground truth with the actual ones."""
    scores = truth.match(result, across=across)
    lacking = ~truth.subsets.membership()
    lacking = lacking[lacking.any(1)].double()
    left_out = [-(each @ lacking.T) / truth.subsets.n for each in truth.match_left_out(result, across=across)]
    return RemovalCheck.of(-(scores @ lacking.T) / truth.subsets.n, truth.significant_effects, left_out)


def slope(result: Attribution | Tensor, truth: Truth, *, across: bool = False) -> Metric:
    """Compute the slope of actual on predicted changes of F over queries and subsets, each query about its mean."""
    scores = truth.match(result, across=across)
    left_out = truth.match_left_out(result, across=across)
    check = compare_changes(scores, truth.subsets, truth.changes, truth.replayed, left_out)
    undefined, over = int(is_constant(check.predicted).sum()), _name_levels(check.several_runs)
    found = Metric("slope of actual on predicted effects", check.slope, undefined=undefined, over=over)
    return _ask(found, result, truth)


def overlap(first: Attribution, second: Attribution, k: int = 10) -> Metric:
    """Compute the share of the k largest effects that two attributions have in common, per query.

    It is undefined where all effects of an attribution have the same size.
    """
    for given in (first, second):
        if not isinstance(given, Attribution):
            raise DataError(
                f"overlap compares two Attributions, got a {type(given).__name__}: imprint.attribute returns one."
            )
    prints = [result.labels.fingerprints.get("queries") for result in (first, second)]
    same = first.queries == second.queries and (None in prints or prints[0] == prints[1])
    if not same or first.labels.source_ids != second.labels.source_ids:
        raise DataError("overlap needs two attributions with the same queries and the same sources.")
    k = limit_top(k, first.scores.shape[1])
    shares = _share_largest(first.scores, second.scores, k)
    runs = [
        np.array([mean_defined(_share_largest(each, second.scores, k)) for each in leave_out_runs(first)]),
        np.array([mean_defined(_share_largest(first.scores, each, k)) for each in leave_out_runs(second)]),
    ]
    return average_metric(f"overlap of the first {k}", shares, within=(0, 1), runs=runs)


def _share_largest(first: Tensor, second: Tensor, k: int) -> Array:
    """Return the share of the k largest scores that both have in common, per query; NaN where all are of one size."""
    largest = [scores.abs().topk(k, dim=1).indices.tolist() for scores in (first, second)]
    shares = np.array([len({*a} & {*b}) / k for a, b in zip(*largest, strict=True)])
    for scores in (first, second):
        sizes = scores.detach().abs().double().cpu().numpy()
        shares[is_constant(sizes, rounding_of(scores))[:, 0]] = _NAN
    return shares


def average_metric(
    name: str,
    per_query: Array,
    limit: float = _NAN,
    single_run: float = _NAN,
    within: tuple[float, float] = (-1, 1),
    runs: Sequence[Array] = (),
) -> Metric:
    """Average values per query, leaving out and counting those that are NaN; `within` is the range of a value.

    runs: the mean with each run left out in turn, for each set of runs.
    """
    undefined, over = int(np.isnan(per_query).sum()), _name_levels(any(len(each) > 1 for each in runs))
    estimate = mean_estimate(per_query, within, runs=runs)
    return Metric(name, estimate, per_query, undefined, limit, single_run, over=over)


def _name_levels(several_runs: bool) -> Literal["queries", "runs and queries"]:
    """Say what an interval is over."""
    return "runs and queries" if several_runs else "queries"


def _correlate_runs(runs: Array, prepared: Callable[[Array], Array] = lambda array: array) -> float:
    """Return the correlation of one run with the mean of the others, averaged; runs are (runs, queries, subsets)."""
    count = len(runs)
    if count < 2:
        return _NAN
    others = (runs.sum(0) - runs) / (count - 1)
    found = correlations(prepared(others), prepared(runs))
    return float(np.nanmean(found)) if np.isfinite(found).any() else _NAN


def _refuse_few(subsets: int) -> None:
    if subsets < 3:
        raise DataError(
            f"the ground truth has {count_of(subsets, 'subset')} to compare: a correlation needs at least 3."
        )
