"""Prepares what the page *Query* shows of an answer: rows of sources with bars, words, and what the numbers mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from imprint.attribution.labels import Labels
from imprint.attribution.noise import TIMES
from imprint.attribution.replicates import find_quantiles
from imprint.attribution.result import Attribution
from imprint.credit.ledger import Receipt
from imprint.display import for_terminal
from imprint.serve.api.attributions import describe_queries
from imprint.serve.pages.charts import draw_signed_bar, find_reach
from imprint.serve.pages.wording import judge_effect
from imprint.serve.requests import QueryEffects
from imprint.serve.service import Answered

if TYPE_CHECKING:
    from imprint.language import TokenAttribution

MOST = 20
"""How many sources an answer lists, those with the largest effects."""
_SHADES = 5
_SHADED = 3  # sources whose words are shown


@dataclass(frozen=True)
class Row:
    """A source in the table of an answer.

    effect, error: the change of the measurement without it, and its standard error.
    kind, says: how its bar looks, and what that says in words.
    share: of what the query pays, from 0 to 1; None without a policy.
    """

    source: str
    name: str
    effect: float
    error: float | None
    kind: str
    says: str
    share: float | None
    bar: Markup
    about: str


@dataclass(frozen=True)
class Shaded:
    """The words of a completion, with what one source contributes to each."""

    source: str
    name: str
    total: float
    unclear: bool
    words: "tuple[ShadedWord, ...]"

    @property
    def listed(self) -> "list[ShadedWord]":
        """The words that it moves most."""
        moved = [word for word in self.words if word.text.strip() and word.value]
        return sorted(moved, key=lambda word: -abs(word.value))[:8]


@dataclass(frozen=True)
class ShadedWord:
    """A word, and what a source contributes to its log-probability. lead: the space before it."""

    lead: str
    text: str
    value: float
    error: float | None
    unclear: bool
    shade: str


def describe_answer(answered: Answered, receipt: Receipt | None) -> tuple[QueryEffects, list[Row]]:
    """Return what is known of one query, and the rows of its sources."""
    (found,) = describe_queries(answered, receipt, MOST)
    result = answered.result
    times = find_times(result)
    sure = [source.standard_error for source in found.sources]
    halves = [
        None if error is None else error * times[source.source]
        for error, source in zip(sure, found.sources, strict=True)
    ]
    rows = _draw_rows(
        result.labels,
        [(each.source, each.name, each.removal_effect, each.distinguishable, each.share) for each in found.sources],
        sure,
        halves,
    )
    if found.rule == "above_noise":  # which asks for more than a first look does
        rows = [replace(row, says=f"{row.says}, less than needed") if _is_left_out(row) else row for row in rows]
    return found, rows


def _is_left_out(row: Row) -> bool:
    return row.kind == "helps" and row.share == 0


def describe_documents(result: Attribution) -> list[Row]:
    """Return the rows of the documents inside a source, for one query."""
    credits = result.top(MOST)[0]
    times = find_times(result)
    sure = [credit.standard_error for credit in credits]
    halves = [
        None if error is None else error * times[credit.source] for error, credit in zip(sure, credits, strict=True)
    ]
    given = [(each.source, each.name, each.removal_effect, each.distinguishable, None) for each in credits]
    return _draw_rows(result.labels, given, sure, halves)


def find_times(result: Attribution) -> Mapping[str, float]:
    """Return how many standard errors a bar's line reaches to each side: it meets 0 where an effect is not clear."""
    ids = result.labels.source_ids
    if result.noise_changes is not None or not result.replicates:
        return dict.fromkeys(ids, TIMES)
    quantiles = find_quantiles(result.replicates, 0.95).expand(1, len(ids))[0].tolist()
    return dict(zip(ids, quantiles, strict=True))


def _draw_rows(
    labels: Labels,
    given: Sequence[tuple[str, str, float, bool | None, float | None]],
    sure: Sequence[float | None],
    halves: Sequence[float | None],
) -> list[Row]:
    reach = find_reach([effect for _, _, effect, _, _ in given], halves)
    places = {source: place for place, source in enumerate(labels.source_ids)}
    rows = []
    for (source, name, effect, clear, share), error, half in zip(given, sure, halves, strict=True):
        kind, drawn, says = judge_effect(effect, clear, labels.better)
        known = labels.about(places[source])
        about = ", ".join(text for text in (known.owner, known.licence) if text)
        bar = draw_signed_bar(drawn, half, reach, kind)
        rows.append(Row(source, name, effect, error, kind, says, share, bar, about))
    return rows


def shade_words(result: "TokenAttribution", rows: Sequence[Row]) -> list[Shaded]:
    """Return the words of a completion for the first sources, shaded by what each contributes."""
    shaded = []
    for row in rows[:_SHADED]:
        words = result.rate_words(row.source)
        largest = max((abs(word.contribution) for word in words), default=0.0)
        found = []
        for word in words:
            lead = len(word.text) - len(word.text.lstrip())
            step = round(_SHADES * abs(word.contribution) / largest) if largest else 0
            shade = f"{'helps' if word.contribution > 0 else 'harms'} s{step}" if step else ""
            unclear = word.distinguishable is False
            text = word.text[lead:]
            found.append(
                ShadedWord(word.text[:lead], for_terminal(text), word.contribution, word.standard_error, unclear, shade)
            )
        total = result.total(row.source)
        unclear = total.distinguishable is False
        shaded.append(Shaded(row.source, row.name, total.contribution, unclear, tuple(found)))
    return shaded
