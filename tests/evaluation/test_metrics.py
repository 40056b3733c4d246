"""Metrics are those of the field's benchmark, right on planted truths, and refuse what does not belong together."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from imprint import Attribution, DataError, ReadoutError, Sources
from imprint.attribution import Labels
from imprint.evaluation.metrics import Metric, evaluate, lds, loo, mislabel_auc, overlap, removal
from imprint.evaluation.metrics import slope as slope_of
from imprint.evaluation.statistics import correlations, ranks
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.fingerprint import of_sources

N, QUERIES = 20, 8
GROUPS = Sources.by_label([i % 5 for i in range(N)])
HALVES = Subsets.halves(N, 40)
LOO = Subsets.without_each(N)
REMOVALS = Subsets.without_each(GROUPS)
UNIONS = Subsets.without_some(N, 30, share=0.3)
PAIRS = Subsets.without(GROUPS, [[], [0, 1], [4]])
KINDS = {"halves": HALVES, "single examples": LOO, "sources": REMOVALS, "unions": UNIONS}
every_kind = pytest.mark.parametrize("subsets", KINDS.values(), ids=KINDS.keys())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores_for(subsets: Subsets, queries: int = QUERIES, seed: int = 0) -> Tensor:
    return draw(queries, len(subsets.sources), seed=seed)


def attribution(scores: Tensor, subsets: Subsets, **changes: Any) -> Attribution:
    sources = subsets.sources
    labels = Labels(subsets.n, sources.ids, sources.names, sources.sizes, "loss", "lower")
    return Attribution(replace(labels, **changes), scores)


def planted(
    scores: Tensor, subsets: Subsets, runs: int = 1, noise: float = 0.0, size: float = 1.0, seed: int = 1
) -> Truth:
    """A truth in which the scores are right but for their size: F = F₀ + size·Σ s/|S| over what a subset S has.

    An example weighs 1/N in a model that lacks little, and 1/|S| in one that is trained on a half.
    """
    weight = 1 / len(subsets.examples(0)) if subsets.kind == "halves" else 1 / subsets.n
    exact = 3 + size * weight * (subsets.kept().double() @ scores.T)
    values = exact + noise * weight * draw(runs, *exact.shape, seed=seed)
    return Truth(subsets, values, "loss")


def random_truth(subsets: Subsets, runs: int = 3) -> Truth:
    return Truth(subsets, draw(runs, len(subsets), QUERIES, seed=2), "loss")


# The field's benchmark. Its scores are (examples × queries) and positive where an example helps.


@pytest.mark.parametrize("runs", [1, 3])
def test_the_linear_datamodelling_score_is_that_of_dattri(runs: int) -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `peers` has it")
    scores, truth = scores_for(HALVES), random_truth(HALVES, runs)
    members = torch.stack([HALVES.examples(i) for i in range(len(HALVES))])
    theirs, _ = metric.lds(-scores.T, (-truth.values.mean(0), members))
    np.testing.assert_allclose(lds(scores, truth).per_query, theirs.numpy(), atol=1e-6)
    assert lds(scores, truth).estimate.value == pytest.approx(float(theirs.mean()), abs=1e-6)


@pytest.mark.parametrize("runs", [1, 3])
def test_leave_one_out_is_that_of_dattri(runs: int) -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `peers` has it")
    scores, truth = scores_for(LOO), random_truth(LOO, runs)
    theirs, _ = metric.loo_corr(-scores.T, (truth.values.mean(0)[1:], torch.arange(N)))
    np.testing.assert_allclose(loo(scores, truth).per_query, theirs.numpy(), atol=1e-6)


def test_the_area_under_the_curve_is_that_of_dattri() -> None:
    metric = pytest.importorskip("dattri.metric", reason="dattri is not installed: the extra `peers` has it")
    wrong = torch.arange(80) % 7 == 0
    influence = draw(80) - wrong.double()
    theirs, _ = metric.mislabel_detection_auc(-influence, wrong)
    assert mislabel_auc(influence, wrong).estimate.value == pytest.approx(float(theirs), abs=1e-6)


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


def metric_of(metrics: list[Metric]) -> Metric:
    """The one that is defined per query."""
    (found,) = (metric for metric in metrics if len(metric.per_query))
    return found


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


@every_kind
def test_the_slope_that_is_shown_is_the_one_that_calibrates(subsets: Subsets) -> None:
    scores = scores_for(subsets)
    truth = planted(scores, subsets, runs=2, noise=1.0)
    shown = slope_of(scores, truth).estimate
    assert shown.low < shown.value < shown.high
    assert attribution(scores, subsets).calibrate(truth).details["calibration"] == shown.value
    (again,) = [metric.estimate for metric in evaluate(scores, truth) if metric.name.startswith("slope")] or [shown]
    assert again == shown


@pytest.mark.parametrize("size", [0.25, 1.0, 3.0])
@every_kind
def test_calibrated_effects_have_the_size_of_the_truth(subsets: Subsets, size: float) -> None:
    scores = scores_for(subsets)
    result, truth = attribution(scores, subsets), planted(scores, subsets, runs=2, size=size)
    assert slope_of(result, truth).estimate.value == truth.slope(result) == pytest.approx(size)
    once = result.calibrate(truth)
    twice = once.calibrate(truth)
    for calibrated in (once, twice):
        torch.testing.assert_close(calibrated.removal_effect, -size * scores / subsets.n)
        assert calibrated.details["calibration"] == pytest.approx(size)
    assert "calibration" not in result.details
    assert truth.slope(once) == pytest.approx(1.0)


def test_calibration_is_right_on_average_where_the_truth_is_noisy() -> None:
    scores = scores_for(HALVES, 200)
    truth = planted(scores, HALVES, runs=3, noise=3.0, size=2.0)
    assert truth.slope(attribution(scores, HALVES)) == pytest.approx(2.0, abs=0.1)


# What is undefined is counted.


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
    assert "undefined for 1 queries" in str(found)
    nothing = metric_of(evaluate(torch.full_like(scores, constant), truth))
    assert nothing.undefined == QUERIES
    assert np.isnan(nothing.estimate.value)


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


@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3])
@every_kind
def test_constant_scores_cannot_be_calibrated(subsets: Subsets, constant: float) -> None:
    flat = attribution(torch.full_like(scores_for(subsets), constant), subsets)
    assert np.isnan(slope_of(flat, random_truth(subsets)).estimate.value)
    with pytest.raises(ReadoutError, match=r"do not rise together \(slope nan\)"):
        flat.calibrate(random_truth(subsets))


@every_kind
def test_a_truth_that_falls_where_scores_rise_flips_nothing(subsets: Subsets) -> None:
    scores = scores_for(subsets)
    truth = planted(scores, subsets, size=-2.0)
    assert truth.slope(attribution(scores, subsets)) == pytest.approx(-2.0)
    with pytest.raises(ReadoutError, match=r"do not rise together \(slope -2\)"):
        attribution(scores, subsets).calibrate(truth)


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
    with pytest.raises(DataError, match="these are halves"):
        metric(scores_for(HALVES), random_truth(HALVES))


def test_removals_hold_no_halves_and_unions_no_single_ones() -> None:
    with pytest.raises(DataError, match="needs a truth of random halves"):
        lds(scores_for(LOO), random_truth(LOO))
    with pytest.raises(DataError, match="single sources"):
        loo(scores_for(UNIONS), random_truth(UNIONS))


def other_ids() -> dict[str, Any]:
    return {"source_ids": tuple(str(i) if i != 7 else "seven" for i in range(N))}


@pytest.mark.parametrize("subsets", [HALVES, LOO], ids=["halves", "single examples"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 21}, "scores are of 21 training examples, the truth of 20"),
        (other_ids(), "other sources than the truth, number 7 is 'seven' against '7'"),
        ({"source_ids": ("0", "1")}, "other sources than the truth, 2 against 20"),
        ({"measure": "margin"}, "scores are of 'margin', the truth measured 'loss'"),
    ],
)
def test_scores_of_something_else_are_refused(changes: dict[str, Any], message: str, subsets: Subsets) -> None:
    scores = scores_for(subsets)
    evaluate(attribution(scores, subsets), random_truth(subsets))
    with pytest.raises(DataError, match=message):
        evaluate(attribution(scores, subsets, **changes), random_truth(subsets))
    with pytest.raises(DataError, match=message):
        attribution(scores, subsets, **changes).calibrate(random_truth(subsets))


def known(result: Attribution, **prints: str) -> Attribution:
    """The same, with fingerprints."""
    return replace(result, labels=replace(result.labels, fingerprints=prints))


@every_kind
def test_scores_of_other_queries_are_refused(subsets: Subsets) -> None:
    result, truth = attribution(scores_for(subsets), subsets), random_truth(subsets)
    told = replace(truth, about={"fingerprints": {"queries": "mine"}})
    for same, where in ((known(result, queries="mine"), told), (known(result, queries="mine"), truth), (result, told)):
        evaluate(same, where)
    other = known(result, queries="other")
    for use in (lambda: evaluate(other, told), lambda: other.calibrate(told)):
        with pytest.raises(
            DataError, match=r"other queries than the truth.*attribute those that were given to retrain"
        ):
            use()


def test_scores_of_reordered_queries_or_of_their_mean_are_refused() -> None:
    result, truth = attribution(scores_for(HALVES), HALVES), random_truth(HALVES)
    evaluate(result[list(range(QUERIES))], truth)
    for chosen, row in (([0, 2, 1, *range(3, QUERIES)], "row 1 is query 2"), ([0] * QUERIES, "row 1 is query 0")):
        with pytest.raises(DataError, match=f"not of all queries in their order, {row}: give the whole attribution"):
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
    with pytest.raises(DataError, match="with other members than the truth's: of the same sizes"):
        evaluate(known(result, sources=of_sources(swapped)), truth)
    with pytest.raises(DataError, match="other members than the truth's: '1' has 5 examples against 4"):
        evaluate(attribution(result.scores, halves, source_sizes=(4, 5, 3, 4, 4)), truth)


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    result, truth = attribution(scores_for(HALVES), HALVES), random_truth(HALVES)
    with pytest.raises(DataError, match=r"expected a Truth, got a str: .* Truth\.load reads one"):
        evaluate(result, "truth/news")  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"expected an Attribution, or a tensor of scores, got a Top: imprint\.attribute"
    ):
        evaluate(result.top(3), truth)  # type: ignore[arg-type]


@pytest.mark.parametrize("subsets", [Subsets.halves(N, 2), Subsets.without_each(N, only=[3, 4]), PAIRS])
def test_two_subsets_say_nothing(subsets: Subsets) -> None:
    with pytest.raises(DataError, match="has 2 subsets to compare: a correlation means nothing below 3"):
        evaluate(scores_for(subsets), random_truth(subsets))


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


def test_scores_may_be_of_any_precision_and_need_no_detaching() -> None:
    scores, truth = scores_for(HALVES), random_truth(HALVES)
    exact = lds(scores, truth).estimate.value
    assert lds(scores.float().requires_grad_(), truth).estimate.value == pytest.approx(exact, abs=1e-3)


# Mislabelled examples, and agreement of two attributions.


def test_wrong_labels_are_looked_for_where_the_measurement_says() -> None:
    wrong = torch.arange(40) < 8
    influence = draw(40) - 10 * wrong.double()  # a wrong label lowers its own loss most
    found = mislabel_auc(influence, wrong)
    assert found.estimate.value == 1.0
    assert found.estimate.low == found.estimate.high == 1.0
    assert mislabel_auc(-influence, wrong, better="higher").estimate.value == 1.0
    assert mislabel_auc(influence, wrong, better="higher").estimate.value == 0.0
    chance = mislabel_auc(draw(400), torch.arange(400) % 2 == 0).estimate
    assert chance.low < 0.5 < chance.high


def test_the_area_is_refused_without_both_kinds_of_examples_or_with_values_that_do_not_fit() -> None:
    for wrong in (torch.ones(5), torch.zeros(5)):
        with pytest.raises(DataError, match="some mislabelled examples and some that are not"):
            mislabel_auc(draw(5), wrong)
    with pytest.raises(DataError, match="one value and one label per example"):
        mislabel_auc(draw(5), torch.arange(4) < 2)
    with pytest.raises(DataError, match="finite"):
        mislabel_auc(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([True, False, False]))


def test_overlap_is_the_share_of_the_largest_effects_in_common() -> None:
    first = attribution(torch.tensor([[5.0, -4.0, 3.0, 2.0, 1.0]]), REMOVALS)
    second = attribution(torch.tensor([[5.0, 0.0, 3.0, -4.0, 1.0]]), REMOVALS)
    assert overlap(first, first, 3).estimate.value == 1.0
    assert overlap(first, second, 3).estimate.value == pytest.approx(2 / 3)
    assert overlap(first, second, 50).name == "overlap of the first 5"
    with pytest.raises(DataError, match="same queries to the same sources"):
        overlap(first, attribution(second.scores, REMOVALS, source_ids=("a", "b", "c", "d", "e")))
    with pytest.raises(DataError, match="same queries to the same sources"):
        overlap(known(first, queries="mine"), known(second, queries="other"))
