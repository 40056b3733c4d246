"""Metrics refuse scores and truths that do not belong together, and values that make none."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from imprint import DataError, Sources
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.store.fingerprint import of_sources
from tests.evaluation.planted import (
    GROUPS,
    HALVES,
    LOO,
    QUERIES,
    N,
    attribution,
    draw,
    every_kind,
    known,
    random_truth,
    scores_for,
)


def other_ids() -> dict[str, Any]:
    return {"source_ids": tuple(str(i) if i != 7 else "seven" for i in range(N))}


@pytest.mark.parametrize("subsets", [HALVES, LOO], ids=["halves", "single examples"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 21}, "scores are of 21 training examples, the ground truth is of 20"),
        (other_ids(), "other sources than the ground truth: number 7 is 'seven', there '7'"),
        ({"source_ids": ("0", "1")}, "other sources than the ground truth: 2 sources, there 20"),
        ({"measure": "margin"}, "scores are of 'margin', the ground truth measured 'loss'"),
    ],
)
def test_scores_of_something_else_are_refused(changes: dict[str, Any], message: str, subsets: Subsets) -> None:
    scores = scores_for(subsets)
    evaluate(attribution(scores, subsets), random_truth(subsets))
    with pytest.raises(DataError, match=message):
        evaluate(attribution(scores, subsets, **changes), random_truth(subsets))
    with pytest.raises(DataError, match=message):
        attribution(scores, subsets, **changes).calibrate(random_truth(subsets))


@every_kind
def test_scores_of_other_queries_are_refused(subsets: Subsets) -> None:
    result, truth = attribution(scores_for(subsets), subsets), random_truth(subsets)
    told = replace(truth, about={"fingerprints": {"queries": "mine"}})
    for same, where in ((known(result, queries="mine"), told), (known(result, queries="mine"), truth), (result, told)):
        evaluate(same, where)
    other = known(result, queries="other")
    for use in (lambda: evaluate(other, told), lambda: other.calibrate(told)):
        with pytest.raises(
            DataError, match=r"other queries than the ground truth.*attribute the queries that were given to retrain"
        ):
            use()


def test_scores_of_reordered_queries_or_of_their_mean_are_refused() -> None:
    result, truth = attribution(scores_for(HALVES), HALVES), random_truth(HALVES)
    evaluate(result[list(range(QUERIES))], truth)
    for chosen, row in (([0, 2, 1, *range(3, QUERIES)], "row 1 is query 2"), ([0] * QUERIES, "row 1 is query 0")):
        with pytest.raises(DataError, match=f"not of all queries in their order: {row}. Give the whole attribution"):
            evaluate(result[chosen], truth)
    single = Truth(HALVES, truth.values[:, :, :1], "loss")
    evaluate(result[0], single)
    with pytest.raises(DataError, match="row 0 is mean over queries"):
        evaluate(result.mean(), single)


def test_scores_of_sources_with_other_members_are_refused() -> None:
    halves = Subsets.halves(GROUPS, 6)
    truth, result = random_truth(halves), attribution(scores_for(halves), halves)
    swapped = Sources.by_label([(i + 1) % 5 for i in range(N)])  # same ids, same sizes
    renamed = replace(GROUPS, names=("a", "b", "c", "d", "e"))
    evaluate(known(result, sources=of_sources(GROUPS)), truth)
    evaluate(known(attribution(result.scores, halves, source_names=renamed.names), sources=of_sources(renamed)), truth)
    with pytest.raises(DataError, match="with other members than in the ground truth: they have the same sizes"):
        evaluate(known(result, sources=of_sources(swapped)), truth)
    with pytest.raises(DataError, match="other members than in the ground truth: '1' has 5 examples, there 4"):
        evaluate(attribution(result.scores, halves, source_sizes=(4, 5, 3, 4, 4)), truth)


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    result, truth = attribution(scores_for(HALVES), HALVES), random_truth(HALVES)
    with pytest.raises(DataError, match=r"expected a Truth, got a str: .* Truth\.load reads one"):
        evaluate(result, "truth/news")  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"expected an Attribution, or a tensor of scores, got a Top: imprint\.attribute"
    ):
        evaluate(result.top(3), truth)  # type: ignore[arg-type]


PARAMETERS = {"a": {"shape": [5, 4], "dtype": "torch.float32"}, "b": {"shape": [5], "dtype": "torch.float32"}}


def about(**prints: Any) -> dict[str, Any]:
    return {"fingerprints": prints}


def test_scores_of_other_data_are_refused() -> None:
    result, truth = known(attribution(scores_for(HALVES), HALVES), data="mine"), random_truth(HALVES)
    for same in (about(data="mine"), about(), {}):
        evaluate(result, replace(truth, about=same))
    other = replace(truth, about=about(data="other"))
    for use in (lambda: evaluate(result, other), lambda: result.calibrate(other)):
        with pytest.raises(
            DataError, match="other training data than the ground truth, or of the same in another order"
        ):
            use()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({**PARAMETERS, "a": {"shape": [3, 4], "dtype": "torch.float32"}}, r"'a' has shape \(5, 4\), there \(3, 4\)"),
    ],
)
def test_scores_of_another_model_are_refused(change: dict[str, Any], message: str) -> None:
    result, truth = known(attribution(scores_for(HALVES), HALVES), parameters=PARAMETERS), random_truth(HALVES)
    with pytest.raises(DataError, match=f"another model than the ground truth: .*{message}"):
        evaluate(result, replace(truth, about=about(parameters=change)))


def test_scores_may_be_of_some_of_the_parameters_and_of_another_precision() -> None:
    result, truth = known(attribution(scores_for(HALVES), HALVES), parameters=PARAMETERS), random_truth(HALVES)
    double = {name: {**values, "dtype": "torch.float64"} for name, values in PARAMETERS.items()}
    for other in (double, {"a": PARAMETERS["a"]}, {**PARAMETERS, "c": PARAMETERS["b"]}, {}):
        evaluate(result, replace(truth, about=about(parameters=other)))


@every_kind
def test_scores_of_another_shape_or_not_finite_are_refused(subsets: Subsets) -> None:
    scores, truth = scores_for(subsets), random_truth(subsets)
    for wrong in (scores[:, 1:], scores[1:], scores.T, scores[0]):
        with pytest.raises(DataError, match=f"expected scores of 8 queries and {len(subsets.sources)} sources"):
            evaluate(wrong, truth)
    for value in (torch.nan, torch.inf):
        spoilt = scores.clone()
        spoilt[3, 2] = value
        with pytest.raises(DataError, match="scores must be finite"):
            evaluate(spoilt, truth)


BAD_VALUES: dict[str, tuple[Any, str]] = {
    "list": ([[1.0]], "must be a tensor, got a list"),
    "two dimensions": (draw(40, QUERIES), r"shape \(runs, 40 subsets, queries\).*got \(40, 8\)"),
    "other subsets": (draw(2, 39, QUERIES), r"got \(2, 39, 8\)"),
    "no run": (draw(2, 40, QUERIES)[:0], r"each at least 1; got \(0, 40, 8\)"),
    "no query": (draw(2, 40, QUERIES)[:, :, :0], r"got \(2, 40, 0\)"),
    "a gap": (draw(2, 40, QUERIES).index_fill(1, torch.tensor([3]), torch.nan), "must be finite"),
}


@pytest.mark.parametrize(("values", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_values_that_make_no_truth_are_refused(values: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"values of a ground truth .*{message}"):
        Truth(HALVES, values, "loss")


def test_values_of_a_truth_are_kept_in_double_precision() -> None:
    assert Truth(HALVES, draw(2, 40, QUERIES).float().requires_grad_(), "loss").values.dtype == torch.float64
    assert Truth(HALVES, (10 * draw(2, 40, QUERIES)).long(), "loss").values.dtype == torch.float64
