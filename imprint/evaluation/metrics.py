"""How faithful scores are: each metric with its values per query, a 95% interval, and what the truth allows.

Signs are never flipped: F of a model trained on a subset is predicted by F + Σ s(b, q)/N over what was added, so summed
scores and F rise together, whatever F is; and a removal is predicted to change F by −s/N.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from imprint.attribution import Attribution
from imprint.errors import DataError
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.statistics import (
    Array,
    Estimate,
    area,
    bootstrap,
    ceiling,
    centred,
    correlations,
    mean_estimate,
    ranks,
)
from imprint.evaluation.truth import Truth
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
    if truth.subsets.kind == "halves":
        return [lds(result, truth)]
    if all(len(removed) == 1 for removed in truth.lacking) and max(truth.subsets.sources.sizes) == 1:
        return [loo(result, truth)]
    check = removal(result, truth)
    rank = _averaged("rank correlation of removals, per query", check.rank_correlations, check.rank_ceiling)
    return [
        Metric("correlation of removals, mean over queries", check.correlation, ceiling=check.ceiling),
        rank,
        Metric("slope of actual on predicted removals", check.slope),
    ]


def lds(result: Attribution | Tensor, truth: Truth) -> Metric:
    """The linear datamodelling score: Spearman's correlation, over subsets, of summed scores with F, per query."""
    if truth.subsets.kind != "halves":
        raise DataError("the linear datamodelling score needs a truth of random halves, this one removes sources.")
    predicted = _scores(result, truth) @ truth.subsets.kept().double().T
    runs = ranks(truth.values.transpose(1, 2).numpy())
    actual = ranks(truth.values.mean(0).T.numpy())
    return _averaged("LDS", correlations(ranks(predicted.numpy()), actual), ceiling(runs), _single_run(truth, ranks))


def loo(result: Attribution | Tensor, truth: Truth) -> Metric:
    """Leave-one-out: Pearson's correlation, over the removed examples, of predicted and actual effects, per query."""
    check = removal(result, truth)
    if any(len(removed) != 1 for removed in truth.lacking):
        raise DataError("leave-one-out needs a truth in which single sources were removed.")
    values = correlations(check.predicted, check.truth)
    return _averaged("LOO", values, ceiling(check.actual), _single_run(truth, lambda array: array))


def removal(result: Attribution | Tensor, truth: Truth) -> RemovalCheck:
    """Predicted effects of what the truth removed, each found by its own sources, beside the actual ones."""
    scores, effects = _scores(result, truth), truth.effects
    lacking = ~truth.subsets.kept()
    lacking = lacking[lacking.any(1)].double()
    return RemovalCheck.of(-(scores @ lacking.T) / truth.subsets.n, effects)


def slope(result: Attribution | Tensor, truth: Truth) -> float:
    """Of actual on predicted changes of F, over queries and subsets, each query about its own mean."""
    if truth.subsets.kind == "halves":
        seen = np.mean([len(truth.subsets.examples(index)) for index in range(len(truth.subsets))])
        predicted = (_scores(result, truth) @ truth.subsets.kept().double().T).numpy() / seen  # each weighs 1/|half|
        actual = truth.values.mean(0).T.numpy()
    else:
        check = removal(result, truth)
        predicted, actual = check.predicted, check.truth
    x = centred(predicted)
    return float((x * actual).sum() / np.square(x).sum()) if x.any() else _NAN


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
    if first.scores.shape != second.scores.shape or first.labels.source_ids != second.labels.source_ids:
        raise DataError("only attributions of the same queries to the same sources can overlap.")
    pairs = zip(first.top(k).indices.tolist(), second.top(k).indices.tolist(), strict=True)
    k = min(k, first.scores.shape[1])
    return _averaged(f"overlap of the first {k}", np.array([len({*a} & {*b}) / k for a, b in pairs]))


def _averaged(name: str, per_query: Array, limit: float = _NAN, single_run: float = _NAN) -> Metric:
    undefined = int(np.isnan(per_query).sum())
    return Metric(name, mean_estimate(per_query), per_query, undefined, limit, single_run)


def _single_run(truth: Truth, prepared: Callable[[Array], Array]) -> float:
    """What the mean of the other runs reaches against one run."""
    values = truth.values if truth.subsets.kind == "halves" else truth.effects.transpose(1, 2)
    if truth.runs < 2:
        return _NAN
    total, found = values.sum(0), []
    for one in values:
        others = (total - one) / (truth.runs - 1)
        found.append(correlations(prepared(others.T.numpy()), prepared(one.T.numpy())))
    defined = np.concatenate(found)[~np.isnan(np.concatenate(found))]
    return float(defined.mean()) if len(defined) else _NAN


def _scores(result: Attribution | Tensor, truth: Truth) -> Tensor:
    """Scores (queries, sources) that belong to the truth's sources and queries."""
    scores = (result.scores if isinstance(result, Attribution) else result).detach().double().cpu()
    sources, queries = truth.subsets.sources, truth.values.shape[2]
    if isinstance(result, Attribution):
        if result.labels.n != truth.subsets.n:
            raise DataError(f"scores are of {result.labels.n} training examples, the truth of {truth.subsets.n}.")
        if result.labels.source_ids != sources.ids:
            raise DataError(f"scores are of other sources than the truth, {_first_difference(result, sources.ids)}.")
        if result.labels.measure != truth.measure:
            raise DataError(f"scores are of {result.labels.measure!r}, the truth measured {truth.measure!r}.")
    if tuple(scores.shape) != (queries, len(sources)):
        raise DataError(
            f"expected scores of {queries} queries and {len(sources)} sources as in the truth, got shape "
            f"{tuple(scores.shape)}."
        )
    if not bool(scores.isfinite().all()):
        raise DataError("scores must be finite.")
    return scores


def _first_difference(result: Attribution, ids: tuple[str, ...]) -> str:
    mine = result.labels.source_ids
    if len(mine) != len(ids):
        return f"{len(mine)} against {len(ids)}"
    index = next(i for i, (a, b) in enumerate(zip(mine, ids, strict=True)) if a != b)
    return f"number {index} is {mine[index]!r} against {ids[index]!r}"
