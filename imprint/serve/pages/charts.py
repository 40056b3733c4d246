"""Draws charts as SVG, whose colours are those of the style sheet: plain functions of numbers."""

import math
from collections.abc import Sequence
from typing import Literal

from markupsafe import Markup

Kind = Literal["helps", "harms", "unclear"]
_WIDE, _HIGH, _MIDDLE, _HALF = 300, 22, 150, 142  # of a signed bar: its half is drawn on 142 of 150 units


def draw_signed_bar(value: float, half: float | None, reach: float, kind: Kind) -> Markup:
    """Draw one value as a bar from the middle: to the right above 0, to the left below.

    The row of the table that it stands in says the same in words, so it is hidden from screen readers.

    half: of the interval around it; None where it is unknown.
    reach: the value whose bar has the full length; no interval is cut off if it covers them all.
    """
    scale = _HALF / reach if reach > 0 else 0.0
    length = abs(value) * scale
    start = _MIDDLE if value >= 0 else _MIDDLE - length
    shapes = [f'<rect class="{kind}" x="{start:.2f}" y="4" width="{length:.2f}" height="14" rx="2"/>']
    if half is not None:
        low, high = (_MIDDLE + (value + end) * scale for end in (-half, half))
        line = f"M{low:.2f} 7V15M{low:.2f} 11H{high:.2f}M{high:.2f} 7V15"
        shapes += [f'<path class="halo" d="{line}"/>', f'<path class="whisker" d="{line}"/>']
    axis = f'<path class="axis" d="M{_MIDDLE} 0V{_HIGH}"/>'
    frame = f'class="bar-chart" viewBox="0 0 {_WIDE} {_HIGH}" preserveAspectRatio="none" aria-hidden="true"'
    return Markup(f"<svg {frame}>{''.join(shapes)}{axis}</svg>")


def find_reach(values: Sequence[float], halves: Sequence[float | None]) -> float:
    """Return the reach that shows all values with their intervals.

    >>> find_reach([1.0, -2.0], [0.5, None])
    2.0
    """
    return max((abs(value) + (half or 0.0) for value, half in zip(values, halves, strict=True)), default=0.0)


def draw_ranges(title: str, ranges: Sequence[tuple[str, Sequence[float]]]) -> Markup:
    """Draw distributions below each other: the middle 80% as a bar, the median, and the extremes.

    ranges: the name of each, and its smallest value, its deciles and its largest.
    """
    ends = [value for _, deciles in ranges for value in deciles]
    axis = _Axis(min(ends), max(ends), 12, 345)
    high = 52 * len(ranges)
    shapes: list[str] = [axis.draw(high)]
    sentences = []
    for place, (name, deciles) in enumerate(ranges):
        y = 52 * place + 34
        lowest, low, median, upper, highest = (axis.place(deciles[index]) for index in (0, 1, 5, 9, 10))
        kind = "plain-bar" if place == len(ranges) - 1 else "baseline"
        shapes += [
            Markup('<text x="0" y="{}">{}</text>').format(y - 18, name),
            f'<path class="axis" d="M{lowest:.1f} {y}H{highest:.1f}"/>',
            f'<rect class="{kind}" x="{low:.1f}" y="{y - 8}" width="{max(upper - low, 1):.1f}" height="16" rx="2"/>',
            f'<path class="whisker" d="M{median:.1f} {y - 12}V{y + 12}"/>',
        ]
        first, tenth, middle, ninetieth, last = (f"{deciles[index]:.2g}" for index in (0, 1, 5, 9, 10))
        sentences.append(
            f"{name}: from {first} to {last}, median {middle}, the middle 80% from {tenth} to {ninetieth}."
        )
    return _frame(title, " ".join(sentences), high + 22, shapes)


def draw_ratio(
    title: str, value: float, low: float | None, high: float | None, accepted: tuple[float, float]
) -> Markup:
    """Draw a ratio that should be 1, with its interval, on the range that is accepted."""
    known = [each for each in (value, low, high, *accepted) if each is not None]
    positive = all(each > 0 for each in known)
    axis = _Axis(min(*known, 0.25 if positive else 0.0), max(*known, 4.0), 12, 345)
    first, last = (axis.place(end) for end in accepted)
    shapes = [
        f'<rect class="accepted" x="{first:.1f}" y="4" width="{last - first:.1f}" height="38"/>',
        axis.draw(46),
        f'<path class="axis" d="M{axis.place(1):.1f} 0V46"/>',
    ]
    description = f"The ratio is {value:.2f}"
    if low is not None and high is not None:
        start, end = axis.place(low), axis.place(high)
        shapes.append(f'<path class="whisker" d="M{start:.1f} 15V31M{start:.1f} 23H{end:.1f}M{end:.1f} 15V31"/>')
        description += f", with a 95% interval from {low:.2f} to {high:.2f}"
    shapes.append(f'<circle class="helps" cx="{axis.place(value):.1f}" cy="23" r="7"/>')
    description += f". Sizes are right within {accepted[0]:g} to {accepted[1]:g}; 1 would be perfect."
    return _frame(title, description, 68, shapes)


class _Axis:
    """Places values on a line: logarithmically where all are above 0, else evenly."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self._log = low > 0
        self.low, self.high = low, high if high - low > 1e-9 * abs(low) else low + (abs(low) or 1.0)
        self._first, self._last = first, last

    def place(self, value: float) -> float:
        low, high, value = (math.log(each) if self._log else each for each in (self.low, self.high, value))
        return self._first + (value - low) / (high - low) * (self._last - self._first)

    def _ticks(self) -> list[float]:
        ticks = self._list_powers() if self._log else []
        if len(ticks) >= 2:
            return ticks
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 2))
        return [step * tick for tick in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]

    def _list_powers(self) -> list[float]:
        """List the powers of ten on the axis, and where they are few, 2 and 5 times them; a narrow axis has none."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        few = len(powers) <= 3
        each = [digit * 10.0**power for power in powers for digit in ((1, 2, 5) if few else (1,))]
        return [tick for tick in each if self.low * 0.999 <= tick <= self.high * 1.001]

    def draw(self, high: float) -> Markup:
        """Draw lines across a chart of some height, with a number below each."""
        ticks = self._ticks()
        return Markup("").join(
            Markup(
                '<path class="grid" d="M{0} 0V{1}"/><text class="label" x="{0}" y="{2}" text-anchor="middle">{3}</text>'
            ).format(f"{self.place(tick):.1f}", high, high + 18, f"{tick:g}")
            for tick in ticks[:: math.ceil(len(ticks) / 6)]
        )


def _frame(title: str, description: str, high: float, shapes: Sequence[str]) -> Markup:
    head = Markup('<svg class="chart" role="img" viewBox="0 0 360 {}"><title>{}</title><desc>{}</desc>').format(
        high, title, description
    )
    return head + Markup("").join(Markup(shape) for shape in shapes) + Markup("</svg>")
