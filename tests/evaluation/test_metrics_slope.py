"""The slope of a truth against scores is one where they are exact, and calibrates them where they are not."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from imprint import ReadoutError, Sources
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.metrics import slope as slope_of
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from tests.evaluation.planted import HALVES, N, attribution, draw, every_kind, planted, random_truth, scores_for


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


def test_a_slope_of_sources_that_overlap_or_leave_examples_out_is_warned_of() -> None:
    for groups, how in (([range(4), range(3, N)], "overlap"), ([range(4), range(4, N - 1)], "leave examples out")):
        parts = Sources.groups({str(index): list(group) for index, group in enumerate(groups)})
        subsets = Subsets.without_each(parts, n=N)
        values = torch.rand(2, len(subsets), 5, dtype=torch.float64)
        with pytest.warns(UserWarning, match=f"the sources {how}"):
            slope_of(torch.rand(5, 2), Truth(subsets, values, "loss"))
