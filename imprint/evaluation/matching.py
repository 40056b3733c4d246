"""Matches scores to ground truth: refuses scores of other data, sources, queries, models or measurements."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from imprint.attribution.labels import MEANINGS, Labels, describe_query
from imprint.attribution.result import Attribution
from imprint.errors import DataError
from imprint.evaluation.subsets import Subsets
from imprint.plan import Question
from imprint.sources import Sources
from imprint.statistics import ROUNDING, is_constant
from imprint.store.fingerprint import are_sources, changed, compare_data

Parameters = dict[str, dict[str, Any]]
"""Shapes and dtypes by name."""


def match_scores(
    result: Attribution | Tensor, subsets: Subsets, queries: int, measure: str, about: dict[str, Any]
) -> Tensor:
    """Return scores (queries, sources) that belong to a ground truth; refuse others.

    about: what the ground truth records of itself, with its fingerprints.
    """
    if not isinstance(result, Attribution | Tensor):
        raise DataError(
            f"expected an Attribution, or a tensor of scores, got a {type(result).__name__}: imprint.attribute returns "
            "an Attribution."
        )
    if not isinstance(result, Attribution):
        return require_scores(result, queries, len(subsets.sources))
    if result.labels.n != subsets.n:
        raise DataError(f"the scores are of {result.labels.n} training examples, the ground truth is of {subsets.n}.")
    check_sources(result.labels, subsets.sources)
    if result.labels.measure != measure:
        raise DataError(f"the scores are of {result.labels.measure!r}, the ground truth measured {measure!r}.")
    known = about.get("fingerprints", {})
    check_origin(result.labels, known)
    _check_recording(result.labels, about.get("training"))
    scores = require_scores(result.scores, queries, len(subsets.sources))
    check_queries(result, queries, known.get("queries"))
    check_measures(result.labels, about.get("probes", {}).get("measures", []))
    return scores


def leave_out_runs(result: Attribution) -> list[Tensor]:
    """Return the scores of a result without each of its runs in turn; empty where they are of one run, or unknown."""
    if len(result.replicates) != 1 or result.replicates[0].over != "runs":
        return []
    return result.replicates[0].leave_out(result.scores)


def question_of(result: Attribution | Tensor) -> Question | None:
    """Return the question that scores answer; None for a bare tensor, which does not say."""
    return result.question if isinstance(result, Attribution) else None


def require_question(result: Attribution | Tensor, truth: Question) -> None:
    """Refuse scores of one question for a ground truth of another."""
    scores = question_of(result)
    if scores is not None and scores != truth:
        raise DataError(
            f"the scores answer the question {scores!r} ({MEANINGS[scores]}), the ground truth {truth!r} "
            f"({MEANINGS[truth]}), and good scores of one may be bad scores of the other: use ground truth of the same "
            "question, or ask for this comparison with across=True (--across)."
        )


def rounding_of(scores: Tensor) -> float:
    """Return how much equal scores may differ by rounding, relative to the largest."""
    return max(ROUNDING, 4 * torch.finfo(scores.dtype).eps) if scores.is_floating_point() else ROUNDING


def require_scores(given: Tensor, queries: int, sources: int) -> Tensor:
    """Return finite scores of this shape in double precision; rows that are constant up to rounding become constant."""
    if tuple(given.shape) != (queries, sources):
        raise DataError(
            f"expected scores of {queries} queries and {sources} sources, as in the ground truth, got shape "
            f"{tuple(given.shape)}."
        )
    scores = given.detach().double().cpu()
    if not bool(scores.isfinite().all()):
        raise DataError("scores must be finite.")
    flat = torch.from_numpy(is_constant(scores.numpy(), rounding_of(given)))
    return torch.where(flat, scores[:, :1], scores)


def check_sources(labels: Labels, sources: Sources) -> None:
    """Refuse scores of other sources than these."""
    if labels.source_ids != sources.ids:
        raise DataError(
            "the scores are of other sources than the ground truth: "
            f"{_first_difference(labels.source_ids, sources.ids)}."
        )
    if difference := _compare_members(labels, sources):
        raise DataError(f"the scores are of sources with other members than in the ground truth: {difference}.")


def check_origin(labels: Labels, known: dict[str, Any]) -> None:
    """Refuse scores of other training data or another model than these, as far as both are known."""
    if labels.difference:
        raise DataError("the scores are a difference of two results, which no model has: compare each of the two.")
    mine = labels.fingerprints
    if mine.get("data") and known.get("data"):
        data = compare_data(mine["data"], known["data"], labels.n)
        if not data.same:
            raise DataError(
                f"the scores are of other training data than the ground truth{data.remark}, or of the same in another "
                "order: simulate on the data that was used for retraining."
            )
        data.warn("the training data of scores and ground truth")
    if difference := _compare_models(mine.get("parameters", {}), known.get("parameters", {})):
        raise DataError(f"the scores are of another model than the ground truth: {difference}.")


def _check_recording(labels: Labels, training: Any) -> None:
    """Refuse scores of one recorded run for ground truth of another; `training` says how the truth was made."""
    mine = labels.fingerprints.get("recording")
    theirs = training.get("recording") if isinstance(training, dict) else None
    if mine and theirs and mine != theirs:
        raise DataError(
            f"the scores are of another recorded run (recording {mine[:8]}…) than the ground truth (recording "
            f"{str(theirs)[:8]}…), and what a removal does to one run says little about another: replay the run that "
            "the ground truth is of, or make ground truth of the run that the scores are of."
        )


def check_measures(labels: Labels, known: list[float]) -> None:
    """Refuse scores of a model with the same shapes but another F; `known` holds F at random parameters."""
    mine = labels.fingerprints.get("measures")
    if mine and known and (difference := changed("F at random parameters, of query", known, mine)):
        raise DataError(f"the scores are of another model or measurement than the ground truth: {difference}.")


def _compare_models(mine: Parameters, theirs: Parameters) -> str | None:
    """Describe the first difference between the parameters that two models share, if any."""
    for name in sorted(mine.keys() & theirs.keys()):
        here, there = (tuple(each[name]["shape"]) for each in (mine, theirs))
        if here != there:
            return f"parameter {name!r} has shape {here}, there {there}"
    return None


def check_queries(result: Attribution, count: int, known: str | None) -> None:
    """Refuse scores of other queries, or of the same in another order; `known` is the fingerprint of the right ones."""
    everyone = tuple(range(count))
    if result.queries != everyone:
        index = next(i for i in everyone if result.queries[i] != i)
        raise DataError(
            f"the scores are not of all queries in their order: row {index} is "
            f"{describe_query(result.queries[index])}. Give the whole attribution."
        )
    mine = result.labels.fingerprints.get("queries")
    if mine and known and mine != known:
        raise DataError(
            "the scores are of other queries than the ground truth, or of the same in another order: attribute the "
            "queries that were given to retrain."
        )


def _compare_members(labels: Labels, sources: Sources) -> str | None:
    """Describe how the members of sources differ from these, or None if they do not, or that is unknown."""
    sizes = zip(labels.source_ids, labels.source_sizes, sources.sizes, strict=True)
    if different := next(
        (f"{i!r} has {mine} examples, there {theirs}" for i, mine, theirs in sizes if mine != theirs), None
    ):
        return different
    known = labels.fingerprints.get("sources")
    if known and not are_sources(replace(sources, names=labels.source_names), known):  # names may differ
        return "they have the same sizes"
    return None


def _first_difference(mine: tuple[str, ...], ids: tuple[str, ...]) -> str:
    if len(mine) != len(ids):
        return f"{len(mine)} sources, there {len(ids)}"
    index = next(i for i, (a, b) in enumerate(zip(mine, ids, strict=True)) if a != b)
    return f"number {index} is {mine[index]!r}, there {ids[index]!r}"
