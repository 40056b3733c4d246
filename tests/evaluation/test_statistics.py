"""Correlations are scipy's, areas scikit-learn's; intervals cover, and perfect predictors reach the ceiling."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import roc_auc_score

from imprint.evaluation.statistics import (
    Array,
    Estimate,
    area,
    bootstrap,
    ceiling,
    correlations,
    mean_estimate,
    pearson,
    ranks,
    slope,
)

every_seed = pytest.mark.parametrize("seed", range(5))
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["distinct", "tied"])


def drawn(seed: int, tied: bool, *shape: int) -> Array:
    """Values of any scale and place."""
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 4, shape).astype(np.float64) if tied else draw.normal(size=shape)
    return 10.0 ** draw.integers(-6, 6) * (values + draw.normal())


@every_seed
@tied_or_not
def test_correlations_are_those_of_scipy(seed: int, tied: bool) -> None:
    x, y = drawn(seed, tied, 6, 25), drawn(seed + 100, tied, 6, 25)
    for row in range(6):
        assert pearson(x[row], y[row]) == pytest.approx(pearsonr(x[row], y[row])[0], abs=1e-12)
        assert pearson(ranks(x)[row], ranks(y)[row]) == pytest.approx(spearmanr(x[row], y[row])[0], abs=1e-12)
        assert correlations(x, y)[row] == pytest.approx(pearson(x[row], y[row]), abs=1e-14)


@every_seed
@tied_or_not
def test_the_area_under_the_curve_is_that_of_scikit_learn(seed: int, tied: bool) -> None:
    suspicion, guilty = drawn(seed, tied, 60), np.random.default_rng(seed).random(60) < 0.3
    assert area(suspicion, guilty) == pytest.approx(roc_auc_score(guilty, suspicion), abs=1e-12)
    assert area(-suspicion, guilty) == pytest.approx(1 - area(suspicion, guilty), abs=1e-12)


def test_there_is_no_area_with_one_kind_only() -> None:
    assert np.isnan(area(np.arange(4.0), np.ones(4, dtype=bool)))
    assert np.isnan(area(np.arange(4.0), np.zeros(4, dtype=bool)))


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.1, -1e300, 1e-300])
def test_a_constant_side_has_no_correlation(constant: float) -> None:
    flat, steep = np.full(7, constant), np.arange(7.0)
    for prepared in (np.asarray, ranks):
        assert np.isnan(pearson(prepared(flat), prepared(steep)))
        assert np.isnan(pearson(prepared(steep), prepared(flat)))
        assert np.isnan(pearson(prepared(flat), prepared(flat)))
    assert np.isnan(slope(flat, steep))


def test_tied_values_share_their_mean_rank() -> None:
    np.testing.assert_array_equal(ranks(np.array([[3.0, 1.0, 3.0, 2.0]])), [[3.5, 1.0, 3.5, 2.0]])


def test_the_slope_is_that_of_the_line() -> None:
    x = drawn(0, False, 9)
    assert slope(x, -2.5 * x + 7) == pytest.approx(-2.5)


def planted(seed: int, runs: int, noise: float) -> tuple[Array, Array]:
    """Signals of 60 queries over 100 things, and noisy runs of them."""
    draw = np.random.default_rng(seed)
    signal = draw.normal(size=(60, 100))
    return signal, signal + noise * draw.normal(size=(runs, 60, 100))


@pytest.mark.parametrize(("runs", "noise"), [(2, 0.5), (2, 1.0), (6, 1.0), (6, 3.0)])
def test_a_perfect_predictor_reaches_the_ceiling_and_a_random_one_nothing(runs: int, noise: float) -> None:
    """Within 95% intervals, so in about 57 of 60 simulations; in fewer where few runs blur the ceiling itself."""
    perfect, random = 0, 0
    for seed in range(60):
        signal, values = planted(seed, runs, noise)
        truth = values.mean(0)
        reached = mean_estimate(correlations(signal, truth))
        perfect += reached.low <= ceiling(values) <= reached.high
        nothing = mean_estimate(correlations(drawn(1000 + seed, False, *signal.shape), truth))
        random += nothing.low <= 0 <= nothing.high
    assert perfect >= 45
    assert random >= 51


@pytest.mark.parametrize(("runs", "noise"), [(2, 2.0), (6, 1.0)])
def test_ceilings_are_right_on_average_and_of_ranks_hardly_too_high(runs: int, noise: float) -> None:
    simulations = [planted(seed, runs, noise) for seed in range(20)]
    for prepared, most in ((np.asarray, 0.005), (ranks, 0.015)):
        reached = np.mean([correlations(prepared(s), prepared(v.mean(0))).mean() for s, v in simulations])
        limit = np.mean([ceiling(prepared(v)) for _, v in simulations])
        assert -0.005 <= limit - reached < most


def test_runs_that_agree_have_a_ceiling_of_one_and_those_that_do_not_of_zero() -> None:
    run = drawn(0, False, 1, 12)
    assert ceiling(np.repeat(run, 3, axis=0)) == pytest.approx(1.0)
    assert ceiling(np.concatenate([run, -run])) == 0.0


def test_a_single_run_has_no_ceiling_and_neither_have_constant_ones() -> None:
    assert np.isnan(ceiling(drawn(0, False, 1, 12)))
    assert np.isnan(ceiling(np.full((3, 12), 0.1)))


def test_constant_queries_are_left_out_of_the_ceiling() -> None:
    _, values = planted(0, 3, 1.0)
    flat = np.concatenate([values, np.full((3, 1, 100), 0.1)], axis=1)
    assert ceiling(flat) == pytest.approx(ceiling(values), abs=1e-12)


def test_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    draw = np.random.default_rng(0)
    estimates = [mean_estimate(draw.normal(3, 1, 40)) for _ in range(300)]
    assert 0.9 <= np.mean([e.low <= 3 <= e.high for e in estimates]) <= 0.98
    assert all(e.low <= e.value <= e.high for e in estimates)


def test_the_two_bootstraps_agree_on_a_mean() -> None:
    values = drawn(1, False, 50)
    one, other = mean_estimate(values), bootstrap(50, lambda chosen: float(values[chosen].mean()), 2000)
    assert one.value == pytest.approx(other.value)
    assert one.high - one.low == pytest.approx(other.high - other.low, rel=0.1)


def test_what_is_undefined_is_left_out_of_a_mean() -> None:
    assert mean_estimate([1.0, np.nan, 3.0]) == mean_estimate([1.0, 3.0])
    nothing = mean_estimate([np.nan, np.nan])
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    nowhere = bootstrap(4, lambda chosen: float("nan"))
    assert np.isnan([nowhere.value, nowhere.low, nowhere.high]).all()


def test_an_estimate_reads_as_a_number_with_its_interval() -> None:
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.50 [0.25, 0.75]"
