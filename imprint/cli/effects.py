"""Renders what removing each source did to the queries, for `imprint retrain`."""

from rich.console import Group, RenderableType
from rich.table import Table

from imprint.cli.terminal import cell
from imprint.display import count_of
from imprint.evaluation.effects import list_effects
from imprint.evaluation.truth import Truth

_MOST = 24  # sources in a table; the rest is counted


def render_effects(truth: Truth) -> RenderableType:
    """Render the mean effect of each source over queries, with its error over runs."""
    found = list_effects(truth)
    if not found:
        return cell("Effects per source need models without each single one: --kind sources.")
    table = Table("source")
    table.add_column("examples", justify="right")
    table.add_column("effect")
    for each in found[:_MOST]:
        style = "dim" if each.distinguishable is False else ""
        table.add_row(cell(each.name), f"{each.size:,}", cell(each, style))
    more = len(found) - _MOST
    notes = [f"… and {count_of(more, 'more source')}: --json lists all of them."] if more > 0 else []
    notes += _explain(truth, any(each.distinguishable is False for each in found))
    return Group(cell(_title(truth), "italic"), table, *map(cell, notes))


def _title(truth: Truth) -> str:
    """Say what an effect is, and which sign means that a source helps."""
    sign = {"lower": "+", "higher": "−"}.get(truth.about.get("better", ""))
    queries = count_of(truth.values.shape[2], "query", "queries")
    meaning = f": {sign} means the source helps" if sign else ""
    return f"Change of {truth.measure} if the source is removed, mean over {queries}{meaning}"


def _explain(truth: Truth, marked: bool) -> list[str]:
    """Say what the effects answer, and how sure they are."""
    if truth.question == "this_run":
        return ["this_run: the effect on the model of this very run, with no error from other seeds."]
    if truth.runs == 1:
        return ["expected: but from a single run, so the error is unknown. --runs 3 adds two more."]
    notes = [f"expected: mean over {count_of(truth.runs, 'run')} ± its standard error."]
    return [*notes, *["~: not distinguishable from 0, which the 95% interval over runs contains."] * marked]
