"""How faithful scores are: each metric with its values per query, a 95% interval, and what the truth allows.

Signs are never flipped: F of a model trained on a subset is predicted by F + Σ s(b, q)/N over what was added, so summed
scores and F rise together, whatever F is; and a removal is predicted to change F by −s/N.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from imprint.attribution import Attribution, Labels, called
from imprint.errors import DataError
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.statistics import (
    Array,
    Estimate,
    area,
    bootstrap,
    ceiling,
    correlations,
    mean_estimate,
    ranks,
)
from imprint.evaluation.truth import Truth
from imprint.fingerprint import of_sources
from imprint.sources import Sources
from imprint.task import Better

_NAN = float("nan")


@dataclass(frozen=True)
class Metric:
    """A figure of merit.

    estimate: its value with a bootstrap 95% interval over queries.
    per_query: its value for each query; NaN where it is undefined, because scores or truth are constant.
    undefined: how many queries that is; they are left out of the mean, and counted here.
    ceiling: what a perfect predictor would reach against this truth, from the agreement of its runs; NaN with one run.
    single_run: what the mean of the other runs reaches against one run, a lower bound of the ceiling for one run.
    """

    name: str
    estimate: Estimate
    per_query: Array = field(default_factory=lambda: np.empty(0))
    undefined: int = 0
    ceiling: float = _NAN
    single_run: float = _NAN

    def __str__(self) -> str:
        limits = "" if np.isnan(self.ceiling) else f", ceiling {self.ceiling:.2f}"
        lacking = f", undefined for {self.undefined} queries" if self.undefined else ""
        low, high = self.estimate.low, self.estimate.high
        return f"{self.name} {self.estimate.value:.3f} [{low:.3f}, {high:.3f}]{limits}{lacking}"

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, None for what is undefined."""

        def plain(value: float) -> float | None:
            return None if np.isnan(value) else float(value)

        return {
            "name": self.name,
            **{key: plain(getattr(self.estimate, key)) for key in ("value", "low", "high")},
            **{"undefined": self.undefined, "ceiling": plain(self.ceiling), "single_run": plain(self.single_run)},
            "per_query": [plain(value) for value in self.per_query],
        }


def evaluate(result: Attribution | Tensor, truth: Truth) -> list[Metric]:
    """The metrics that a truth of this kind allows."""
    _check_kinds(result, truth)
    if truth.subsets.kind == "halves":
        return [lds(result, truth)]
    if all(len(removed) == 1 for removed in truth.lacking) and max(truth.subsets.sources.sizes) == 1:
        return [loo(result, truth)]
    check = removal(result, truth)
    _refuse_few(len(truth.lacking))
    over_queries = check.actual.mean(1, keepdims=True)
    return [
        Metric(
            "correlation of removals, mean over queries",
            check.correlation,
            ceiling=check.ceiling,
            single_run=_single_run(over_queries),
        ),
        _averaged(
            "rank correlation of removals, per query",
            check.rank_correlations,
            check.rank_ceiling,
            _single_run(check.actual, ranks),
        ),
        slope(result, truth),
    ]


def lds(result: Attribution | Tensor, truth: Truth) -> Metric:
    """The linear datamodelling score: Spearman's correlation, over subsets, of summed scores with F, per query."""
    if truth.subsets.kind != "halves":
        raise DataError("the linear datamodelling score needs a truth of random halves, this one removes sources.")
    _refuse_few(len(truth.subsets))
    predicted = _scores(result, truth) @ truth.subsets.kept().double().T
    runs = truth.values.transpose(1, 2).numpy()
    values = correlations(ranks(predicted.numpy()), ranks(runs.mean(0)))
    return _averaged("LDS", values, ceiling(ranks(runs)), _single_run(runs, ranks))


def loo(result: Attribution | Tensor, truth: Truth) -> Metric:
    """Leave-one-out: Pearson's correlation, over the removed examples, of predicted and actual effects, per query."""
    check = removal(result, truth)
    if any(len(removed) != 1 for removed in truth.lacking):
        raise DataError("leave-one-out needs a truth in which single sources were removed.")
    _refuse_few(len(truth.lacking))
    values = correlations(check.predicted, check.truth)
    return _averaged("LOO", values, ceiling(check.actual), _single_run(check.actual))


def removal(result: Attribution | Tensor, truth: Truth) -> RemovalCheck:
    """Predicted effects of what the truth removed, each found by its own sources, beside the actual ones."""
    scores, effects = _scores(result, truth), truth.effects
    lacking = ~truth.subsets.kept()
    lacking = lacking[lacking.any(1)].double()
    return RemovalCheck.of(-(scores @ lacking.T) / truth.subsets.n, effects)


def slope(result: Attribution | Tensor, truth: Truth) -> Metric:
    """Of actual on predicted changes of F, over queries and subsets, each query about its own mean."""
    name = "slope of actual on predicted effects"
    if truth.subsets.kind == "removal":
        return Metric(name, removal(result, truth).slope)
    seen = np.mean([len(truth.subsets.examples(index)) for index in range(len(truth.subsets))])
    predicted = _scores(result, truth) @ truth.subsets.kept().double().T / float(seen)  # each weighs 1/|half|
    return Metric(name, RemovalCheck.of(predicted, truth.values.transpose(1, 2)).slope)


def mislabel_auc(self_influence: Tensor, mislabelled: Tensor, better: Better = "lower") -> Metric:
    """How well self-influence finds wrong labels: the area under the ROC curve, interval over examples.

    mislabelled: a boolean for each example. better: of the measurement: with a loss a wrong label lowers its own loss
    most, with a margin ("higher") it raises its own margin most.
    """
    guilty = np.asarray(mislabelled.cpu().numpy(), dtype=bool)
    suspicion = self_influence.double().cpu().numpy() * (1 if better == "higher" else -1)
    if guilty.shape != suspicion.shape:
        raise DataError(f"expected one value and one label per example, got {suspicion.shape} and {guilty.shape}.")
    if not np.isfinite(suspicion).all():
        raise DataError("self-influence must be finite.")
    if guilty.all() or not guilty.any():
        raise DataError("the area under the curve needs some mislabelled examples and some that are not.")
    estimate = bootstrap(len(guilty), lambda chosen: area(suspicion[chosen], guilty[chosen]))
    return Metric("mislabel detection AUC", estimate)


def overlap(first: Attribution, second: Attribution, k: int = 10) -> Metric:
    """The share of the k largest effects that two attributions have in common, per query."""
    prints = [result.labels.fingerprints.get("queries") for result in (first, second)]
    same = first.queries == second.queries and (None in prints or prints[0] == prints[1])
    if not same or first.labels.source_ids != second.labels.source_ids:
        raise DataError("only attributions of the same queries to the same sources can overlap.")
    pairs = zip(first.top(k).indices.tolist(), second.top(k).indices.tolist(), strict=True)
    k = min(k, first.scores.shape[1])
    return _averaged(f"overlap of the first {k}", np.array([len({*a} & {*b}) / k for a, b in pairs]))


def _averaged(name: str, per_query: Array, limit: float = _NAN, single_run: float = _NAN) -> Metric:
    undefined = int(np.isnan(per_query).sum())
    return Metric(name, mean_estimate(per_query), per_query, undefined, limit, single_run)


def _single_run(runs: Array, prepared: Callable[[Array], Array] = lambda array: array) -> float:
    """What the mean of the other runs reaches against one run; runs have shape (runs, queries, things)."""
    count = len(runs)
    if count < 2:
        return _NAN
    others = (runs.sum(0) - runs) / (count - 1)
    found = correlations(prepared(others), prepared(runs))
    return float(np.nanmean(found)) if np.isfinite(found).any() else _NAN


def _refuse_few(subsets: int) -> None:
    if subsets < 3:
        raise DataError(f"the truth has {subsets} subsets to compare: a correlation means nothing below 3.")


def _check_kinds(result: object, truth: object) -> None:
    if not isinstance(result, Attribution | Tensor):
        raise DataError(
            f"expected an Attribution, or a tensor of scores, got a {type(result).__name__}: imprint.attribute makes "
            "one."
        )
    if not isinstance(truth, Truth):
        raise DataError(f"expected a Truth, got a {type(truth).__name__}: retrain makes one, Truth.load reads one.")


def _scores(result: Attribution | Tensor, truth: Truth) -> Tensor:
    """Scores (queries, sources) that belong to the truth's sources and queries."""
    scores = (result.scores if isinstance(result, Attribution) else result).detach().double().cpu()
    sources, queries = truth.subsets.sources, truth.values.shape[2]
    if isinstance(result, Attribution):
        _check_labels(result, truth)
    if tuple(scores.shape) != (queries, len(sources)):
        raise DataError(
            f"expected scores of {queries} queries and {len(sources)} sources as in the truth, got shape "
            f"{tuple(scores.shape)}."
        )
    if isinstance(result, Attribution):
        _check_queries(result, truth)
    if not bool(scores.isfinite().all()):
        raise DataError("scores must be finite.")
    return scores


def _check_labels(result: Attribution, truth: Truth) -> None:
    """Refuse scores of other sources, or of another measurement, than the truth's."""
    labels, sources = result.labels, truth.subsets.sources
    if labels.n != truth.subsets.n:
        raise DataError(f"scores are of {labels.n} training examples, the truth of {truth.subsets.n}.")
    if labels.source_ids != sources.ids:
        raise DataError(
            f"scores are of other sources than the truth, {_first_difference(labels.source_ids, sources.ids)}."
        )
    if difference := _members_differ(labels, sources):
        raise DataError(f"scores are of sources with other members than the truth's: {difference}.")
    if labels.measure != truth.measure:
        raise DataError(f"scores are of {labels.measure!r}, the truth measured {truth.measure!r}.")


def _check_queries(result: Attribution, truth: Truth) -> None:
    """Refuse scores of other queries than the truth's, or of the same in another order."""
    everyone = tuple(range(truth.values.shape[2]))
    if result.queries != everyone:
        index = next(i for i in everyone if result.queries[i] != i)
        raise DataError(
            f"scores are not of all queries in their order, row {index} is {called(result.queries[index])}: give the "
            "whole attribution."
        )
    mine, theirs = (
        prints.get("queries") for prints in (result.labels.fingerprints, truth.about.get("fingerprints", {}))
    )
    if mine and theirs and mine != theirs:
        raise DataError(
            "scores are of other queries than the truth, or of the same in another order: attribute those that were "
            "given to retrain."
        )


def _members_differ(labels: Labels, sources: Sources) -> str | None:
    """How the members of sources differ from those of the truth's, in words; None if that is not known."""
    sizes = zip(labels.source_ids, labels.source_sizes, sources.sizes, strict=True)
    if different := next(
        (f"{i!r} has {mine} examples against {theirs}" for i, mine, theirs in sizes if mine != theirs), None
    ):
        return different
    known = labels.fingerprints.get("sources")
    if known and known != of_sources(replace(sources, names=labels.source_names)):  # names may differ
        return "of the same sizes"
    return None


def _first_difference(mine: tuple[str, ...], ids: tuple[str, ...]) -> str:
    if len(mine) != len(ids):
        return f"{len(mine)} against {len(ids)}"
    index = next(i for i, (a, b) in enumerate(zip(mine, ids, strict=True)) if a != b)
    return f"number {index} is {mine[index]!r} against {ids[index]!r}"
