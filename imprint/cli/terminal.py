"""What the command line shows a person: tables of stores, checks and attributions, and progress."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from imprint.attribution.top import Top
from imprint.checking import Check, Possibility, shown_plan, size
from imprint.cli.experiment import noted
from imprint.display import for_terminal
from imprint.runtime.progress import Advance, duration
from imprint.store.values import is_number

if TYPE_CHECKING:
    from imprint.benchmarking.demo.report import Row
    from imprint.evaluation.metrics import Metric
    from imprint.evaluation.truth import Truth

console = Console(emoji=False)  # a source may be called :fire:
errors = Console(stderr=True, emoji=False)
_SHOWN = 12  # queries in a table; the rest is counted


def marked(value: Any) -> str:
    """A value for a text with markup, as it is: it moves no cursor, and what looks like markup is none."""
    return escape(for_terminal(value))


def cell(value: Any, style: str = "") -> Text:
    """A value for a table, as it is."""
    return Text(for_terminal(value), style=style)


def lines(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Names with what they are, one to a line."""
    table = Table(title=cell(title), show_header=False, title_justify="left")
    for name, value in pairs:
        table.add_row(name, cell(value))
    return table


def _largest(sources: list[dict[str, Any]]) -> Iterator[str]:
    """The largest sources by name, and by their ids too where two have one name."""
    names = [source["name"] for source in sources]
    for source in sources:
        own = f", id {source['id']}" if names.count(source["name"]) > 1 else ""
        yield f"{source['name']}{own} ({source['size']:,})"


def shown_store(values: dict[str, Any]) -> RenderableType:
    """What `inspected` says of a store."""
    plan = {name: value for name, value in values["plan"].items() if value is not None}
    head = lines(
        f"Store {values['path']}",
        (
            ("sources", f"{values['sources']:,} of {values['n']:,} training examples"),
            ("largest", ", ".join(_largest(values["largest_sources"]))),
            ("imprints", _imprints(values)),
            ("plan", ", ".join(f"{name}={value}" for name, value in plan.items())),
            ("readouts", ", ".join(values["readouts"])),
            ("took", took(values)),
            ("made", f"{values['created']} by torch {values['versions']['torch']}"),
        ),
    )
    table = Table("checkpoint", *(str(index) for index in range(len(values["checkpoints"]))))
    measured = next((c["measured"]["curvature_of"] for c in values["checkpoints"] if c["decided"]), "")
    for name, *cells in zip(_FIGURES, *(_figures(checkpoint) for checkpoint in values["checkpoints"]), strict=True):
        if name not in _SOMETIMES or set(cells) != {"–"}:
            label = _CURVATURES.get(measured, name) if name == "curvature" else name
            table.add_row(label, *map(cell, cells))
    return Group(head, table, *_warned(values["warnings"]))


def _warned(messages: Iterable[str]) -> list[Text]:
    """Warnings, one to a line."""
    return [cell(f"warning: {message}", "yellow") for message in messages]


_CURVATURES = {"hessian": "curvature (Hessian)", "gauss-newton": "curvature (Gauss–Newton)"}


def _imprints(values: dict[str, Any]) -> str:
    """What a store keeps of each source."""
    decided = [checkpoint["decided"] or {} for checkpoint in values["checkpoints"]]
    layers: tuple[str, ...] = next((each["layers"] for each in decided if each.get("layers")), ())
    form = f", factored ({', '.join(layers)})" if layers else ""
    if values["plan"]["form"] == "projected":
        form = f", projected to {values['plan']['directions']} directions"
    each = f"{values['parameters']:,} values each, {values['dtype']}{form}"
    return f"{each}; {size(values['bytes_per_source'])} per source, {size(values['bytes'])} in all"


def took(values: dict[str, Any]) -> str:
    """What a simulation took, beside what was expected of it."""
    cost = values["cost"]
    seconds, peak = duration(cost["seconds"]), size(cost["peak_bytes"])
    if cost["resumed"]:
        return f"{seconds} after it was resumed; at most {peak} of memory"
    expected = noted(values["note"]).get("estimate")
    guesses = expected if isinstance(expected, dict) else {}
    time, memory = guesses.get("seconds"), guesses.get("peak_bytes")
    if not (is_number(time) and is_number(memory)):  # none was made, or the note is somebody else's
        return f"{seconds}; at most {peak} of memory"
    return f"{seconds} (estimated {duration(float(time))}); at most {peak} of memory (estimated {size(memory)})"


_SOMETIMES = (  # of a basis, and of Adam; shown where there is one
    *("directions", "curvature outside", "share outside", "lost"),
    *("second moments", "share unmoved"),
)
_FIGURES = (
    *("weight", "steps", "lr", "damping", "ε", "curvature", "stability", "drift", "linearity", "‖u‖, median"),
    *_SOMETIMES,
)


def _figures(checkpoint: dict[str, Any]) -> list[str]:
    """One checkpoint's column of figures; a dash for what it does not have."""
    decided, measured = checkpoint["decided"] or {}, checkpoint["measured"]
    low, high = measured["curvature"] or (None, None)
    values = [{**checkpoint, **decided}.get(name) for name in ("weight", "steps", "lr", "damping", "epsilon")]
    cells = [_figure(value, 4) for value in values]
    cells.append("–" if low is None else f"{low:.3g} … {high:.3g}")
    more = (
        *(measured[name] for name in ("stability", "drift")),
        *((measured[name] or {}).get("median") for name in ("linearity", "norms")),
        decided.get("directions"),
        *(measured[name] for name in ("rest", "share", "lost")),
    )
    cells += [_figure(value, 3) for value in more]
    return [*cells, measured["moments"] or "–", _figure(measured["unmoved"], 3)]


def _figure(value: Any, digits: int) -> str:
    """A measured number to so many digits; counts and words as they are."""
    return "–" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def shown_check(check: Check) -> RenderableType:
    """What `check` found."""
    names = list(check.parameters)
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    pairs = [
        ("parameters", f"{check.values:,} of {check.values_in_all:,} values: {shown}"),
        ("sources", f"{check.sources:,} over {check.examples:,} training examples"),
        ("checkpoints", str(check.checkpoints)),
        ("plan", shown_plan(check.plan)),
    ]
    if check.estimate is not None:
        found = check.estimate
        together = f"one by one: {found.one_by_one}" if found.one_by_one else f"{found.rows_at_once:,} sources at once"
        pairs.insert(1, ("store", f"{size(found.bytes_per_source)} per source, {size(found.store_bytes)} in all"))
        pairs += [
            ("time", f"about {duration(found.seconds)}, {together}"),
            ("peak memory", f"about {size(found.peak_bytes)}"),
        ]
    table = Table("", "", "works", "remark")
    for kind, possibilities in (("engine", check.engines), ("readout", check.readouts)):
        for possibility in possibilities:
            chosen = kind == "engine" and possibility.name == check.plan.engine
            table.add_row(kind, *_possibility(possibility), style="bold" if chosen else None)
    verdict = [cell(f"problem: {problem}", "red") for problem in check.problems]
    verdict = verdict or [cell(check.tried, "green")]
    return Group(lines("Check", pairs), table, *verdict, *_warned(check.warnings))


def _possibility(found: Possibility) -> tuple[str, str, Text]:
    return found.name, "[green]yes[/green]" if found.works else "[red]no[/red]", cell(found.remark)


def shown_mean(top: Top) -> RenderableType:
    """The first sources of the mean over queries."""
    table = Table("source", "effect of removal, mean over queries")
    for credit in top[0]:
        table.add_row(cell(credit.name), f"{credit.removal_effect:+.4g}")
    return table


def shown_top(top: Top) -> RenderableType:
    """The first sources of each query."""
    unit = top.labels.unit[0].upper() + top.labels.unit[1:]
    table = Table("query", "source", "effect of removal")
    for credits in list(top)[:_SHOWN]:
        for position, credit in enumerate(credits):
            last = position == len(credits) - 1
            number = str(credit.query) if position == 0 else ""
            table.add_row(cell(number), cell(credit.name), f"{credit.removal_effect:+.4g}", end_section=last)
    more = len(top) - _SHOWN
    return Group(
        cell(unit, "italic"),
        table,
        *([Text(f"… and {more:,} more queries: --out writes all of them.")] if more > 0 else []),
        *_warned(top.warnings),
    )


def shown_demo(
    rows: "list[Row]", statistics: Sequence[tuple[str, ...]], warnings: Iterable[str] = ()
) -> RenderableType:
    """The demo's contributors, predicted and actual, and how well these agree."""
    table = Table(title="Change of the mean held-out loss (nats) if the contributor were removed")
    for column in ("contributor", "examples", "predicted", "actual", "training loss", "by prediction"):
        table.add_column(column, justify="left" if column in ("contributor", "by prediction") else "right")
    for row in rows:
        name = f"{row.name} (mislabels a third)" if row.mislabels else row.name
        actual = f"{row.actual:+.4f} ± {row.error:.4f}"
        style = "red" if row.mislabels else None
        cells = (cell(name), str(row.size), f"{row.predicted:+.4f}", actual, f"{row.loss:.3f}", row.verdict)
        table.add_row(*cells, style=style)
    figures = Table("", "imprint", "guess by size", "ceiling", title="Predicted against actual, 95% intervals")
    for line in statistics:
        figures.add_row(*map(cell, line))
    return Group(table, figures, *_warned(warnings))


def shown_truth(truth: "Truth", path: Path) -> RenderableType:
    """What a ground truth holds."""
    runs, subsets, queries = truth.values.shape
    what = "random halves" if truth.subsets.kind == "halves" else "everything, and removals from it"
    often = "once each" if runs == 1 else f"{runs:,} times each"
    table = lines(
        f"Truth {path}",
        (
            ("models", f"of {subsets:,} subsets ({what}), {often}"),
            ("queries", f"{queries:,}, measured by {truth.measure}: {float(truth.values.mean()):.4g} on average"),
            ("sources", f"{len(truth.subsets.sources):,} of {truth.subsets.n:,} training examples"),
        ),
    )
    more = f"{_RUNS}: the same command with --runs 2 adds one to this folder."
    return Group(table, *([Text(more)] if runs == 1 else []))


_RUNS = "With one run the noise of retraining is unknown, and no ceiling can be told"


def shown_metrics(metrics: "Sequence[Metric]", truth: "Truth") -> RenderableType:
    """Metrics with their intervals and what the truth allows, within 80 columns."""
    what = "random halves" if truth.subsets.kind == "halves" else "removals"
    columns = ("", "value", "95% interval", "ceiling", "another\nrun")
    table = Table(*columns, title=f"Scores against the truth of {what}", title_justify="left", show_edge=False)
    for metric in metrics:
        found = metric.estimate
        table.add_row(
            metric.name.replace(" of removals", "").removesuffix(" effects"),
            f"{found.value:.3f}",
            "–" if found.low != found.low else cell(f"[{found.low:.3f}, {found.high:.3f}]"),
            *("–" if limit != limit else f"{limit:.3f}" for limit in (metric.ceiling, metric.single_run)),
        )
    remarks = [f"{m.name}: undefined for {m.undefined} queries, left out" for m in metrics if m.undefined]
    if truth.runs == 1:
        remarks.append(f"{_RUNS}.")
    else:
        remarks.append("Ceiling: about what a perfect predictor would reach against this truth; rough if runs are few.")
        remarks.append("Another run: what the mean of the other runs reaches against one.")
    return Group(table, *(Text(remark) for remark in remarks))


@contextmanager
def working() -> Iterator[None]:
    """What the user's code prints while a command works is no result."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def progress(console: Console, label: str) -> Iterator[bool | Advance]:
    """A bar on a terminal; elsewhere the library's own lines, which suit a log."""
    if not console.is_terminal:
        yield True
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task(label, total=None)

        def advance(done: int, total: int, /) -> None:
            bar.update(line, completed=done, total=total)

        yield advance
