"""Metrics are those of the field's benchmark, right on planted truths, and refuse what does not belong together."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Attribution, DataError, ReadoutError, Sources, Task
from imprint.attribution.labels import Labels
from imprint.evaluation.metrics import Metric, evaluate, lds, loo, overlap, removal
from imprint.evaluation.metrics import slope as slope_of
from imprint.evaluation.mislabels import detection_auc, example_losses, mislabel_auc
from imprint.evaluation.statistics import Estimate, correlations, ranks
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.store.fingerprint import of_sources
from imprint.task import Better

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
    """A truth in which the scores are right but for their size: F = F₀ + size·Σ s/|S| over what a subset S has."""
    weight = torch.tensor([[1 / len(subsets.examples(index))] for index in range(len(subsets))], dtype=torch.float64)
    exact = 3 + size * weight * (subsets.membership().double() @ scores.T)
    values = exact + noise * weight * draw(runs, *exact.shape, seed=seed)
    return Truth(subsets, values, "loss")


def random_truth(subsets: Subsets, runs: int = 3) -> Truth:
    return Truth(subsets, draw(runs, len(subsets), QUERIES, seed=2), "loss")


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


# Exact scores of ridge regression: s = dF/dw of the weight w of each example of a source, at w = 1/N.


def ridge(sizes: list[int], decay: float) -> tuple[Tensor, Sources, Callable[[Subsets], Truth]]:
    """Exact scores, the sources, and a function that retrains exactly."""
    n, owner = sum(sizes), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x, xq, taste = draw(n, 4), draw(30, 4, seed=1), draw(len(sizes), seed=2)
    y = x @ draw(4, seed=3) + draw(n, seed=4) + 0.6 * taste[owner] * x[:, 0]
    yq = xq @ draw(4, seed=3) + draw(30, seed=5)
    pull = decay * torch.eye(4, dtype=torch.float64)

    def solved(chosen: Tensor) -> Tensor:
        a, b = x[chosen], y[chosen]
        solution: Tensor = torch.linalg.solve(a.T @ a / len(a) + pull, a.T @ b / len(a))
        return solution

    theta = solved(torch.arange(n))
    gradients = x * (x @ theta - y)[:, None]
    sums = torch.stack([gradients[owner == source].sum(0) for source in range(len(sizes))])
    of_queries = xq * (xq @ theta - yq)[:, None]
    scores = -of_queries @ torch.linalg.solve(x.T @ x / n + pull, sums.T)

    def truth(subsets: Subsets) -> Truth:
        thetas = torch.stack([solved(subsets.examples(index)) for index in range(len(subsets))])
        return Truth(subsets, (thetas @ xq.T - yq).square()[None] / 2, "loss")

    return scores, Sources.by_label(owner), truth


@pytest.mark.parametrize("decay", [1e-6, 0.1, 1.0])
@pytest.mark.parametrize("sizes", [[60] * 30, [15 * i for i in range(1, 17)]], ids=["equal", "unequal"])
@pytest.mark.parametrize("kind", ["each", "a fifth", "half of them", "halves"])
def test_exact_scores_have_the_slope_one_however_much_is_removed(kind: str, sizes: list[int], decay: float) -> None:
    scores, sources, truth = ridge(sizes, decay)
    subsets = {
        "each": lambda: Subsets.without_each(sources),
        "a fifth": lambda: Subsets.without_some(sources, 100),
        "half of them": lambda: Subsets.without_some(sources, 100, share=0.5),
        "halves": lambda: Subsets.halves(sources, 100),
    }[kind]()
    assert slope_of(scores, truth(subsets)).estimate.value == pytest.approx(1.0, abs=0.08)


@pytest.mark.parametrize("make", [Subsets.halves, Subsets.without_some])
def test_every_model_counts_by_its_own_size(make: Callable[..., Subsets]) -> None:
    subsets = make(Sources.by_label(torch.repeat_interleave(torch.arange(6), torch.tensor([1, 2, 4, 8, 16, 32]))), 6)
    scores = 1 + scores_for(subsets)
    assert slope_of(scores, planted(scores, subsets)).estimate.value == pytest.approx(1.0, abs=1e-9)


def test_the_same_models_give_the_same_slope_whether_they_are_halves_or_removals() -> None:
    scores, sources, truth = ridge([15 * i for i in range(1, 17)], 0.1)
    halves = Subsets.halves(sources, 40)
    removals = Subsets.without(sources, [[], *halves.removed])
    first, second = (slope_of(scores, truth(subsets)).estimate.value for subsets in (halves, removals))
    assert first == pytest.approx(second, rel=1e-9)


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
    assert str(found) == "LOO undefined: scores or ground truth are constant"


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
    with pytest.raises(DataError, match="these are trained on halves"):
        metric(scores_for(HALVES), random_truth(HALVES))


def test_removals_hold_no_halves_and_unions_no_single_ones() -> None:
    with pytest.raises(DataError, match="needs ground truth from random halves"):
        lds(scores_for(LOO), random_truth(LOO))
    with pytest.raises(DataError, match="single sources"):
        loo(scores_for(UNIONS), random_truth(UNIONS))


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


def known(result: Attribution, **prints: Any) -> Attribution:
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


def test_a_slope_of_sources_that_overlap_or_leave_examples_out_is_warned_of() -> None:
    for groups, how in (([range(4), range(3, N)], "overlap"), ([range(4), range(4, N - 1)], "leave examples out")):
        parts = Sources.groups({str(index): list(group) for index, group in enumerate(groups)})
        subsets = Subsets.without_each(parts, n=N)
        values = torch.rand(2, len(subsets), 5, dtype=torch.float64)
        with pytest.warns(UserWarning, match=f"the sources {how}"):
            slope_of(torch.rand(5, 2), Truth(subsets, values, "loss"))


def test_scores_may_be_of_some_of_the_parameters_and_of_another_precision() -> None:
    result, truth = known(attribution(scores_for(HALVES), HALVES), parameters=PARAMETERS), random_truth(HALVES)
    double = {name: {**values, "dtype": "torch.float64"} for name, values in PARAMETERS.items()}
    for other in (double, {"a": PARAMETERS["a"]}, {**PARAMETERS, "c": PARAMETERS["b"]}, {}):
        evaluate(result, replace(truth, about=about(parameters=other)))


@pytest.mark.parametrize("subsets", [Subsets.halves(N, 2), Subsets.without_each(N, only=[3, 4]), PAIRS])
def test_two_subsets_say_nothing(subsets: Subsets) -> None:
    with pytest.raises(DataError, match="has 2 subsets to compare: a correlation needs at least 3"):
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
    wrong, losses = torch.arange(40) < 8, draw(40)
    influence = draw(40) - 10 * wrong.double()  # a wrong label lowers its own loss most

    def found(influence: torch.Tensor, better: Better = "lower") -> Estimate:
        return mislabel_auc(influence, wrong, losses, better).influence.estimate

    assert found(influence).value == found(-influence, "higher").value == 1.0
    assert found(influence, "higher").value == 0.0
    assert 0.8 < found(influence).low < 0.95  # eight examples of forty prove no perfect detector
    chance = detection_auc(draw(400), torch.arange(400) % 2 == 0).estimate
    assert chance.low < 0.5 < chance.high


def test_self_influence_stands_beside_plain_loss_and_the_better_one_is_named() -> None:
    wrong = torch.arange(200) % 10 == 0
    noisy, clear = draw(200) + 1.5 * wrong.double(), draw(200) + 5 * wrong.double()
    worse, better = mislabel_auc(-noisy, wrong, clear), mislabel_auc(-clear, wrong, noisy)
    assert worse.better == "plain loss"
    assert better.better == "self-influence"
    assert mislabel_auc(-noisy, wrong, noisy).better == "neither"
    assert f"plain loss {worse.loss.estimate.format(3)}" in str(worse)
    assert "plain loss is better" in str(worse)
    assert worse.ahead.value == pytest.approx(worse.influence.estimate.value - worse.loss.estimate.value)


def test_plain_losses_are_those_of_the_model_in_evaluation_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    x, y = draw(7, 3).float(), torch.arange(7) % 2
    found = example_losses(Task.classifier(model), (x, y), batch_size=2)
    torch.testing.assert_close(found, F.cross_entropy(model.eval()(x), y, reduction="none").detach())
    trained = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    later = example_losses(Task.classifier(model), (x, y), checkpoint=trained)
    model.load_state_dict(trained)
    torch.testing.assert_close(later, F.cross_entropy(model(x), y, reduction="none").detach())


def test_the_area_is_refused_without_both_kinds_of_examples_or_with_values_that_do_not_fit() -> None:
    for wrong in (torch.ones(5), torch.zeros(5)):
        with pytest.raises(DataError, match="some mislabelled and some correctly labelled examples"):
            mislabel_auc(draw(5), wrong, draw(5))
    with pytest.raises(DataError, match="one value and one label per example"):
        mislabel_auc(draw(5), torch.arange(4) < 2, draw(5))
    with pytest.raises(DataError, match="one value and one label per example"):
        mislabel_auc(draw(5), torch.arange(5) < 2, draw(4))
    with pytest.raises(DataError, match="finite"):
        mislabel_auc(torch.tensor([1.0, torch.nan, 2.0]), torch.tensor([True, False, False]), draw(3))


def test_the_area_takes_arrays_and_lists_of_one_dimension_with_a_known_direction() -> None:
    influence, wrong, losses = draw(20), torch.arange(20) < 5, draw(20) ** 2
    found = mislabel_auc(influence, wrong, losses).ahead
    assert mislabel_auc(influence.numpy(), wrong.numpy(), losses.numpy()).ahead == found
    assert mislabel_auc(influence.tolist(), wrong.tolist(), losses.tolist()).ahead == found  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"one value and one label per example, got \(4, 5\) and \(4, 5\)"):
        mislabel_auc(influence.reshape(4, 5), wrong.reshape(4, 5), losses)
    for better in ("Higher", None):
        with pytest.raises(DataError, match=f'better must be "lower" or "higher", .* got {better!r}'):
            mislabel_auc(influence, wrong, losses, better=better)  # type: ignore[arg-type]


def test_constant_self_influence_has_no_area() -> None:
    found = mislabel_auc(torch.full((10,), 0.1), torch.arange(10) < 3, draw(10))
    assert np.isnan(found.influence.estimate.value)
    assert found.influence.undefined == 10
    assert "undefined" in str(found)
    assert found.better == "neither"


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
        f"ceiling {found.ceiling:.3f}"
    )


def test_a_ceiling_is_an_upper_estimate_where_queries_differ_in_noise() -> None:
    scores = scores_for(HALVES, 60)
    loud = torch.linspace(-2, 2, 60, dtype=torch.float64).exp()
    values = planted(scores, HALVES).values + 0.2 * loud * draw(4, len(HALVES), 60, seed=5)
    found = lds(scores, Truth(HALVES, values, "loss"))
    assert found.estimate.high < found.ceiling


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
