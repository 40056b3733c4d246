"""Renders what the command line shows: tables of stores, checks and attributions, and progress."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from imprint.attribution.labels import Labels
from imprint.attribution.top import Credit, Top, explain_marks
from imprint.attribution.uncertainty import describe_error, has_errors
from imprint.checking import Check
from imprint.cli.experiment import read_note
from imprint.display import count_of, for_terminal, format_size, name_some, shorten
from imprint.plan import Plan, format_plan
from imprint.runtime.progress import Advance, format_duration
from imprint.store.values import is_number

if TYPE_CHECKING:
    from imprint.attribution.drilling import Inside
    from imprint.benchmarking.demo.report import Row
    from imprint.evaluation.validating import Comparison
    from imprint.language import TokenAttribution

console = Console(emoji=False)  # a source may be called :fire:
errors = Console(stderr=True, emoji=False)
_MOST_QUERIES = 12  # in a table; the rest is counted
_CHANGES = 8  # of a store, the latest, that are shown


def escape_markup(value: Any) -> str:
    """Return a value as text to insert into markup: printed literally, and safe for a terminal."""
    return escape(for_terminal(value))


def cell(value: Any, style: str = "") -> Text:
    """Return a value as a table cell: printed literally, and safe for a terminal."""
    return Text(for_terminal(value), style=style)


def render_pairs(title: str, pairs: Iterable[tuple[str, str]]) -> Table:
    """Render names and their values, one pair per line."""
    table = Table(title=cell(title), show_header=False, title_justify="left")
    for name, value in pairs:
        table.add_row(name, cell(value))
    return table


def _name_largest(sources: list[dict[str, Any]]) -> Iterator[str]:
    """Name the largest sources, with their ids where two share a name."""
    names = [source["name"] for source in sources]
    for source in sources:
        own = f", id {source['id']}" if names.count(source["name"]) > 1 else ""
        yield f"{source['name']}{own} ({source['size']:,})"


def render_store(values: dict[str, Any]) -> RenderableType:
    """Render what `inspect_store` returns."""
    head = render_pairs(
        f"Store {values['path']}",
        (
            ("question", values["meaning"]),
            ("validation", values["validation"].get("summary", "not validated: see `imprint validate`")),
            ("sources", f"{values['sources']:,} of {values['n']:,} training examples"),
            ("largest", ", ".join(_name_largest(values["largest_sources"]))),
            *([("described", render_ownership(values))] if values["described"] else []),
            ("imprints", _describe_imprints(values)),
            ("plan", _describe_plan(values)),
            ("readouts", ", ".join(values["readouts"])),
            ("took", _describe_cost(values)),
            ("created", f"{values['created']} with torch {values['versions']['torch']}"),
            *(("changed", change["summary"]) for change in values["history"][-_CHANGES:]),
        ),
    )
    table = Table("checkpoint", *(str(index) for index in range(len(values["checkpoints"]))))
    measured = next((c["measured"]["curvature_of"] for c in values["checkpoints"] if c["decided"]), "")
    hidden = _DESCENT if values["recording"] else () if any(c["run"] for c in values["checkpoints"]) else ("run",)
    for name, *cells in zip(_FIGURES, *(_figures(checkpoint) for checkpoint in values["checkpoints"]), strict=True):
        if name not in hidden and (name not in _SOMETIMES or set(cells) != {"–"}):
            label = _CURVATURES.get(measured, name) if name == "curvature" else name
            table.add_row(label, *map(cell, cells))
    return Group(head, table, *_render_warnings(values["warnings"]))


def render_ownership(values: dict[str, Any]) -> str:
    """Say in one line what `describe_ownership` returns."""
    parts = [f"{values['described']:,} of {values['sources']:,}"]
    for name in ("owners", "licences"):
        counted = [f"{shorten(text)} ({count:,})" for text, count in values[name].items()]
        parts += [f"{name}: {name_some(counted, 5)}"] if counted else []
    parts += [f"last changed {change['time']}" for change in values["descriptions_changed"][-1:]]
    return "; ".join(parts)


def render_recording(values: dict[str, Any]) -> RenderableType:
    """Render what `inspect_recording` returns."""
    how = values["circumstances"] or {}
    where = f"{how['device']}{', autocast to ' + how['autocast'] if how['autocast'] else ''}" if how else "–"
    state = "finished" if values["finished"] else "unfinished: resume the training with RunRecorder(...).resume()"
    losses = ", then ".join("not recorded" if loss is None else f"{loss:.4g}" for loss in values["losses"])
    pairs = [
        ("run", f"{state}, {count_of(values['steps'], 'step')} in {format_duration(values['seconds'])}"),
        ("identity", (values["recording"] or "–")[:12]),
        ("data", f"{values['n']:,} training examples{'' if values['data_hashed'] else ', of which no hash was taken'}"),
        ("optimiser", values["optimiser"]),
        ("trained", f"{count_of(values['trained'], 'tensor')}, {values['frozen']:,} frozen"),
        ("first and last loss", losses or "–"),
        ("checkpoints", f"after {', '.join(map(str, values['checkpoints']))} steps, {format_size(values['bytes'])}"),
        ("forward passes", where),
        ("made with", ", ".join(f"{name} {version}" for name, version in values["versions"].items())),
    ]
    return Group(
        render_pairs(f"Recording {values['path']}", pairs),
        cell(f"To attribute with it: imprint simulate TASK --run {values['path']}"),
    )


def _render_warnings(messages: Iterable[str]) -> list[Text]:
    """Render warnings, one to a line."""
    return [cell(f"warning: {message}", "yellow") for message in messages]


_CURVATURES = {
    "hessian": "curvature (Hessian)",
    "gauss-newton": "curvature (Gauss–Newton)",
    "preconditioned": "curvature (preconditioned)",
}


def _describe_plan(values: dict[str, Any]) -> str:
    """Describe the plan of a store; where a recorded run was repeated, which one."""
    if values["recording"]:
        return f"{format_plan(Plan.from_json(values['plan']))} {values['recording'][:12]}"
    return ", ".join(f"{name}={value}" for name, value in values["plan"].items() if value is not None)


def _describe_imprints(values: dict[str, Any]) -> str:
    """Describe what a store keeps of each source."""
    decided = [checkpoint["decided"] or {} for checkpoint in values["checkpoints"]]
    layers: tuple[str, ...] = next((each["layers"] for each in decided if each.get("layers")), ())
    form = f", factored ({', '.join(layers)})" if layers else ""
    if values["plan"]["form"] == "projected":
        form = f", projected to {values['plan']['directions']} directions"
    each = f"{values['parameters']:,} values each, {values['dtype']}{form}"
    return f"{each}; {format_size(values['bytes_per_source'])} per source, {format_size(values['bytes'])} in all"


def _describe_cost(values: dict[str, Any]) -> str:
    """Describe the time and memory of a simulation, beside the estimate."""
    cost = values["cost"]
    seconds, peak = format_duration(cost["seconds"]), format_size(cost["peak_bytes"])
    if cost["resumed"]:
        return f"{seconds} since it was resumed; at most {peak} of memory"
    expected = read_note(values["note"]).get("estimate")
    guesses = expected if isinstance(expected, dict) else {}
    time, memory = guesses.get("seconds"), guesses.get("peak_bytes")
    if not (is_number(time) and is_number(memory)):  # there was no estimate, or the note is the caller's own
        return f"{seconds}; at most {peak} of memory"
    times = f"{seconds} (estimated {format_duration(float(time))})"
    return f"{times}; at most {peak} of memory (estimated {format_size(memory)})"


_DESCENT = ("run", "lr", "damping", "ε", "curvature", "stability", "drift", "linearity")  # which a run has by itself
_SOMETIMES = (  # shown only where a checkpoint has them: of a basis, of Adam, and of a repeated run
    *("directions", "curvature outside", "share outside", "lost"),
    *("second moments", "share unmoved"),
    *("chaos", "deviation from the recorded end", "lost by a late start"),
)
_FIGURES = (
    *("run", "weight", "steps", "lr", "damping", "ε", "curvature", "stability", "drift", "linearity", "‖u‖, median"),
    *_SOMETIMES,
)


def _figures(checkpoint: dict[str, Any]) -> list[str]:
    """Return one checkpoint's column of figures, with a dash for what it lacks."""
    decided, measured = checkpoint["decided"] or {}, checkpoint["measured"]
    low, high = measured["curvature"] or (None, None)
    values = [{**checkpoint, **decided}.get(name) for name in ("run", "weight", "steps", "lr", "damping", "epsilon")]
    cells = [_format_figure(value, 4) for value in values]
    cells.append("–" if low is None else f"{low:.3g} … {high:.3g}")
    more = (
        *(measured[name] for name in ("stability", "drift")),
        *((measured[name] or {}).get("median") for name in ("linearity", "norms")),
        decided.get("directions"),
        *(measured[name] for name in ("rest", "share", "lost")),
    )
    cells += [_format_figure(value, 3) for value in more]
    last = [_format_figure(measured[name], 3) for name in ("unmoved", "chaos", "deviation", "start_lost")]
    return [*cells, measured["moments"] or "–", *last]


def _format_figure(value: Any, digits: int) -> str:
    """Format a measured number with this many digits; leave counts and words as they are."""
    return "–" if value is None else f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def render_check(check: Check) -> RenderableType:
    """Render what `check` found."""
    pairs = [
        ("parameters", f"{check.values:,} of {check.values_in_all:,} values: {name_some(list(check.parameters), 4)}"),
        ("sources", f"{check.sources:,} over {check.examples:,} training examples"),
        ("checkpoints", str(check.checkpoints)),
        ("plan", format_plan(check.plan)),
    ]
    if check.estimate is not None:
        found = check.estimate
        together = f"one by one: {found.one_by_one}" if found.one_by_one else f"{found.rows_at_once:,} sources at once"
        pairs.insert(
            1, ("store", f"{format_size(found.bytes_per_source)} per source, {format_size(found.store_bytes)} in all")
        )
        pairs += [
            ("time", f"about {format_duration(found.seconds)}, {together}"),
            ("peak memory", f"about {format_size(found.peak_bytes)}"),
        ]
    table = Table("", "", "works", "remark")
    for kind, possibilities in (("engine", check.engines), ("readout", check.readouts)):
        for possibility in possibilities:
            chosen = kind == "engine" and possibility.name == check.plan.engine
            works = "[green]yes[/green]" if possibility.works else "[red]no[/red]"
            table.add_row(kind, possibility.name, works, cell(possibility.remark), style="bold" if chosen else None)
    verdict = [cell(f"problem: {problem}", "red") for problem in check.problems]
    verdict = verdict or [cell(check.tried, "green")]
    return Group(render_pairs("Check", pairs), table, *verdict, *_render_warnings(check.warnings))


def render_attribution(mean: Top, top: Top, names: Sequence[str] = ()) -> RenderableType:
    """Render the top sources of the mean over queries, then those of each query, with its name if it has one."""
    shown = list(islice(top, _MOST_QUERIES))
    more = len(top) - _MOST_QUERIES
    return Group(
        _render_mean(mean[0]),
        *_render_about(top.labels, has_errors(top.noise, top.replicates)),
        _render_queries(shown, names),
        *map(cell, explain_marks([*mean[0], *chain.from_iterable(shown)])),
        *([Text(f"… and {more:,} more queries: write all of them with --out.")] if more > 0 else []),
        *_render_warnings(top.warnings),
    )


def _render_about(labels: Labels, known: bool) -> list[Text]:
    """Render what effects are measured in, what they answer, whether they were validated, and what errors are from."""
    about = [cell(line, "italic") for line in (labels.unit[0].upper() + labels.unit[1:], labels.meaning)]
    return [*about, _render_standing(labels), *(cell(line, "italic") for line in describe_error(labels, known))]


def _render_standing(labels: Labels) -> Text:
    """Render whether effects were validated: green if they were, red if they failed."""
    outcome = None if labels.validation is None else labels.validation.outcome
    return cell(labels.standing, _STYLES.get(outcome or "", "yellow"))


_STYLES = {"sizes validated": "green", "ranks validated": "green", "failed": "red"}


def render_comparison(found: "Comparison") -> RenderableType:
    """Render predicted effects beside those of removals that were really made, and the verdict."""
    table = Table("removed", title=f"Change of {for_terminal(found.validation.measure)}, mean over queries")
    for column in ("predicted", "actual"):
        table.add_column(column, justify="right")
    for row in found.rows:
        error = "" if row.error is None else f" ± {row.error:.2g}"
        table.add_row(cell(row.name), f"{row.predicted:+.4g}", f"{row.actual:+.4g}{error}")
    verdict = found.validation.verdict
    left = found.describe_left_out()
    return Group(table, *map(cell, left), cell(str(verdict), _STYLES.get(verdict.outcome, "yellow")))


def _render_mean(credits: list[Credit], title: str = "effect of removal, mean over queries") -> Table:
    known = [name for name in ("owner", "licence") if any(getattr(credit, name) for credit in credits)]
    table = Table("source", title, *_error_columns(credits), *known)
    for credit in credits:
        about = [cell(shorten(getattr(credit, name))) for name in known]
        table.add_row(cell(credit.name), *_effect_cells(credit), *about)
    return table


def render_words(words: "TokenAttribution", source: str | None, top: Top) -> RenderableType:
    """Render the first sources of a completion, and its words shaded by what one of them contributes."""
    from imprint.language.words import explain_words

    labels, rated = words.labels, words.rate_words(source or words.most_helpful)
    shown = (*rated, *words.credited(source=source).totals)
    return Group(
        _render_mean(top[0], "effect of removal, whole completion"),
        *_render_about(labels, has_errors(words.noise_changes, words.replicates)),
        words.shade(source),
        cell("Word by word: " + ", ".join(f"{word.text.strip()} {word.format()}" for word in rated)),
        *map(cell, dict.fromkeys([*explain_marks(top[0]), *explain_words(labels, shown)])),
        *_render_warnings(labels.warnings),
    )


def render_documents(found: "Inside", most: int) -> RenderableType:
    """Render the documents of a source that move each query most."""
    labels, more = found.result.labels, len(found.result) - _MOST_QUERIES
    rows = [found.top(most, query) for query in range(min(len(found.result), _MOST_QUERIES))]
    credits = [credit for each in rows for credit, _ in each]
    columns = ("query", "document", "effect of removal", *_error_columns(credits), *["text"] * bool(found.texts))
    table = Table(*columns)
    for query, listed in enumerate(rows):
        named = f"{query}: {shorten(found.asked[query])}" if found.asked else str(query)
        for position, (credit, text) in enumerate(listed):
            first = (cell("" if position else named), cell(credit.name), *_effect_cells(credit))
            last = [cell(shorten(text, 60))] if found.texts else []
            table.add_row(*first, *last, end_section=position == len(listed) - 1)
    return Group(
        cell(f"Inside {found.source}: {len(labels.source_ids):,} documents", "bold"),
        *_render_about(labels, has_errors(found.result.noise_changes, found.result.replicates)),
        table,
        *map(cell, explain_marks(credits)),
        *([Text(f"… and {more:,} more queries: --out writes a page of all of them.")] if more > 0 else []),
        *_render_warnings(labels.warnings),
    )


def _render_queries(shown: list[list[Credit]], names: Sequence[str] = ()) -> Table:
    table = Table("query", "source", "effect of removal", *_error_columns(shown[0] if shown else []))
    for credits in shown:
        for position, credit in enumerate(credits):
            last = position == len(credits) - 1
            named = f": {names[int(credit.query)]}" if names and credit.query != "mean" else ""
            number = f"{credit.query}{named}" if position == 0 else ""
            table.add_row(cell(number), cell(credit.name), *_effect_cells(credit), end_section=last)
    return table


def _error_columns(credits: list[Credit]) -> list[str]:
    """Return the head of a column of standard errors, where they are known."""
    return ["± standard error"] * any(credit.standard_error is not None for credit in credits)


def _effect_cells(credit: Credit) -> list[Text]:
    """Return an effect with its marks, and its standard error; one that is not distinguishable from 0 is dim."""
    style = "dim" if credit.distinguishable is False else ""
    cells = [Text(credit.format_effect(digits=4), style=style)]
    return [*cells, *[Text(credit.format_error(), style=style)] * (credit.standard_error is not None)]


def render_demo(rows: "list[Row]", statistics: Sequence[tuple[str, ...]], labels: Labels) -> RenderableType:
    """Render the demo's contributors, with predicted and actual effects and how well they agree."""
    table = Table(title="Change of the mean held-out loss (nats) if the contributor were removed")
    for column in ("contributor", "size", "this run", "expected", "retrained", "loss"):
        table.add_column(column, justify="left" if column == "contributor" else "right", no_wrap=True)
    for row in rows:
        name = f"{row.name} (mislabels)" if row.mislabels else row.name
        actual = f"{row.actual:+.4f} ± {row.error:.4f}"
        style = "red" if row.mislabels else None
        predicted = (f"{row.this_run:+.4f}", f"{row.predicted:+.4f}")
        table.add_row(cell(name), str(row.size), *predicted, actual, f"{row.loss:.3f}", style=style)
    figures = Table("", "imprint", "guess by size", "ceiling", title="Expected against retrained, 95% intervals")
    for line in statistics:
        figures.add_row(*map(cell, line))
    return Group(table, cell(labels.meaning, "italic"), figures, *_render_warnings(labels.warnings))


@contextmanager
def redirect_prints() -> Iterator[None]:
    """Send what the user's code prints to standard error, so that standard output holds only results."""
    with redirect_stdout(sys.stderr):
        yield


@contextmanager
def show_progress(console: Console, label: str) -> Iterator[bool | Advance]:
    """Show a progress bar on a terminal, and plain lines, which suit a log, elsewhere."""
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
        yield _Line(bar, label)


class _Line:
    """Shows how far a computation is, and before anything counts what it is doing."""

    def __init__(self, bar: Progress, label: str) -> None:
        self._bar, self._label, self._line, self._done = bar, label, bar.add_task(label, total=None), 0

    def __call__(self, done: int, total: int, /) -> None:
        phase = None if done == self._done else self._label  # None leaves it as it is
        self._done = done
        self._bar.update(self._line, completed=done, total=total, description=phase)

    def announce(self, phase: str, /) -> None:
        self._bar.update(self._line, description=escape(f"{self._label}: {phase}"))
