"""Renders training examples that look mislabelled."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table

from imprint.cli.terminal import cell
from imprint.evaluation.mislabels import MislabelDetection, Suspects


def render_suspects(
    found: Suspects, most: int, names: Sequence[str], measured: MislabelDetection | None
) -> RenderableType:
    """Render the first suspects by self-influence, with their rank by plain loss, and how far both agree."""
    table = Table(title=f"Suspects among {len(found.rows):,} training examples", title_justify="left")
    for column in ("rank", "example", "self-influence", "loss", "rank by loss"):
        table.add_column(column, justify="right")
    if names:
        table.add_column("text")
    for row in found.rows[:most]:
        values = (row.rank, row.example, f"{row.self_influence:+.3g}", f"{row.loss:.3g}", row.rank_by_loss)
        table.add_row(*map(str, values), *([cell(names[row.example])] if names else []))
    by_loss = ", ".join(str(row.example) for row in found.by_loss[:most])
    remarks = [
        "Self-influence: what being trained on changes in the example's own measurement. A wrong label lowers its own "
        "loss, or raises its own margin, more than others do.",
        f"By plain loss: {by_loss}.",
        f"{found.count_common(most)} of the first {min(most, len(found.rows))} are the same by both. Look at the "
        "examples: neither order proves a wrong label.",
        f"Mean loss: {found.mean_loss:.3g}. If that is the loss of a model that is not trained, name its trained "
        "weights with --checkpoint.",
    ]
    return Group(table, *map(cell, remarks), *map(cell, str(measured or "").splitlines()))
