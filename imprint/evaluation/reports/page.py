"""Writes a report: one self-contained page, without scripts and without anything to load from elsewhere."""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from imprint.attribution.noise import INDISTINGUISHABLE
from imprint.attribution.result import Attribution
from imprint.attribution.uncertainty import describe_error, has_errors
from imprint.display import for_html
from imprint.errors import DataError, StoreError
from imprint.evaluation.reports.charts import draw_scatter
from imprint.evaluation.reports.conclusion import conclude
from imprint.evaluation.reports.findings import Findings, collect_findings
from imprint.evaluation.reports.illustrations import Illustrations, illustrate
from imprint.evaluation.reports.making import describe_making
from imprint.evaluation.reports.tables import (
    GUESSES,
    LISTED,
    RANKED,
    draw_ranking,
    make_cards,
    make_rows,
    shorten,
    sign_of_harm,
)
from imprint.evaluation.truth import Truth
from imprint.runtime.progress import Advance, Progress
from imprint.statistics import Estimate
from imprint.store.files import refuse_irregular
from imprint.store.files import write as write_file
from imprint.store.reading import Store
from imprint.templates import make_environment

if TYPE_CHECKING:
    from jinja2 import Environment

QUERIES = 6
"""How many queries a report shows one by one, by default."""
_SUFFIXES = (".html", ".htm")


@dataclass(frozen=True)
class Preface:
    """What somebody who knows more than scores and ground truth may add to a report.

    lead: a paragraph below the title.
    tiles: figures to put beside those of the report, each with its caption.
    notes: sections of text, each with its heading.
    marks: remarks on sources, by their id.
    columns: more columns of the table of sources, in the order of the sources.
    command: the command that made the report.
    """

    title: str = "Which sources moved these predictions?"
    lead: str = ""
    tiles: Sequence[tuple[str, str]] = ()
    notes: Sequence[tuple[str, str]] = ()
    marks: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    command: str | None = None


def write_report(
    result: Attribution,
    truth: Truth,
    path: str | os.PathLike[str],
    *,
    queries: Any = None,
    illustrations: Illustrations | None = None,
    store: Store | str | os.PathLike[str] | None = None,
    across: bool = False,
    most: int = QUERIES,
    preface: Preface | None = None,
    progress: bool | Advance = True,
) -> Path:
    """Write how well scores agree with ground truth as one page of HTML, and return its path.

    queries: those that were attributed, to be shown as pictures or by their labels.
    illustrations: pictures, texts and labels of the queries, and texts of the training examples, where the queries do
        not show them themselves.
    store: where the scores come from, to say how they were made.
    across: as for `evaluate`.
    most: how many queries to show one by one.
    preface: a title and whatever else to add.

    A page that is there already is replaced, once the new one is complete. Needs the extra `report`.
    """
    place = check_place(path)
    if not isinstance(result, Attribution) or not isinstance(truth, Truth):
        given = f"{type(result).__name__} and {type(truth).__name__}"
        raise DataError(f"a report is of an Attribution and a Truth, in this order; got {given}.")
    if most < 0:
        raise DataError(f"most must be at least 0, got {most}.")
    bar = Progress("writing the report", 4, "parts", progress)
    with contextlib.closing(bar):
        known = truth.about.get("fingerprints", {}).get("queries") or result.labels.fingerprints.get("queries")
        shown = illustrate(queries, known, **vars(illustrations or Illustrations()))
        shown.check(len(result), result.labels.n)
        bar.advance()
        opened = None if store is None else Store.of(store)
        findings = collect_findings(result, truth, across=across, texts=shown.words, store=opened)
        bar.advance()
        text = render(findings, shown, opened, most, preface or Preface())
        bar.advance()
        place.parent.mkdir(parents=True, exist_ok=True)
        write_file(place, lambda beside: beside.write_text(text, encoding="utf-8"))
        bar.advance()
    return place


def check_place(path: str | os.PathLike[str]) -> Path:
    """Refuse a place or an installation with which no report can be written, before anything is computed."""
    place = Path(path)
    if place.suffix.lower() not in _SUFFIXES:
        raise DataError(f"a report is a page of HTML, got {os.fspath(path)!r}: give a name that ends in .html.")
    if place.is_dir():
        raise StoreError(f"{place} is a folder: give the name of a file for the report, such as {place / 'out.html'}.")
    refuse_irregular(place)
    _make_environment()
    return place


def _make_environment() -> "Environment":
    return make_environment("imprint.evaluation.reports", "the report", "report")


def render(findings: Findings, shown: Illustrations, store: Store | None, most: int, preface: Preface) -> str:
    """Return the page."""
    environment = _make_environment()
    environment.filters |= {"signed": format_signed, "estimate": format_estimate, "code": mark_code}
    labels = findings.result.labels
    harm, sources = sign_of_harm(labels.better), make_rows(findings, findings.sources)
    removals = [] if findings.singles or findings.halves else make_rows(findings, findings.removals)
    ranked, more_ranked = shorten(removals or sources, RANKED)
    listed, more_listed = shorten(sources, LISTED)
    listed_removals, more_removals = shorten(removals, LISTED)
    bars, axis = draw_ranking(ranked)
    page: str = environment.get_template("report.html.j2").render(
        findings=findings,
        conclusion=conclude(findings),
        preface=preface,
        labels=labels,
        harm=harm,
        guesses=[name for name in GUESSES if name in findings.guesses],
        guess_names=GUESSES,
        scatter=draw_scatter(findings.removals, findings.check.mean_slope, harm=harm, named=not findings.halves),
        ranking={"rows": bars, "axis": axis, "more": more_ranked},
        sources={"rows": listed, "more": more_listed, "digits": choose_digits(sources)},
        removals={"rows": listed_removals, "more": more_removals, "digits": choose_digits(removals)},
        cards=make_cards(findings, shown, most),
        card_metric={"LDS": "LDS", "LOO": "correlation"}.get(findings.metrics[0].name, "rank correlation"),
        made=describe_making(findings, store, preface.command),
        warnings=list(dict.fromkeys((*findings.result.warnings, *findings.notes))),
        is_nan=math.isnan,
        errors=describe_error(labels, has_errors(findings.result.noise_changes, findings.result.replicates)),
        indistinguishable=INDISTINGUISHABLE[labels.question],
        known=[name for name in ("owner", "licence") if any(getattr(each, name) for each in labels.source_about)],
    )
    return page


def choose_digits(rows: Iterable[Any]) -> int:
    """Return how many digits after the point show three digits of the largest effects."""
    largest = max((abs(value) for row in rows for value in (row.predicted, row.actual or 0.0)), default=1.0)
    return 3 if not largest else min(9, max(0, 2 - math.floor(math.log10(largest))))


def format_signed(value: float, digits: int) -> str:
    """Format an effect with its sign.

    >>> format_signed(0.04791, 4), format_signed(-0.00001, 3)
    ('+0.0479', '-0.000')
    """
    return f"{value:+.{digits}f}"


def format_estimate(estimate: Estimate) -> str:
    """Format a figure of merit as `evaluate` prints it; a dash if it is undefined."""
    return "–" if math.isnan(estimate.value) else estimate.format(3)


def mark_code(text: str) -> Any:
    """Return a text with what stands between backticks marked as code."""
    from markupsafe import Markup

    parts = [for_html(part) for part in text.split("`")]
    marked = [f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts)]
    return Markup("".join(marked))
