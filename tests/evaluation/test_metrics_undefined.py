"""What is undefined in a metric is counted."""

import json

import numpy as np
import pytest
import torch

from imprint.evaluation.metrics import evaluate, lds, loo
from imprint.evaluation.metrics import slope as slope_of
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import (
    GROUPS,
    HALVES,
    KINDS,
    LOO,
    QUERIES,
    REMOVALS,
    draw,
    every_kind,
    metric_of,
    random_truth,
    scores_for,
)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3])  # sums of which differ by rounding
@every_kind
def test_constant_scores_are_counted_and_not_averaged_away(subsets: Subsets, constant: float) -> None:
    scores, truth = scores_for(subsets), random_truth(subsets)
    flat = scores.clone()
    flat[2] = constant
    found, without = (metric_of(evaluate(s, truth)) for s in (flat, scores))
    assert found.undefined == 1
    assert np.isnan(found.per_query[2])
    others = np.delete(without.per_query, 2)
    np.testing.assert_allclose(np.delete(found.per_query, 2), others)
    assert found.estimate.value == pytest.approx(others.mean())
    assert "undefined for 1 query" in str(found)
    nothing = metric_of(evaluate(torch.full_like(scores, constant), truth))
    assert nothing.undefined == QUERIES
    assert np.isnan(nothing.estimate.value)
    assert "undefined: scores or ground truth are constant" in str(nothing)


def test_scores_that_are_constant_in_their_own_precision_are_constant() -> None:
    nearly = (0.1 * (1 + 1e-7 * draw(QUERIES, len(GROUPS)))).float()
    truth = random_truth(REMOVALS)
    assert len(nearly.unique()) > 2
    mean, rank, slope = evaluate(nearly, truth)
    assert mean.undefined == rank.undefined == slope.undefined == QUERIES
    assert np.isnan([mean.estimate.value, rank.estimate.value, slope.estimate.value]).all()
    exact = evaluate(nearly.double(), truth)  # in double precision these are differences
    assert [metric.undefined for metric in exact] == [0, 0, 0]


def test_a_query_with_constant_scores_does_not_count_for_the_slope() -> None:
    scores, truth = scores_for(REMOVALS), random_truth(REMOVALS)
    scores[2] = 0.1
    assert slope_of(scores, truth).undefined == 1
    assert np.isfinite(slope_of(scores, truth).estimate.value)


def test_effects_that_are_the_rounding_of_f_are_constant() -> None:
    values = torch.full((2, len(LOO), QUERIES), 0.7, dtype=torch.float64)
    values += 1.2e-16 * draw(*values.shape).round()
    assert len(values.unique()) > 2
    found = loo(scores_for(LOO), Truth(LOO, values, "loss"))
    assert found.undefined == QUERIES
    assert str(found) == "LOO undefined: scores or ground truth are constant (expected)"


def test_constant_truths_are_counted_too() -> None:
    values = random_truth(HALVES).values.clone()
    values[:, :, 3] = 0.1
    found = lds(scores_for(HALVES), Truth(HALVES, values, "loss"))
    assert found.undefined == 1
    assert np.isfinite(found.estimate.value) and np.isfinite(found.ceiling)


@pytest.mark.filterwarnings("error")
@every_kind
def test_a_truth_that_is_constant_throughout_leaves_nothing_defined(subsets: Subsets) -> None:
    flat = Truth(subsets, torch.full((2, len(subsets), QUERIES), 0.1, dtype=torch.float64), "loss")
    found = metric_of(evaluate(scores_for(subsets), flat))
    assert found.undefined == QUERIES
    assert np.isnan([found.estimate.value, found.ceiling, found.single_run]).all()


def test_metrics_are_written_as_valid_json_with_none_for_what_is_undefined() -> None:
    scores = scores_for(HALVES)
    scores[0] = 0.0
    (found,) = evaluate(scores, random_truth(HALVES, runs=1))
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert values["name"] == "LDS"
    assert values["undefined"] == 1
    assert values["per_query"][0] is None
    assert values["ceiling"] is None and values["single_run"] is None
    assert values["value"] == pytest.approx(found.estimate.value)
    assert values["low"] <= values["value"] <= values["high"]
    for subsets in KINDS.values():
        nothing = evaluate(torch.zeros_like(scores_for(subsets)), random_truth(subsets))
        assert "NaN" not in json.dumps([metric.to_json() for metric in nothing], allow_nan=False)
