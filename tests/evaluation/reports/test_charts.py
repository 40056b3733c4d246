"""Charts have round numbers beside them, keep to their frame, and place what they show where it belongs."""

from itertools import pairwise

import numpy as np
import pytest

from imprint.evaluation.reports.charts import HEIGHT, WIDTH, Axis, draw_scatter, make_bar, round_numbers
from imprint.evaluation.reports.findings import Effects
from imprint.statistics import Estimate


@pytest.mark.parametrize("scale", [1e-9, 0.003, 1.0, 77.0, 4e8])
@pytest.mark.parametrize("low", [-1.0, 0.0, -0.2])
def test_an_axis_has_a_handful_of_round_numbers(scale: float, low: float) -> None:
    ticks = round_numbers(low * scale, scale)
    assert 3 <= len(ticks) <= 9
    steps = np.diff(ticks)
    np.testing.assert_allclose(steps, steps[0], rtol=1e-6)
    assert f"{steps[0]:.0e}"[0] in "125"
    assert low * scale <= ticks[0] and ticks[-1] <= scale


@pytest.mark.parametrize("values", [[], [0.0], [3.0], [-2.0, -2.0], [float("nan"), 1.0], [1e-300]])
def test_an_axis_of_anything_holds_zero_and_its_values(values: list[float]) -> None:
    axis = Axis.over(values)
    assert axis.low < 0 < axis.high
    assert all(axis.low < value < axis.high for value in values if value == value)


def test_long_whiskers_do_not_squeeze_the_bars() -> None:
    axis = Axis.over([1.0, -1.0], spread=[1000.0, -1000.0])
    assert axis.high < 5 and axis.low > -5
    bar = make_bar("actual", axis, 1.0, error=1000.0)
    assert (bar.low, bar.high) == (0.0, 100.0)


def test_bars_begin_at_zero() -> None:
    axis = Axis.over([1.0, -3.0])
    up, down = make_bar("predicted", axis, 1.0), make_bar("predicted", axis, -3.0)
    zero = axis.percent(0.0)
    assert up.start == zero and up.start + up.length == pytest.approx(up.end)
    assert down.start + down.length == pytest.approx(zero) and down.start == down.end
    assert down.length == pytest.approx(3 * up.length, rel=1e-2)


def effects(count: int = 6, runs: int = 3, seed: int = 0) -> Effects:
    draw = np.random.default_rng(seed)
    predicted = draw.normal(size=(5, count))
    actual = predicted + 0.1 * draw.normal(size=(runs, 5, count))
    return Effects(tuple(f"source {i}" for i in range(count)), tuple(range(1, count + 1)), predicted, actual)


def test_dots_lie_in_the_frame_in_the_order_of_their_effects() -> None:
    given = effects()
    plot = draw_scatter(given, Estimate(1.0, 0.5, 1.5), harm=-1, named=True)
    left, top, right, bottom = plot.frame
    assert all(left <= dot.x <= right and top <= dot.y <= bottom for dot in plot.dots)
    x, y = [dot.x for dot in plot.dots], [-dot.y for dot in plot.dots]
    assert np.argsort(x).tolist() == np.argsort(given.predicted.mean(0)).tolist()
    assert np.argsort(y).tolist() == np.argsort(given.outcome.mean(0)).tolist()
    radii = [dot.radius for dot in plot.dots]
    assert radii == sorted(radii)  # as their sizes
    assert [dot.helps for dot in plot.dots] == (given.predicted.mean(0) >= 0).tolist()


@pytest.mark.parametrize("count", [3, 14, 40])
def test_names_beside_the_plot_do_not_overlap(count: int) -> None:
    plot = draw_scatter(effects(count), Estimate(1.0, 0.5, 1.5), harm=-1, named=True)
    heights = sorted(dot.written for dot in plot.dots if dot.written is not None)
    assert len(heights) == (count if count <= 14 else 8)
    assert all(later - earlier >= 13.9 for earlier, later in pairwise(heights))
    assert heights[-1] <= HEIGHT and plot.column < WIDTH


def test_the_line_has_the_slope_and_goes_through_the_middle() -> None:
    plot = draw_scatter(effects(), Estimate(2.0, 1.0, 3.0), harm=None, named=True)
    (x0, y0), (x1, y1) = plot.line
    (e0, f0), (e1, f1) = plot.equal
    assert (y1 - y0) / (x1 - x0) == pytest.approx(2 * (f1 - f0) / (e1 - e0), rel=1e-2)
    middle = np.mean([dot.x for dot in plot.dots]), np.mean([dot.y for dot in plot.dots])
    assert y0 + (middle[0] - x0) * (y1 - y0) / (x1 - x0) == pytest.approx(middle[1], abs=0.5)
    assert len(plot.band) == 4


def test_an_unknown_slope_or_interval_is_not_drawn() -> None:
    nan = float("nan")
    assert draw_scatter(effects(), Estimate(nan, nan, nan), harm=None, named=True).line == ()
    plot = draw_scatter(effects(runs=1), Estimate(1.0, nan, nan), harm=None, named=True)
    assert plot.line and plot.band == () and plot.dots[0].whisker is None
