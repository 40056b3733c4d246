"""Places what a report draws: axes with round numbers, bars on a common scale, dots of predicted and actual effects.

Only geometry. The page's template draws it, in the colours of the reader's light or dark mode.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from imprint.evaluation.reports.findings import Effects
from imprint.statistics import Array, Estimate

WIDTH, HEIGHT = 460, 400  # of the scatter plot, in its own units; a phone shows it at three quarters of that
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 108, 10, 46
_LABELLED = 14  # dots that have their name written beside the plot
_NAMED = 8  # dots that do if there are more
_LINE = 14.0  # between two names
_REACH = 1.5  # times the range of the values that whiskers may stretch an axis


@dataclass(frozen=True)
class Axis:
    """A range of numbers, with round ones to write beside it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    @classmethod
    def over(cls, values: Iterable[float], spread: Iterable[float] = ()) -> "Axis":
        """Make an axis that holds zero and all values, and the ends of whiskers unless they reach too far."""
        inner = [0.0, *(value for value in values if math.isfinite(value))]
        low, high = min(inner), max(inner)
        room = (high - low or abs(high) or 1.0) * _REACH
        wide = [value for value in spread if math.isfinite(value)]
        low, high = max(min([low, *wide]), high - room), min(max([high, *wide]), low + room)
        margin = 0.04 * (high - low or abs(high) or 1.0)
        low, high = low - margin, high + margin
        return cls(low, high, round_numbers(low, high))

    def percent(self, value: float) -> float:
        """Return where a value lies, from 0 at the low end to 100; values outside lie at the nearer end."""
        return round(100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low))), 2)

    @property
    def labels(self) -> list[tuple[float, str]]:
        """Places in percent, and the numbers there."""
        return [(self.percent(tick), format_tick(tick)) for tick in self.ticks]


def round_numbers(low: float, high: float, about: int = 5) -> tuple[float, ...]:
    """Return about so many multiples of 1, 2 or 5 times a power of ten between two numbers.

    >>> round_numbers(-0.012, 0.034)
    (-0.01, 0.0, 0.01, 0.02, 0.03)
    """
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= 0.7 * rough)
    places = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step), math.floor(high / step)
    return tuple(round(index * step, places) + 0.0 for index in range(first, last + 1))


def format_tick(value: float) -> str:
    """Write a round number as short as it is.

    >>> [format_tick(value) for value in (0.0, -0.05, 1e-7, 20000.0)]
    ['0', '-0.05', '1e-07', '20000']
    """
    return f"{value:g}"


@dataclass(frozen=True)
class Bar:
    """A bar from zero, in percent of its axis; `low` and `high` are the ends of a whisker, if it has one."""

    kind: str
    start: float
    length: float
    end: float
    low: float | None = None
    high: float | None = None


def make_bar(kind: str, axis: Axis, value: float, error: float | None = None) -> Bar:
    """Place a bar; `error` is half the length of its whisker."""
    zero, end = axis.percent(0.0), axis.percent(value)
    whisker = (None, None) if error is None else (axis.percent(value - error), axis.percent(value + error))
    return Bar(kind, min(zero, end), round(abs(end - zero), 2), end, *whisker)


@dataclass(frozen=True)
class Dot:
    """A dot of the scatter plot, with its whisker, and the height of its name beside the plot if it is written."""

    x: float
    y: float
    radius: float
    whisker: tuple[float, float] | None
    name: str
    helps: bool
    written: float | None = None

    @property
    def short(self) -> str:
        """The name, as long as there is room for it."""
        return self.name if len(self.name) <= 15 else f"{self.name[:14]}…"


@dataclass(frozen=True)
class Scatter:
    """Predicted against actual effects, in the units of a picture of WIDTH × HEIGHT.

    line, band: the fitted line, and the area that the interval of its slope covers; corners as (x, y).
    equal: the line on which prediction and outcome are equal.
    """

    dots: tuple[Dot, ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    zero: tuple[float, float]
    line: tuple[tuple[float, float], ...]
    band: tuple[tuple[float, float], ...]
    equal: tuple[tuple[float, float], ...]
    width: int = WIDTH
    height: int = HEIGHT
    frame: tuple[int, int, int, int] = (_LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM)

    @property
    def column(self) -> int:
        """Where names are written."""
        return self.frame[2] + 12


def draw_scatter(effects: Effects, slope: Estimate, *, harm: int | None, named: bool) -> Scatter:
    """Place one dot for each of the effects on the mean over queries that were really made.

    slope: of actual on predicted mean effects, with its interval.
    harm: the sign of the effects of removing what harms; None if that is unknown.
    named: whether names are written beside the plot.
    """
    mean, chosen = effects.mean, effects.removed
    x, y = mean.predicted[0, chosen], mean.outcome[0, chosen]
    error = None if mean.error is None else mean.reach * mean.error[0, chosen]
    away = [] if error is None else [*(y - error), *(y + error)]
    across, upright = Axis.over(x), Axis.over(y, spread=away)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _horizontal(across, point[0]), _vertical(upright, point[1])

    largest = max(max(effects.sizes[i] for i in chosen), 1)
    written = _write_names(x, y, upright) if named else {}
    dots = tuple(
        Dot(
            *place((float(x[i]), float(y[i]))),
            radius=round(3.0 + 6.0 * math.sqrt(effects.sizes[thing] / largest), 1) if named else 3.5,
            whisker=None if error is None else _whisker(upright, float(y[i]), float(error[i])),
            name=effects.names[thing],
            helps=harm is None or harm * float(x[i]) <= 0,
            written=written.get(i),
        )
        for i, thing in enumerate(chosen)
    )
    ends = (across.low, across.high)
    return Scatter(
        dots=dots,
        x_ticks=tuple((_horizontal(across, tick), format_tick(tick)) for tick in across.ticks),
        y_ticks=tuple((_vertical(upright, tick), format_tick(tick)) for tick in upright.ticks),
        zero=place((0.0, 0.0)),
        line=tuple(map(place, _fit(x, y, slope.value, ends))) if math.isfinite(slope.value) else (),
        band=tuple(map(place, _spread(x, y, slope, ends))),
        equal=tuple(place((end, end)) for end in ends),
    )


def _spread(x: Array, y: Array, slope: Estimate, ends: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return the corners of the area between the lines of the smallest and of the largest slope; none if unknown."""
    if not (math.isfinite(slope.low) and math.isfinite(slope.high)):
        return ()
    low, high = (_fit(x, y, value, ends) for value in (slope.low, slope.high))
    return low[0], low[1], high[1], high[0]


def _fit(x: Array, y: Array, slope: float, ends: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    """Return the ends of the line of a slope through the middle of the dots."""
    middle = float(x.mean()), float(y.mean())
    return tuple((end, middle[1] + slope * (end - middle[0])) for end in ends)


def _horizontal(axis: Axis, value: float) -> float:
    return round(_LEFT + (value - axis.low) / (axis.high - axis.low) * (WIDTH - _RIGHT - _LEFT), 1)


def _vertical(axis: Axis, value: float) -> float:
    return round(HEIGHT - _BOTTOM - (value - axis.low) / (axis.high - axis.low) * (HEIGHT - _BOTTOM - _TOP), 1)


def _whisker(axis: Axis, value: float, error: float) -> tuple[float, float]:
    low, high = max(axis.low, value - error), min(axis.high, value + error)
    return _vertical(axis, low), _vertical(axis, high)


def _write_names(x: Array, y: Array, upright: Axis) -> dict[int, float]:
    """Return the heights of names in a column beside the plot, in the order of their dots and far enough apart."""
    chosen: Sequence[int] = range(len(x))
    if len(x) > _LABELLED:
        far = np.abs(x - x.mean()) / (np.ptp(x) or 1.0) + np.abs(y - y.mean()) / (np.ptp(y) or 1.0)
        chosen = np.argsort(-far, kind="stable")[:_NAMED].tolist()
    order = sorted(chosen, key=lambda i: -float(y[i]))
    heights = [_vertical(upright, float(y[i])) for i in order]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + _LINE)
    heights[-1] = min(heights[-1], HEIGHT - _BOTTOM)
    for i in range(len(heights) - 2, -1, -1):  # where the last one was moved up, those above make room
        heights[i] = min(heights[i], heights[i + 1] - _LINE)
    return {index: round(height, 1) for index, height in zip(order, heights, strict=True)}
