"""Metrics are those of the field's benchmark, and right on planted truths."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from imprint import DataError
from imprint.evaluation.metrics import evaluate, lds, loo, overlap, removal
from imprint.evaluation.mislabels import detection_auc
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.statistics import correlations, ranks
from tests.evaluation.planted import (
    HALVES,
    LOO,
    PAIRS,
    REMOVALS,
    UNIONS,
    N,
    attribution,
    draw,
    every_kind,
    known,
    metric_of,
    planted,
    random_truth,
    scores_for,
)

# The field's benchmark. Its scores are (examples × queries) and positive where an example helps.


@pytest.mark.parametrize("runs", [1, 3])
def test_the_linear_datamodelling_score_is_that_of_dattri(runs: int) -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `bench` has it")
    scores, truth = scores_for(HALVES), random_truth(HALVES, runs)
    members = torch.stack([HALVES.examples(i) for i in range(len(HALVES))])
    theirs, _ = metric.lds(-scores.T, (-truth.values.mean(0), members))
    np.testing.assert_allclose(lds(scores, truth).per_query, theirs.numpy(), atol=1e-6)
    assert lds(scores, truth).estimate.value == pytest.approx(float(theirs.mean()), abs=1e-6)


@pytest.mark.parametrize("runs", [1, 3])
def test_leave_one_out_is_that_of_dattri(runs: int) -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `bench` has it")
    scores, truth = scores_for(LOO), random_truth(LOO, runs)
    theirs, _ = metric.loo_corr(-scores.T, (truth.values.mean(0)[1:], torch.arange(N)))
    np.testing.assert_allclose(loo(scores, truth).per_query, theirs.numpy(), atol=1e-6)


def test_the_area_under_the_curve_is_that_of_dattri() -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `bench` has it")
    wrong = torch.arange(80) % 7 == 0
    influence = draw(80) - wrong.double()
    theirs, _ = metric.mislabel_detection_auc(-influence, wrong)
    assert detection_auc(-influence, wrong).estimate.value == pytest.approx(float(theirs), abs=1e-6)


# Planted truths.


@every_kind
def test_scores_that_are_right_are_found_to_be_right_and_their_negatives_wrong(subsets: Subsets) -> None:
    scores = scores_for(subsets)
    truth = planted(scores, subsets)
    for sign in (1, -1):
        found = evaluate(sign * scores, truth)
        assert [metric.estimate.value for metric in found] == pytest.approx([sign] * len(found))


@pytest.mark.parametrize("subsets", [HALVES, LOO, UNIONS], ids=["halves", "single examples", "unions"])
def test_perfect_scores_reach_the_ceiling_and_random_ones_nothing(subsets: Subsets) -> None:
    """Within the 95% intervals of ten queries, in most of 30 simulations with as much noise as there is signal."""
    perfect, random, ceilings, missed = 0, 0, [], []
    for seed in range(30):
        scores, noise = scores_for(subsets, 10, seed), 1.0 if subsets is LOO else 2.0
        truth = planted(scores, subsets, runs=5, noise=noise, seed=100 + seed)
        found = metric_of(evaluate(scores, truth))
        perfect += found.estimate.low <= found.ceiling <= found.estimate.high
        ceilings.append(found.ceiling)
        missed.append(found.ceiling - found.estimate.value)
        nothing = metric_of(evaluate(scores_for(subsets, 10, 1000 + seed), truth)).estimate
        random += nothing.low <= 0 <= nothing.high
    assert 0.7 < np.mean(ceilings) < 0.95
    assert -0.01 < np.mean(missed) < 0.02  # of ranks the ceiling is a little too high
    assert perfect >= 22
    assert random >= 22


def test_a_single_run_is_a_worse_truth_than_the_mean_of_all() -> None:
    scores = scores_for(HALVES, 40)
    two, five = (lds(scores, planted(scores, HALVES, runs, noise=2.0)) for runs in (2, 5))
    assert 0 < five.single_run < five.estimate.value
    runs = planted(scores, HALVES, 2, noise=2.0).values.transpose(1, 2).numpy()
    assert two.single_run == pytest.approx(correlations(ranks(runs[0]), ranks(runs[1])).mean())
    one = lds(scores, planted(scores, HALVES, 1, noise=2.0))
    assert np.isnan(one.single_run) and np.isnan(one.ceiling)


def test_removals_tell_what_the_other_runs_reach_against_one() -> None:
    scores = scores_for(UNIONS, 40)
    truth = planted(scores, UNIONS, 2, noise=2.0)
    first, second = truth.effects.numpy()
    mean, rank, _ = evaluate(scores, truth)
    assert mean.single_run == pytest.approx(correlations(first.mean(0), second.mean(0)))
    assert rank.single_run == pytest.approx(correlations(ranks(first), ranks(second)).mean())
    assert 0 < rank.single_run < rank.ceiling < 1
    assert all(np.isnan(metric.single_run) for metric in evaluate(scores, planted(scores, UNIONS, 1, noise=2.0)))


# Which metrics, and of what.


@every_kind
def test_the_kind_of_the_truth_decides_on_the_metrics(subsets: Subsets) -> None:
    removals = ["correlation of removals, mean over queries", "rank correlation of removals, per query"]
    expected = {id(HALVES): ["LDS"], id(LOO): ["LOO"]}
    found = evaluate(scores_for(subsets), random_truth(subsets))
    names = expected.get(id(subsets), [*removals, "slope of actual on predicted effects"])
    assert [metric.name for metric in found] == names
    assert all(str(metric).startswith(metric.name) for metric in found)


def test_effects_are_found_by_what_was_removed_in_whatever_order() -> None:
    scores, truth = scores_for(LOO), random_truth(LOO)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    shuffled = Subsets.without_each(N, only=order.tolist())
    values = torch.cat([truth.values[:, :1], truth.values[:, 1:][:, order]], dim=1)
    found = loo(scores, Truth(shuffled, values, "loss"))
    np.testing.assert_allclose(found.per_query, loo(scores, truth).per_query)
    some = Subsets.without_each(N, only=order[:7].tolist())
    part = loo(scores, Truth(some, values[:, :8], "loss"))
    expected = correlations(-scores[:, order[:7]].numpy(), truth.effects.mean(0)[:, order[:7]].numpy())
    np.testing.assert_allclose(part.per_query, expected)


def test_the_removal_of_several_sources_is_predicted_by_the_sum_of_their_scores() -> None:
    scores = scores_for(REMOVALS)
    check = removal(scores, random_truth(PAIRS))
    expected = -torch.stack([scores[:, 0] + scores[:, 1], scores[:, 4]], dim=1) / N
    np.testing.assert_allclose(check.predicted, expected.numpy())


@pytest.mark.parametrize("metric", [loo, removal])
def test_halves_hold_no_removals(metric: Callable[[Tensor, Truth], object]) -> None:
    with pytest.raises(DataError, match="these are trained on halves"):
        metric(scores_for(HALVES), random_truth(HALVES))


def test_removals_hold_no_halves_and_unions_no_single_ones() -> None:
    with pytest.raises(DataError, match="needs ground truth from random halves"):
        lds(scores_for(LOO), random_truth(LOO))
    with pytest.raises(DataError, match="single sources"):
        loo(scores_for(UNIONS), random_truth(UNIONS))


@pytest.mark.parametrize("subsets", [Subsets.halves(N, 2), Subsets.without_each(N, only=[3, 4]), PAIRS])
def test_two_subsets_say_nothing(subsets: Subsets) -> None:
    with pytest.raises(DataError, match="has 2 subsets to compare: a correlation needs at least 3"):
        evaluate(scores_for(subsets), random_truth(subsets))


def test_scores_may_be_of_any_precision_and_need_no_detaching() -> None:
    scores, truth = scores_for(HALVES), random_truth(HALVES)
    exact = lds(scores, truth).estimate.value
    assert lds(scores.float().requires_grad_(), truth).estimate.value == pytest.approx(exact, abs=1e-3)


def test_where_all_effects_are_equally_large_there_is_no_overlap() -> None:
    scores = scores_for(REMOVALS)
    flat = scores.clone()
    flat[1], flat[4] = 0.3, torch.tensor([0.3, -0.3, 0.3, 0.3, -0.3])
    for pair in ((scores, flat), (flat, scores)):
        first, second = (attribution(each, REMOVALS) for each in pair)
        found = overlap(first, second, 2)
        assert found.undefined == 2
        assert np.flatnonzero(np.isnan(found.per_query)).tolist() == [1, 4]
    with pytest.raises(DataError, match="overlap compares two Attributions, got a Top"):
        overlap(attribution(scores, REMOVALS).top(2), attribution(scores, REMOVALS))  # type: ignore[arg-type]


def test_a_metric_is_short_to_look_at_and_has_equal_digits() -> None:
    found = lds(scores_for(HALVES), planted(scores_for(HALVES), HALVES, 3, noise=2.0))
    assert repr(found) == f"Metric({found})"
    assert str(found) == (
        f"LDS {found.estimate.value:.3f} [{found.estimate.low:.3f}, {found.estimate.high:.3f}], "
        f"ceiling {found.ceiling:.3f} (expected)"
    )


def test_a_ceiling_is_an_upper_estimate_where_queries_differ_in_noise() -> None:
    scores = scores_for(HALVES, 60)
    loud = torch.linspace(-2, 2, 60, dtype=torch.float64).exp()
    values = planted(scores, HALVES).values + 0.2 * loud * draw(4, len(HALVES), 60, seed=5)
    found = lds(scores, Truth(HALVES, values, "loss"))
    assert found.estimate.high < found.ceiling


def test_overlap_is_the_share_of_the_largest_effects_in_common() -> None:
    first = attribution(torch.tensor([[5.0, -4.0, 3.0, 2.0, 1.0]]), REMOVALS)
    second = attribution(torch.tensor([[5.0, 0.0, 3.0, -4.0, 1.0]]), REMOVALS)
    assert overlap(first, first, 3).estimate.value == 1.0
    assert overlap(first, second, 3).estimate.value == pytest.approx(2 / 3)
    assert overlap(first, second, 50).name == "overlap of the first 5"
    with pytest.raises(DataError, match="the same queries and the same sources"):
        overlap(first, attribution(second.scores, REMOVALS, source_ids=("a", "b", "c", "d", "e")))
    with pytest.raises(DataError, match="the same queries and the same sources"):
        overlap(known(first, queries="mine"), known(second, queries="other"))
