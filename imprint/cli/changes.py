"""Renders what changed between two versions of a model, for `imprint compare`."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from imprint.attribution.changes import Change, Changes
from imprint.attribution.labels import describe_query
from imprint.cli.terminal import cell
from imprint.display import count_of, shorten

_UNSTABLE = 5  # queries to name
_STYLES = {"gained": "green", "rose": "green", "lost": "red", "fell": "red"}


def render_changes(found: Changes, most: int) -> RenderableType:
    """Render the sources that changed most or beyond noise, how stable ranks are, and what to know about it."""
    shown = [each for place, each in enumerate(found.sources) if place < most or each.beyond_noise]
    owned = any(about.owner for about in found.about.values())
    known = any(each.standard_error is not None for each in found.sources)
    columns = ("first", "second", "difference", *["± standard error"] * known, "share", "")
    table = Table("source", *["owner"] * owned, *columns, title="Mean effect of removal over queries")
    for each in shown:
        owner = [cell(shorten(found.about[each.source].owner if each.source in found.about else ""))] * owned
        table.add_row(cell(each.name), *owner, *_render_effects(each, known))
    more = len(found.sources) - len(shown)
    return Group(
        table,
        *(cell(line, "italic" if place < 2 else "") for place, line in enumerate(found.describe())),
        *([cell(f"ranks differ most in {unstable}")] if (unstable := _name_unstable(found)) else []),
        *([cell(f"… and {count_of(more, 'more source')}: --out writes all of them.")] if more > 0 else []),
        *(cell(f"warning: {message}", "yellow") for message in found.warnings),
    )


def _render_effects(change: Change, known: bool) -> list[Text]:
    style = "dim" if change.beyond_noise is False else ""
    error = "" if change.standard_error is None else f"{change.standard_error:.2g}"
    effects = [f"{value:+.4g}" for value in (change.first, change.second, change.difference)]
    shares = f"{100 * change.first_share:.3g}% → {100 * change.second_share:.3g}%"
    texts = [*effects, *[error] * known, shares]
    return [*(Text(text, style=style) for text in texts), Text(change.verdict, style=_STYLES.get(change.verdict, ""))]


def _name_unstable(found: Changes) -> str:
    """Name the queries whose sources are ranked least alike; nothing where there is only one, or none differs."""
    ranked = sorted((each.spearman, place) for place, each in enumerate(found.queries) if each.spearman is not None)
    differing = [(rho, place) for rho, place in ranked[:_UNSTABLE] if f"{rho:.2f}" != "1.00"]
    if len(ranked) < 2:
        return ""
    return ", ".join(f"{describe_query(found.queries[place].query)} ({rho:.2f})" for rho, place in differing)
