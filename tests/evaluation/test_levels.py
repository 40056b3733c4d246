"""Figures over queries say what their intervals are over: queries, or runs and queries where there are several runs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from imprint import Attribution
from imprint.attribution.replicates import Replicates
from imprint.evaluation.matching import leave_out_runs
from imprint.evaluation.metrics import evaluate, overlap, predicted_lds
from imprint.evaluation.subsets import Subsets
from imprint.statistics import Estimate
from tests.evaluation.planted import HALVES, QUERIES, attribution, draw, every_kind, planted, scores_for

SHARES = (0.5, 0.3, 0.2)


def repeated(subsets: Subsets, size: float = 0.5) -> Attribution:
    """Scores of three runs, whose errors all queries share."""
    scores = scores_for(subsets)
    runs = scores + size * draw(3, 1, scores.shape[1], seed=5)
    mean = torch.einsum("r,rqs->qs", torch.tensor(SHARES, dtype=torch.float64), runs)
    return replace(attribution(mean, subsets), replicates=(Replicates(runs - mean, SHARES, tuple("abc")),))


def once(result: Attribution) -> Attribution:
    return replace(result, replicates=())


def length(estimate: Estimate) -> float:
    return estimate.high - estimate.low


def test_scores_without_a_run_are_the_mean_of_the_others() -> None:
    result = repeated(HALVES)
    runs = result.scores + result.replicates[0].deviations
    expected: list[Tensor] = [
        (0.3 * runs[1] + 0.2 * runs[2]) / 0.5,
        (0.5 * runs[0] + 0.2 * runs[2]) / 0.7,
        (0.5 * runs[0] + 0.3 * runs[1]) / 0.8,
    ]
    for found, other in zip(leave_out_runs(result), expected, strict=True):
        torch.testing.assert_close(found, other)
    (runs_of_one,) = result.replicates
    assert leave_out_runs(replace(result, replicates=(replace(runs_of_one, over="checkpoints"),))) == []
    assert leave_out_runs(once(result)) == []


@every_kind
def test_runs_of_scores_or_ground_truth_widen_every_interval(subsets: Subsets) -> None:
    result = repeated(subsets)
    one, several = planted(scores_for(subsets), subsets), planted(scores_for(subsets), subsets, runs=3, noise=0.3)
    alone = evaluate(once(result), one)
    for metrics, plain in (
        (evaluate(result, one), alone),
        (
            evaluate(once(result), several),
            evaluate(once(result), replace(several, values=several.values.mean(0)[None])),
        ),
    ):
        for metric, single in zip(metrics, plain, strict=True):
            assert (metric.over, single.over) == ("runs and queries", "queries")
            assert metric.to_json()["interval_over"] == "runs and queries"
            assert metric.estimate.value == pytest.approx(single.estimate.value)
            assert metric.estimate.low <= metric.estimate.value <= metric.estimate.high
            assert length(metric.estimate) > length(single.estimate), metric.name


def test_bare_scores_rest_on_one_run() -> None:
    found = predicted_lds(scores_for(HALVES) @ HALVES.membership().double().T, planted(scores_for(HALVES), HALVES))
    assert found.over == "queries"


def test_the_overlap_of_results_of_several_runs_is_over_runs_too() -> None:
    result = repeated(HALVES, size=2.0)
    other = attribution(scores_for(HALVES), HALVES)
    found, plain = overlap(result, other, 3), overlap(once(result), other, 3)
    assert (found.over, plain.over) == ("runs and queries", "queries") and len(found.per_query) == QUERIES
    assert found.estimate.value == plain.estimate.value and length(found.estimate) > length(plain.estimate)
    assert overlap(other, result, 3).estimate == found.estimate
