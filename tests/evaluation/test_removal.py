"""Figures about removal effects: right on planted truths, and bounded by the noise of the truth."""

import numpy as np
import pytest

from imprint import DataError
from imprint.evaluation.removal import RemovalCheck
from imprint.statistics import Array, mean_estimate, pearson

QUERIES, SOURCES = 200, 12


def planted(runs: int, noise: float, seed: int = 0) -> tuple[Array, Array]:
    """True effects (queries, sources), and noisy runs of them."""
    draw = np.random.default_rng(seed)
    truth = draw.normal(size=SOURCES) + draw.normal(size=(QUERIES, SOURCES))
    return truth, truth + noise * draw.normal(size=(runs, QUERIES, SOURCES))


def test_a_perfect_predictor_reaches_the_ceiling_per_query() -> None:
    truth, runs = planted(runs=6, noise=1.5)
    check = RemovalCheck(truth, runs)
    assert check.rank_ceiling < 0.95  # the noise matters in this test
    assert check.rank_correlation.value <= check.rank_ceiling  # an upper estimate for ranks
    assert check.rank_correlation.value == pytest.approx(check.rank_ceiling, abs=0.05)


def test_a_random_predictor_gets_nothing() -> None:
    _, runs = planted(runs=6, noise=1.0)
    random = RemovalCheck(np.random.default_rng(1).normal(size=(QUERIES, SOURCES)), runs)
    assert random.rank_correlation.low < 0.03
    assert abs(random.rank_correlation.value) < 0.06


def test_the_slope_is_the_factor_by_which_effects_are_understated() -> None:
    truth, _ = planted(runs=1, noise=0.0)
    check = RemovalCheck(truth / 3, truth[None])
    assert check.slope.value == pytest.approx(3.0)
    assert check.mean_slope.value == pytest.approx(3.0)
    assert check.correlation.value == pytest.approx(1.0)


def test_the_slope_is_that_of_single_effects_and_the_mean_slope_that_of_mean_ones() -> None:
    draw = np.random.default_rng(0)
    common, own = draw.normal(size=SOURCES), draw.normal(size=(QUERIES, SOURCES))
    check = RemovalCheck(common + own, (3 * common + own + draw.normal(size=(QUERIES, 1)))[None])
    x = check.predicted - check.predicted.mean(1, keepdims=True)
    assert check.slope.value == pytest.approx((x * check.truth).sum() / (x * x).sum())
    assert 1.5 < check.slope.value < 2.5 < check.mean_slope.value
    assert np.isnan(check.with_guess(np.ones(SOURCES)).slope.value)


def test_a_mean_over_queries_has_one_interval_whoever_asks() -> None:
    truth, runs = planted(runs=1, noise=1.0)
    check = RemovalCheck(truth, runs)
    assert check.rank_correlation == mean_estimate(check.rank_correlations, within=(-1, 1))
    assert not check.several_runs


FIGURES = ("correlation", "slope", "mean_slope", "rank_correlation")


def test_intervals_are_over_runs_too_where_there_are_several() -> None:
    """Of the ground truth, or of the predictions; what all queries share of a run widens the interval."""
    draw = np.random.default_rng(0)
    truth, _ = planted(runs=1, noise=0.0)
    shared = truth + 0.5 * draw.normal(size=(4, 1, SOURCES))
    left = (shared.sum(0) - shared) / 3
    single = RemovalCheck(truth, shared.mean(0, keepdims=True)), RemovalCheck(shared.mean(0), truth[None])
    several = RemovalCheck(truth, shared), RemovalCheck(shared.mean(0), truth[None], left)
    for one, four in zip(single, several, strict=True):
        assert four.several_runs and not one.several_runs
        for name in FIGURES:
            alone, both = getattr(one, name), getattr(four, name)
            assert both.value == pytest.approx(alone.value)
            assert both.high - both.low > 2 * (alone.high - alone.low), name


def test_a_guess_has_no_runs_and_a_source_is_left_out_of_all() -> None:
    truth, runs = planted(runs=3, noise=1.0)
    check = RemovalCheck(truth, runs, runs)
    assert check.with_guess(np.arange(12.0)).left_out is None
    without = check.without(3).left_out
    assert without is not None and without.shape == (3, QUERIES, SOURCES - 1)
    with pytest.raises(DataError, match="without each run"):
        RemovalCheck(truth, runs, runs[:, :5])


def test_intervals_contain_their_value_and_shrink_with_queries() -> None:
    truth, runs = planted(runs=4, noise=1.0)
    many, few = RemovalCheck(truth, runs), RemovalCheck(truth[:20], runs[:, :20])
    for check in (many, few):
        assert check.rank_correlation.low <= check.rank_correlation.value <= check.rank_correlation.high
    assert np.diff([many.rank_correlation.low, many.rank_correlation.high]) < np.diff(
        [few.rank_correlation.low, few.rank_correlation.high]
    )


def test_a_source_can_be_left_out_and_a_guess_put_in() -> None:
    truth, runs = planted(runs=4, noise=0.1)
    check = RemovalCheck(truth, runs)
    assert check.without(3).predicted.shape == (QUERIES, SOURCES - 1)
    np.testing.assert_array_equal(check.without(3).truth, np.delete(check.truth, 3, axis=1))
    guess = check.with_guess(np.arange(12.0))
    assert guess.correlation.value == pytest.approx(pearson(np.arange(12.0), check.truth.mean(0)))


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 4), (5, 4)])
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="expected predicted"):
        RemovalCheck(np.zeros((5, 4)), np.zeros(shape))


def test_effects_that_are_not_finite_are_refused() -> None:
    with pytest.raises(DataError, match="finite"):
        RemovalCheck(np.full((5, 4), np.nan), np.zeros((2, 5, 4)))
