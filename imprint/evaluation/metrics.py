"""How faithful scores are: each metric with its values per query, a 95% interval, and what the truth allows.

Signs are never flipped: F of a model trained on a subset is predicted by F + Σ s(b, q)/N over what was added, so summed
scores and F rise together, whatever F is; and a removal is predicted to change F by −s/N.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.labels import Labels, describe_query
from imprint.attribution.result import Attribution
from imprint.errors import DataError
from imprint.evaluation.removal import RemovalCheck
from imprint.evaluation.statistics import (
    ROUNDING,
    Array,
    Estimate,
    ceiling,
    constant,
    correlations,
    mean_estimate,
    ranks,
)
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.sources import Sources
from imprint.store.fingerprint import changed, compare_data, of_sources

Parameters = dict[str, dict[str, Any]]
"""Shapes and dtypes by name."""
_NAN = float("nan")


@dataclass(frozen=True)
class Metric:
    """A figure of merit.

    estimate: its value with a 95% interval over queries that contains it, NaN where one query says nothing of others.
    per_query: its value for each query; NaN where it is undefined, because scores or truth are constant.
    undefined: how many queries that is; they are left out of the mean, and counted here.
    ceiling: about what a perfect predictor would reach against this truth, from the agreement of its runs; NaN with one
        run. An upper estimate, the more so the more queries differ in noise.
    single_run: what the mean of the other runs reaches against one run, a lower estimate of the ceiling for one run.
    """

    name: str
    estimate: Estimate
    per_query: Array = field(default_factory=lambda: np.empty(0))
    undefined: int = 0
    ceiling: float = _NAN
    single_run: float = _NAN

    def __str__(self) -> str:
        limits = "" if np.isnan(self.ceiling) else f", ceiling {self.ceiling:.3f}"
        if np.isnan(self.estimate.value):
            return f"{self.name} undefined: scores or truth are constant{limits}"
        few = "query" if self.undefined == 1 else "queries"
        lacking = f", undefined for {self.undefined} {few}" if self.undefined else ""
        return f"{self.name} {self.estimate.shown(3)}{limits}{lacking}"

    def __repr__(self) -> str:
        return f"Metric({self})"

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
            undefined=len(check.predicted) if np.isnan(check.correlation.value) else 0,
            ceiling=check.ceiling,
            single_run=_single_run(over_queries),
        ),
        averaged(
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
    return predicted_lds(_scores(result, truth) @ truth.subsets.kept().double().T, truth)


def predicted_lds(predicted: Tensor, truth: Truth) -> Metric:
    """The same for scores of the halves themselves, (queries, halves)."""
    _refuse_few(len(truth.subsets))
    runs = truth.values.transpose(1, 2).numpy()
    values = correlations(ranks(predicted.numpy()), ranks(runs.mean(0)))
    return averaged("LDS", values, ceiling(ranks(runs)), _single_run(runs, ranks))


def loo(result: Attribution | Tensor, truth: Truth) -> Metric:
    """Leave-one-out: Pearson's correlation, over the removed examples, of predicted and actual effects, per query."""
    check = removal(result, truth)
    if any(len(removed) != 1 for removed in truth.lacking):
        raise DataError("leave-one-out needs a truth in which single sources were removed.")
    _refuse_few(len(truth.lacking))
    values = correlations(check.predicted, check.truth)
    return averaged("LOO", values, ceiling(check.actual), _single_run(check.actual))


def removal(result: Attribution | Tensor, truth: Truth) -> RemovalCheck:
    """Predicted effects of what the truth removed, each found by its own sources, beside the actual ones."""
    scores = _scores(result, truth)
    lacking = ~truth.subsets.kept()
    lacking = lacking[lacking.any(1)].double()
    return RemovalCheck.of(-(scores @ lacking.T) / truth.subsets.n, _effects(truth))


def slope(result: Attribution | Tensor, truth: Truth) -> Metric:
    """Of actual on predicted changes of F, over queries and subsets, each query about its own mean.

    Trained on S, an example weighs 1/|S|, so F is predicted to be a constant + Σ s/|S| over the sources in S: to first
    order, exact scores have the slope 1, however much is removed and however unequal sources are.
    """
    scores, subsets = _scores(result, truth), truth.subsets
    _warn_shares(subsets)
    compared = [index for index, removed in enumerate(subsets.removed) if removed]
    seen = torch.tensor([len(subsets.examples(index)) for index in compared], dtype=torch.float64)
    predicted = scores @ subsets.kept()[compared].double().T / seen
    actual = truth.values.transpose(1, 2) if subsets.kind == "halves" else _effects(truth)
    check = RemovalCheck.of(predicted, actual)
    undefined = int(constant(check.predicted).sum())
    return Metric("slope of actual on predicted effects", check.slope, undefined=undefined)


def _warn_shares(subsets: Subsets) -> None:
    owners = sum(np.bincount(members, minlength=subsets.n) for members in subsets.sources.members)
    if not np.all(owners == 1):
        how = "overlap" if np.any(owners > 1) else "leave examples out"
        warnings.warn(
            f"the sources {how}, and the slope takes each example to be in one of them: it may be far from 1 for exact "
            "scores.",
            stacklevel=3,
        )


def overlap(first: Attribution, second: Attribution, k: int = 10) -> Metric:
    """The share of the k largest effects that two attributions have in common, per query.

    Where all effects of one are equally large there is no first, and nothing is defined.
    """
    for given in (first, second):
        if not isinstance(given, Attribution):
            raise DataError(
                f"overlap is of two Attributions, got a {type(given).__name__}: imprint.attribute makes one."
            )
    prints = [result.labels.fingerprints.get("queries") for result in (first, second)]
    same = first.queries == second.queries and (None in prints or prints[0] == prints[1])
    if not same or first.labels.source_ids != second.labels.source_ids:
        raise DataError("only attributions of the same queries to the same sources can overlap.")
    pairs = zip(first.top(k).indices.tolist(), second.top(k).indices.tolist(), strict=True)
    k = min(k, first.scores.shape[1])
    shares = np.array([len({*a} & {*b}) / k for a, b in pairs])
    for each in (first, second):
        sizes = each.scores.detach().abs().double().cpu().numpy()
        shares[constant(sizes, rounding(each.scores))[:, 0]] = _NAN
    return averaged(f"overlap of the first {k}", shares, within=(0, 1))


def _effects(truth: Truth) -> Tensor:
    """Effects of removals, shape (runs, queries, removals); zero where they are only the rounding of F."""
    effects, largest = truth.effects, truth.values.abs().amax(1)[:, :, None]
    return effects * (effects.amax(2, keepdim=True) - effects.amin(2, keepdim=True) > ROUNDING * largest)


def rounding(scores: Tensor) -> float:
    """By how much, relative to the largest, scores that are meant to be equal may differ."""
    return max(ROUNDING, 4 * torch.finfo(scores.dtype).eps) if scores.is_floating_point() else ROUNDING


def averaged(
    name: str,
    per_query: Array,
    limit: float = _NAN,
    single_run: float = _NAN,
    within: tuple[float, float] = (-1, 1),
) -> Metric:
    """The mean of values per query, those that are NaN left out and counted; `within` is what a value can be."""
    undefined = int(np.isnan(per_query).sum())
    return Metric(name, mean_estimate(per_query, within), per_query, undefined, limit, single_run)


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
    _check_kinds(result, truth)
    count = truth.values.shape[2]
    if not isinstance(result, Attribution):
        return usable_scores(result, count, len(truth.subsets.sources))
    known = truth.about.get("fingerprints", {})
    if result.labels.n != truth.subsets.n:
        raise DataError(f"scores are of {result.labels.n} training examples, the truth of {truth.subsets.n}.")
    check_sources(result.labels, truth.subsets.sources)
    if result.labels.measure != truth.measure:
        raise DataError(f"scores are of {result.labels.measure!r}, the truth measured {truth.measure!r}.")
    check_origin(result.labels, known)
    scores = usable_scores(result.scores, count, len(truth.subsets.sources))
    check_queries(result, count, known.get("queries"))
    check_measures(result.labels, truth.about.get("probes", {}).get("measures", []))
    return scores


def usable_scores(given: Tensor, queries: int, sources: int) -> Tensor:
    """Finite scores of this shape in double precision; rows that are constant but for rounding are constant."""
    if tuple(given.shape) != (queries, sources):
        raise DataError(
            f"expected scores of {queries} queries and {sources} sources as in the truth, got shape "
            f"{tuple(given.shape)}."
        )
    scores = given.detach().double().cpu()
    if not bool(scores.isfinite().all()):
        raise DataError("scores must be finite.")
    flat = torch.from_numpy(constant(scores.numpy(), rounding(given)))
    return torch.where(flat, scores[:, :1], scores)


def check_sources(labels: Labels, sources: Sources) -> None:
    """Refuse scores of other sources than those that are removed."""
    if labels.source_ids != sources.ids:
        raise DataError(
            f"scores are of other sources than the truth, {_first_difference(labels.source_ids, sources.ids)}."
        )
    if difference := _members_differ(labels, sources):
        raise DataError(f"scores are of sources with other members than the truth's: {difference}.")


def check_origin(labels: Labels, known: dict[str, Any]) -> None:
    """Refuse scores of other training data or of another model than the truth's, as far as both are known."""
    mine = labels.fingerprints
    if mine.get("data") and known.get("data"):
        data = compare_data(mine["data"], known["data"], labels.n)
        if not data.same:
            raise DataError(
                f"scores are of other training data than the truth{data.remark}, or of the same in another order: "
                "simulate on what was retrained on."
            )
        data.warn("the training data of scores and ground truth")
    if difference := _models_differ(mine.get("parameters", {}), known.get("parameters", {})):
        raise DataError(f"scores are of another model than the truth: {difference}.")


def check_measures(labels: Labels, known: list[float]) -> None:
    """Refuse scores of a model that has the truth's shapes but not its F: `known` are F at random parameters."""
    mine = labels.fingerprints.get("measures")
    if mine and known and (difference := changed("F at random parameters, of query", known, mine)):
        raise DataError(f"scores are of another model or measurement than the truth: {difference}.")


def _models_differ(mine: Parameters, theirs: Parameters) -> str | None:
    """How parameters that two models have in common differ, in words."""
    for name in sorted(mine.keys() & theirs.keys()):
        here, there = (tuple(each[name]["shape"]) for each in (mine, theirs))
        if here != there:
            return f"parameter {name!r} has shape {here} against {there}"
    return None


def check_queries(result: Attribution, count: int, known: str | None) -> None:
    """Refuse scores of other queries than these, or of the same in another order; `known` is their fingerprint."""
    everyone = tuple(range(count))
    if result.queries != everyone:
        index = next(i for i in everyone if result.queries[i] != i)
        raise DataError(
            f"scores are not of all queries in their order, row {index} is {describe_query(result.queries[index])}: "
            "give the whole attribution."
        )
    mine = result.labels.fingerprints.get("queries")
    if mine and known and mine != known:
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
