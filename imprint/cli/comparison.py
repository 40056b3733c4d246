"""Renders the comparison of retraining, replaying and simulating, for `imprint check`."""

from rich.console import Group, RenderableType
from rich.table import Table

from imprint.advice.ways import format_seconds
from imprint.checking import Check
from imprint.cli.terminal import cell
from imprint.display import format_size


def render_ways(check: Check) -> RenderableType:
    """Render what each way takes and which question it answers, with the advice."""
    table = Table("", "answers", "time", "memory", "disk", title="Retrain, replay or simulate?", title_justify="left")
    for way in check.ways:
        question = way.question if way.measures else f"{way.question}, estimated"
        disk = "–" if way.disk_bytes == 0 else format_size(way.disk_bytes)
        sizes = (format_size(way.peak_bytes), disk)
        table.add_row(cell(way.task), question, format_seconds(way.seconds), *sizes)
    details = [cell(f"{way.task}: {way.how}", "dim") for way in check.ways]
    return Group(table, *details, cell(check.advice, "bold"))
