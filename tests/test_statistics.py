"""Correlations are scipy's, areas scikit-learn's; intervals cover, and perfect predictors reach the ceiling."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr, t
from sklearn.metrics import roc_auc_score

from imprint.evaluation.removal import RemovalCheck
from imprint.statistics import (
    Array,
    Estimate,
    area,
    area_difference,
    area_estimate,
    ceiling,
    correlations,
    jackknife,
    mean_estimate,
    pearson,
    ranks,
    slope,
    student_quantile,
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


def test_the_quantile_is_students() -> None:
    for freedom in (1, 2, 3, 5, 30, 10_000):
        assert student_quantile(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=2e-3)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    values = drawn(1, False, 50)
    one, other = mean_estimate(values), jackknife(50, lambda chosen: float(values[chosen].mean()))
    for part in ("value", "low", "high"):
        assert getattr(one, part) == pytest.approx(getattr(other, part))


def varied(draw: np.random.Generator, queries: int, sources: int, spread: float, r: float) -> tuple[Array, ...]:
    """Mean effects that correlate about r, and those of single queries, predicted and actual, which vary together."""
    means, noise = draw.normal(size=(2, sources)), draw.normal(size=(2, queries, sources))
    means[1] = r * means[0] + np.sqrt(1 - r * r) * means[1]
    noise[1] = 0.9 * noise[0] + np.sqrt(1 - 0.9**2) * noise[1]
    return means[0], means[1], means[0] + spread * noise[0], means[1] + spread * noise[1]


def test_an_interval_contains_its_estimate_where_every_resample_correlates_better() -> None:
    """Percentiles of a bootstrap over queries miss the estimate in several of these, as 0.756 [0.815, 0.986] did."""
    draw, found, missed = np.random.default_rng(0), [], 0
    for _ in range(60):
        *_, predicted, actual = varied(draw, 12, 24, 5.0, 0.0)
        found.append(RemovalCheck(predicted, actual[None]).correlation)
        chosen = draw.integers(0, 12, (200, 12))
        resampled = correlations(predicted[chosen].mean(1), actual[chosen].mean(1))
        missed += int(np.quantile(resampled, 0.025) > found[-1].value)
    assert missed >= 2
    assert all(e.low < e.value < e.high for e in found)


@pytest.mark.parametrize(
    ("queries", "sources", "spread", "r"),
    [(20, 12, 1.0, 0.9), (20, 12, 3.0, 0.8), (40, 24, 3.0, 0.3)],
)
def test_intervals_of_correlations_and_slopes_cover(queries: int, sources: int, spread: float, r: float) -> None:
    draw, covered = np.random.default_rng(queries), np.zeros(2)
    for _ in range(60):
        first, second, predicted, actual = varied(draw, queries, sources, spread, r)
        check = RemovalCheck(predicted, actual[None])
        # the slope pools queries: variances within them add to those of the means
        pooled = (slope(first, second) * first.var() + 0.9 * spread**2) / (first.var() + spread**2)
        for part, (found, true) in enumerate(((check.correlation, pearson(first, second)), (check.slope, pooled))):
            covered[part] += found.low <= true <= found.high
            assert found.low <= found.value <= found.high
    assert (covered >= 51).all()  # 85% of 60


@pytest.mark.parametrize(("count", "shift"), [(40, 0.5), (40, 2.0), (300, 3.0)])
def test_intervals_of_areas_and_of_their_difference_cover(count: int, shift: float) -> None:
    draw, covered = np.random.default_rng(count), np.zeros(2)
    guilty = np.arange(count) % 5 == 0
    areas = [NormalDist().cdf(each / np.sqrt(2)) for each in (shift, shift / 2)]
    for _ in range(60):
        one, other = (draw.normal(size=count) + each * guilty for each in (shift, shift / 2))
        found, ahead = area_estimate(one, guilty), area_difference(one, other, guilty)
        covered += [found.low <= areas[0] <= found.high, ahead.low <= areas[0] - areas[1] <= ahead.high]
        assert 0 <= found.low <= found.value <= found.high <= 1
    assert (covered >= 51).all()


def test_perfect_separation_of_few_examples_is_no_certainty() -> None:
    found = area_estimate(np.arange(8.0), np.arange(8) > 5)
    assert found.value == found.high == 1.0
    assert found.low < 0.8


def test_one_thing_has_no_interval() -> None:
    assert mean_estimate([0.7]).value == 0.7
    for found in (mean_estimate([0.7]), jackknife(1, lambda chosen: 0.7)):
        assert np.isnan([found.low, found.high]).all()
        assert str(found) == "0.70 [no interval]"


def test_equal_values_of_few_queries_are_no_certainty() -> None:
    few, many = (mean_estimate(np.ones(count), within=(-1, 1)) for count in (3, 300))
    assert few.low < 0 < 0.95 < many.low
    assert few.high == many.high == 1.0


def test_intervals_stay_within_what_a_mean_can_be() -> None:
    found = mean_estimate([0.5, 1.0, 0.9], within=(-1, 1))
    assert found.high == 1.0
    assert found.low < 0.5


def test_what_is_undefined_is_left_out_of_a_mean() -> None:
    assert mean_estimate([1.0, np.nan, 3.0]) == mean_estimate([1.0, 3.0])
    nothing = mean_estimate([np.nan, np.nan])
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()
    nowhere = jackknife(4, lambda chosen: float("nan"))
    assert np.isnan([nowhere.value, nowhere.low, nowhere.high]).all()


def test_an_estimate_reads_as_a_number_with_its_interval() -> None:
    assert str(Estimate(0.5, 0.25, 0.75)) == "0.50 [0.25, 0.75]"


def test_quantiles_of_other_levels_are_students_too() -> None:
    for freedom in (1, 2, 3, 7, 200, 100_000):
        for level in (0.5, 0.9, 0.99, 0.999):
            assert student_quantile(freedom, level) == pytest.approx(t.ppf((1 + level) / 2, freedom), rel=1e-6)
    for wrong in ((0, 0.95), (3, 0.0), (3, 1.0)):
        with pytest.raises(ValueError, match="a level between 0 and 1"):
            student_quantile(*wrong)


# --- runs, then queries


def planted_runs(draw: np.random.Generator, runs: int, shared: float) -> tuple[Array, Array]:
    """True effects of 30 queries and 12 sources, and runs of them with an error that all queries share."""
    truth = np.linspace(-2, 2, 12) + draw.normal(size=(30, 12))
    return truth, truth + shared * draw.normal(size=(runs, 1, 12)) + 0.3 * draw.normal(size=(runs, 30, 12))


FIGURES = ("slope", "mean_slope", "correlation", "rank_correlation")


def count_covered(runs: int, shared: float) -> dict[str, tuple[float, float]]:
    """How often intervals over runs and queries contain the mean of the figure in 200 draws, and those over queries."""
    draw = np.random.default_rng(runs)
    checks = [RemovalCheck(*planted_runs(draw, runs, shared)) for _ in range(200)]
    naive = [RemovalCheck(check.predicted, check.truth[None]) for check in checks]

    def share(found: list[RemovalCheck], figure: str, mean: float) -> float:
        intervals = [getattr(check, figure) for check in found]
        return float(np.mean([each.low <= mean <= each.high for each in intervals]))

    means = {figure: float(np.mean([getattr(check, figure).value for check in checks])) for figure in FIGURES}
    return {figure: (share(checks, figure, mean), share(naive, figure, mean)) for figure, mean in means.items()}


@pytest.mark.wide
@pytest.mark.parametrize("runs", [2, 3, 5])
def test_figures_cover_over_runs_and_queries_and_over_queries_alone_they_do_not(runs: int) -> None:
    covered = count_covered(runs, shared=1.0)
    assert all(0.9 <= both <= 0.99 for both, _ in covered.values()), covered
    assert all(queries < 0.75 for _, queries in covered.values()), covered


def test_a_figure_of_one_run_has_the_interval_over_queries() -> None:
    values, figure = drawn(1, False, 50), lambda chosen: float(values[chosen].mean())
    for single in (np.empty(0), np.array([0.3])):
        assert jackknife(50, figure, runs=[single]) == jackknife(50, figure)
        assert mean_estimate(values, runs=[single]) == mean_estimate(values)


def test_runs_that_agree_leave_an_interval_as_it_is_and_others_widen_it() -> None:
    values = drawn(1, False, 50)
    plain, mean = mean_estimate(values), float(values.mean())
    same = mean_estimate(values, runs=[np.full(4, mean)])
    assert (same.low, same.high) == pytest.approx((plain.low, plain.high))
    apart = mean_estimate(values, runs=[mean + np.array([-1.0, 1.0]) * values.std()])
    assert apart.low < plain.low < plain.high < apart.high
    both = jackknife(
        50, lambda chosen: float(values[chosen].mean()), runs=[mean + np.array([-1.0, 1.0]) * values.std()]
    )
    assert (both.low, both.high) == pytest.approx((apart.low, apart.high))


def test_equal_values_are_no_certainty_where_runs_differ() -> None:
    ones = np.ones(30)
    alone, apart = (mean_estimate(ones, (-1, 1), runs=runs) for runs in ([], [np.array([1.0, 0.8, 0.9])]))
    assert apart.low < alone.low and apart.high == alone.high == 1.0


def test_a_run_that_leaves_a_figure_undefined_leaves_no_interval() -> None:
    undefined = [np.array([0.5, float("nan")])]
    for found in (mean_estimate([0.3, 0.5], runs=undefined), jackknife(5, lambda chosen: 0.5, runs=undefined)):
        assert np.isnan([found.low, found.high]).all() and np.isfinite(found.value)
