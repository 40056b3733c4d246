"""Makes the rows of a report: sources or removals with predicted and actual effects, and the queries to look at."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from imprint.attribution.result import Attribution
from imprint.evaluation.reports.charts import Axis, Bar, make_bar
from imprint.evaluation.reports.findings import Effects, Findings
from imprint.evaluation.reports.illustrations import Illustrations
from imprint.statistics import Array
from imprint.task import Better

LISTED = 200  # rows of a table; of more, those with the largest effects
RANKED = 24  # rows of the bar chart
_STRONGEST = 3  # of each sign, for a query
_SEARCHED = 20  # queries that are looked at for each one shown, to find different labels
GUESSES = {"size": "guess by size", "text": "guess by text"}


@dataclass(frozen=True)
class Row:
    """One source, or one removal: its effects on the mean over queries, or on one query.

    error: the standard error of `actual` over runs; its 95% interval is `reach` of them to either side.
    guesses: what else would have been predicted, by the name of the guess.
    doubt: the standard error of `predicted`, by chance alone; None where nothing is known of it.
    clear: whether the predicted effect is distinguishable from 0; None where nothing is known of its error.
    """

    place: int
    name: str
    size: int
    predicted: float
    actual: float | None = None
    error: float | None = None
    guesses: Mapping[str, float] = field(default_factory=dict)
    doubt: float | None = None
    clear: bool | None = None
    bars: tuple[Bar, ...] = ()
    reach: float = math.nan

    @property
    def interval(self) -> float | None:
        """Half the 95% interval of the actual effect over runs; None if it is unknown."""
        return None if self.error is None else self.reach * self.error

    @property
    def happened(self) -> bool | None:
        """Whether the actual effect is distinguishable from 0, that is outside its interval; None if unknown."""
        return None if self.actual is None or self.interval is None else abs(self.actual) > self.interval


@dataclass(frozen=True)
class Card:
    """One query: how it is shown, its F with all data, and the sources or removals with the strongest effects.

    agreement: the value of the metric for this query alone; None where it is undefined.
    """

    query: int
    picture: str | None
    text: list[str]
    label: str | None
    baseline: float
    agreement: float | None
    rows: list[Row]
    axis: Axis


def sign_of_harm(better: Better) -> int | None:
    """Return the sign of the effect of removing what harms; None where nobody said which F is better."""
    return {"lower": -1, "higher": 1, None: None}[better]


def make_rows(findings: Findings, effects: Effects) -> list[Row]:
    """Return all effects on the mean over queries, the most helpful first."""
    mean = effects.mean
    guesses = _scale_guesses(findings, effects)
    found = []
    for place, name in enumerate(effects.names):
        actual, error = _read_actual(mean, 0, place)
        given = {kind: float(values[place]) for kind, values in guesses.items()}
        row = Row(place, name, effects.sizes[place], float(mean.predicted[0, place]), actual, error, given)
        found.append(replace(row, reach=effects.reach))
    if effects is findings.sources:
        found = _tell_doubts(found, findings.result.mean(), 0)
    down = sign_of_harm(findings.result.labels.better) == 1
    return sorted(found, key=lambda row: row.predicted if down else -row.predicted)


def _tell_doubts(rows: list[Row], result: Attribution, query: int) -> list[Row]:
    """Add how sure the predictions are to rows of single sources, as far as the scores know."""
    errors, clear = result.standard_error, result.distinguishable
    if errors is None or clear is None:
        return rows
    return [replace(row, doubt=float(errors[query, row.place]), clear=bool(clear[query, row.place])) for row in rows]


def _read_actual(effects: Effects, query: int, place: int) -> tuple[float | None, float | None]:
    """Return an actual effect and its standard error, None for what is not known."""
    actual = float(effects.outcome[query, place])
    error = None if effects.error is None else float(effects.error[query, place])
    return (None, None) if math.isnan(actual) else (actual, error)


def _scale_guesses(findings: Findings, effects: Effects) -> dict[str, Array]:
    """Return guesses for each of the effects, multiplied by what fits the actual effects best."""
    if findings.halves:
        return {}
    sizes = np.array(effects.sizes, dtype=np.float64)
    given = {"size": sizes}
    if findings.similarity is not None:
        near = findings.similarity.mean(0)
        sets = [(i,) for i in range(len(near))] if effects is findings.sources else findings.truth.lacking
        given["text"] = np.array([near[list(members)].sum() for members in sets])
    actual, chosen = effects.mean.outcome[0], effects.removed
    return {name: guess * _fit_scale(guess[chosen], actual[chosen]) for name, guess in given.items()}


def _fit_scale(guess: Array, actual: Array) -> float:
    square = float(guess @ guess)
    return float(guess @ actual) / square if square else 0.0


def shorten(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """Keep the rows at both ends of a sorted table; return them, and how many are left out between them."""
    left = len(rows) - most
    if left <= 0:
        return list(rows), 0
    return [*rows[: most - most // 2], *rows[len(rows) - most // 2 :]], left


def draw_ranking(rows: Sequence[Row], guess: str = "size") -> tuple[list[Row], Axis]:
    """Add bars to rows: predicted, actual with its interval, and a guess."""
    values, spread = [row.predicted for row in rows], []
    for row in rows:
        if row.actual is not None:
            values.append(row.actual)
            spread += [row.actual - (row.interval or 0.0), row.actual + (row.interval or 0.0)]
        values += [row.guesses[guess]] if guess in row.guesses else []
    axis = Axis.over(values, spread)
    drawn = []
    for row in rows:
        bars = [make_bar("predicted", axis, row.predicted)]
        bars += [] if row.actual is None else [make_bar("actual", axis, row.actual, row.interval)]
        bars += [make_bar("guess", axis, row.guesses[guess])] if guess in row.guesses else []
        drawn.append(replace(row, bars=tuple(bars)))
    return drawn, axis


def make_cards(findings: Findings, illustrations: Illustrations, most: int) -> list[Card]:
    """Return the queries with the strongest predicted effects, whatever became of the predictions."""
    effects = findings.shown
    per_query = next((metric.per_query for metric in findings.metrics if len(metric.per_query)), None)
    cards = []
    for query in _choose_queries(effects, illustrations, most):
        rows = _find_strongest(effects, query, findings.result.labels.better)
        if effects is findings.sources:
            rows = _tell_doubts(rows, findings.result, query)
        drawn, axis = draw_ranking(rows)
        value = math.nan if per_query is None else float(per_query[query])
        shown = illustrations.picture(query), illustrations.text(query), illustrations.label(query)
        known = None if math.isnan(value) else value
        cards.append(Card(query, *shown, float(findings.baseline[query]), known, drawn, axis))
    return cards


def _choose_queries(effects: Effects, illustrations: Illustrations, most: int) -> list[int]:
    """Choose queries by their largest predicted effect; of each label one, as long as there are others."""
    order = np.argsort(-np.abs(effects.predicted).max(1), kind="stable")[: _SEARCHED * most].tolist()
    seen: set[str | None] = set()
    first: list[int] = []
    later: list[int] = []
    for query in order:
        label = illustrations.label(query)
        (later if label is not None and label in seen else first).append(query)
        seen.add(label)
        if len(first) == most:
            break
    chosen = [*first, *later][:most]
    return sorted(chosen, key=order.index)


def _find_strongest(effects: Effects, query: int, better: Better) -> list[Row]:
    """Return the effects with the largest prediction of each sign, the most helpful first."""
    predicted = effects.predicted[query]
    up = [int(i) for i in np.argsort(-predicted, kind="stable")[:_STRONGEST] if predicted[i] > 0]
    down = [int(i) for i in np.argsort(predicted, kind="stable")[:_STRONGEST] if predicted[i] < 0]
    order = [*up, *reversed(down)]
    if sign_of_harm(better) == 1:
        order.reverse()
    found = []
    for place in order:
        actual = _read_actual(effects, query, place)
        row = Row(place, effects.names[place], effects.sizes[place], float(predicted[place]), *actual)
        found.append(replace(row, reach=effects.reach))
    return found
