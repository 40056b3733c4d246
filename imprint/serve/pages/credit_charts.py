"""Charts of credit: what a source got over time, and beside what its size alone would have given."""

from collections.abc import Sequence
from datetime import date, timedelta
from typing import NamedTuple

from markupsafe import Markup

from imprint.credit.money import format_amount
from imprint.serve.credit.answers import Day

_WIDE, _HIGH = 360, 130
_MOST = 40  # bars


class Span(NamedTuple):
    """What a source got in some days, in micro-units; `text` names them."""

    text: str
    amount: int
    by_size: int
    queries: int


def group_days(days: Sequence[Day]) -> list[Span]:
    """Return days, or as many days together as it takes to have few bars; days without queries are there too."""
    if not days:
        return []
    first, last = (date.fromisoformat(each.day) for each in (days[0], days[-1]))
    length = 1 + (last - first).days // _MOST
    spans = [Span("", 0, 0, 0)] * ((last - first).days // length + 1)
    for day in days:
        place = (date.fromisoformat(day.day) - first).days // length
        known = spans[place]
        spans[place] = Span(
            "", known.amount + day.amount.micro, known.by_size + day.by_size.micro, known.queries + day.queries
        )
    return [each._replace(text=_name_days(first, place * length, length)) for place, each in enumerate(spans)]


def _name_days(first: date, start: int, length: int) -> str:
    begin = first + timedelta(start)
    return begin.isoformat() if length == 1 else f"{begin} to {begin + timedelta(length - 1)}"


def draw_history(title: str, spans: Sequence[Span], currency: str) -> Markup:
    """Draw what a source got in each span as a bar, and what its size alone would have given as a line across it."""
    largest = max((max(each.amount, each.by_size) for each in spans), default=0)
    step, scale = _WIDE / max(1, len(spans)), (_HIGH - 20) / largest if largest else 0.0
    width = min(0.75 * step, 44)
    shapes = [Markup('<path class="axis" d="M0 {0}H{1}"/>').format(_HIGH, _WIDE)]
    for place, each in enumerate(spans):
        middle = (place + 0.5) * step
        high, mark = each.amount * scale, _HIGH - each.by_size * scale
        shapes.append(
            Markup(
                '<rect class="plain-bar" x="{}" y="{}" width="{}" height="{}" rx="1"/>'
                '<path class="line baseline" d="M{} {}h{}"/>'
            ).format(
                *(f"{value:.1f}" for value in (middle - width / 2, _HIGH - high, width, high)),
                *(f"{value:.1f}" for value in (middle - width / 2 - 1, mark, width + 2)),
            )
        )
    ends = [(spans[0], "start", 0), (spans[-1], "end", _WIDE)] if len(spans) > 1 else [(spans[0], "middle", _WIDE // 2)]
    for span, anchor, x in ends:
        text = Markup('<text class="label" x="{}" y="{}" text-anchor="{}">{}</text>')
        shapes.append(text.format(x, _HIGH + 15, anchor, span.text[:10]))
    most = max(spans, key=lambda each: each.amount)
    description = f"The most was {format_amount(most.amount)} {currency}, {most.text}. The table below has the numbers."
    head = Markup('<svg class="chart" role="img" viewBox="0 0 {} {}"><title>{}</title><desc>{}</desc>')
    return head.format(_WIDE, _HIGH + 20, title, description) + Markup("").join(shapes) + Markup("</svg>")


def draw_share(share: float, baseline: float | None, reach: float) -> Markup:
    """Draw a share as a bar from the left, and another as a line across it; the row it stands in says the same.

    reach: the share whose bar has the full length.
    """
    scale = 296 / reach if reach > 0 else 0.0
    mark = ""
    if baseline is not None:
        mark = f'<path class="line baseline" d="M{2 + baseline * scale:.1f} 1V21"/>'
    bar = f'<rect class="plain-bar" x="2" y="4" width="{share * scale:.1f}" height="14" rx="2"/>'
    frame = 'class="bar-chart" viewBox="0 0 300 22" preserveAspectRatio="none" aria-hidden="true"'
    return Markup(f"<svg {frame}>{bar}{mark}</svg>")
