"""Pictures and tables of benchmarks/publishers.py: who moved whom, word by word, and how faithful every method is."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from publishers_case import Case
from publishers_results import EXACT, Results
from torch import Tensor

from imprint.benchmarking.settings import sotu
from imprint.store.files import write

STORIES = 3  # answers that are drawn word by word
LINE = 118  # characters of a line of an answer
HEIGHT = 3  # lines that an answer has room for; longer ones are drawn closer
MEAN = f"{EXACT}, mean of "
LABELS = {
    "derivative of the run": "derivative of the run (MAGIC's quantity)",
    "embeddings": "embedding similarity",
    "size": "size of the source",
}
COLOURS = "RdBu"  # red hinders, blue helps
COSTS: Mapping[
    str, Callable[[str], tuple[str, ...]]
] = {  # under which names the seconds of a method and its variant are kept, by how these names begin
    EXACT: lambda variant: ("replaying without each", "scoring"),
    "path imprints": lambda variant: ("path imprints",),
    "derivative of the run": lambda variant: ("the derivative",),
    "EK-FAC": lambda variant: (f"EK-FAC at{_step_of(variant)}",),
    "TRAK": lambda variant: (f"gradients at{_step_of(variant)}",),
    "gradient product": lambda variant: (f"gradients at{_step_of(variant)}",),
    "gradient cosine": lambda variant: (f"gradients at{_step_of(variant)}",),
    "embeddings": lambda variant: ("embeddings",),
    "BM25": lambda variant: ("words",),
    "TF-IDF": lambda variant: ("words",),
    "SOURCE": lambda variant: (f"SOURCE with {variant}",),
}


def _step_of(variant: str) -> str:
    """Return the step that a variant computes at, after a space; nothing where it takes all."""
    return f" {variant.partition(',')[0]}" if variant.startswith("step") else ""


def draw(case: Case, results: Results) -> None:
    """Draw what the folder has figures for, and write its tables as Markdown."""
    if EXACT in results.scores:
        _save(case, "who", _draw_who(case, results.scores[EXACT]))
    if "story" in results.found:
        _save(case, "words", _draw_words(results.found["story"]))
    if "this_run" in results.found:
        _save(case, "methods", _draw_methods(results.found["this_run"], case.settings.drops))
    tables = [_tabulate(results.found, name) for name in ("this_run", "expected") if name in results.found]
    write(case.folder / "report.md", lambda path: path.write_text("\n\n".join(tables) + "\n"))


def _save(case: Case, name: str, figure: Figure) -> None:
    figure.savefig(case.folder / f"{name}.png", dpi=120, bbox_inches="tight")
    plt.close(figure)


def _draw_who(case: Case, scores: Tensor) -> Figure:
    """Draw the mean effect of leaving out each president on held-out passages of each."""
    effects = -scores[: len(case.passages)] / len(case.documents.documents)
    presidents = [name for name in sotu.PRESIDENTS if name in case.sources.names]  # in the order of their time
    order = [case.sources.names.index(name) for name in presidents]
    means = torch.stack([effects[case.own == index].mean(0)[order] for index in order])
    names = [_format_name(president) for president in presidents]
    figure, axes = plt.subplots(figsize=(7.5, 6.5))
    largest = float(means.abs().max())
    shown = axes.imshow(means.numpy(), cmap=COLOURS + "_r", norm=TwoSlopeNorm(0, -largest, largest))
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("left out of the fine-tune")
    axes.set_ylabel("held-out passages of")
    figure.colorbar(shown, label="change of log-likelihood, nats per passage", shrink=0.8)
    return figure


def _draw_words(story: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the answers that one president helped most, every word on the colour of what that president contributes."""
    most = sorted(story, key=lambda each: each["effects"][each["most helpful"]])[:STORIES]
    figure, panels = plt.subplots(len(most), figsize=(10, (0.3 * HEIGHT + 0.3) * len(most)), squeeze=False)
    for axes, told in zip(panels[:, 0], most, strict=True):
        president = _format_name(told["most helpful"])
        effect = told["effects"][told["most helpful"]]
        axes.set_title(
            f"{told['prompt']} …   without {president}: {effect:+.2f} nats", loc="left", fontsize=10, weight="bold"
        )
        _write_words(axes, told["every word"])
    figure.tight_layout()
    return figure


def _format_name(president: str) -> str:
    """Return the name of a president as it is written."""
    return president.title().replace("Mck", "McK")


def _write_words(axes: Axes, words: Sequence[tuple[str, float]]) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, LINE)
    largest = max(abs(contribution) for _, contribution in words) or 1.0
    colours, lines = plt.get_cmap(COLOURS), list(_break_lines(words))
    axes.set_ylim(-max(HEIGHT, len(lines)), 0)
    for number, line in enumerate(lines):
        at = 0.0
        for text, contribution in line:
            background = colours(0.5 + 0.4 * contribution / largest)
            shown = text.strip().replace("$", r"\$")
            known: dict[str, Any] = {"family": "monospace", "fontsize": 9, "va": "top"}
            axes.text(at, -number - 0.15, shown, bbox={"fc": background, "ec": "none", "pad": 1.5}, **known)
            at += len(text.strip()) + 1


def _break_lines(words: Sequence[tuple[str, float]]) -> Iterator[list[tuple[str, float]]]:
    line: list[tuple[str, float]] = []
    for text, contribution in words:
        if line and sum(len(each.strip()) + 1 for each, _ in line) + len(text.strip()) > LINE:
            yield line
            line = []
        line.append((text, contribution))
    yield line


def _draw_methods(rows: Mapping[str, Mapping[str, Any]], drops: Sequence[int]) -> Figure:
    """Draw how well each method ranks sets of presidents left out of this run, with 95% intervals."""
    named = sorted((row["all sets"]["value"], name) for name, row in rows.items() if "all sets" in row)
    figure, axes = plt.subplots(figsize=(7, 0.35 * len(named) + 1))
    for place, (value, name) in enumerate(named):
        found, colour = rows[name]["all sets"], "tab:blue" if name == EXACT else "tab:grey"
        axes.barh(place, value, color=colour)
        axes.plot([found["low"], found["high"]], [place, place], color="black", linewidth=1.2)
    axes.set_yticks(range(len(named)), [LABELS.get(name, name) for _, name in named])
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(f"rank correlation with replays without {min(drops)} to {max(drops)} presidents, per query")
    return figure


def _tabulate(found: Mapping[str, Any], question: str) -> str:
    """Return a table of a ground truth as Markdown, the best method first."""
    rows: dict[str, dict[str, Any]] = dict(found[question])
    bounds = {name: rows.pop(name) for name in ("ceiling", "agreement of runs", "ground truth") if name in rows}
    columns = list(dict.fromkeys(name for row in rows.values() for name in row if isinstance(row[name], dict)))
    head = ["method", *columns, "slope", "own first", "variant", "seconds of it"]
    main = "all sets" if "all sets" in columns else columns[0]
    lines = [" | ".join(head), " | ".join(["---", *["---:"] * (len(head) - 1)])]
    for name, row in sorted(rows.items(), key=lambda each: -each[1][main]["value"]):
        cells = [_format_interval(row.get(column)) for column in columns]
        slope = f"{row[main]['slope']:.2f}"
        own = f"{row['own first']:.0%}" if "own first" in row else ""
        seconds = _sum_seconds(found, name, str(row.get("variant", "")))
        lines.append(" | ".join([LABELS.get(name, name), *cells, slope, own, str(row.get("variant", "")), seconds]))
    title = f"## {question.replace('_', ' ')} {json.dumps(bounds) if bounds else ''}"
    return "\n".join([title, "", *(f"| {line} |" for line in lines)])


def _format_interval(found: Mapping[str, float] | None) -> str:
    return f"{found['value']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" if found else ""


def _sum_seconds(found: Mapping[str, Any], method: str, variant: str) -> str:
    """Return what a method took as it is shown, without the variants that it was chosen from."""
    if method.startswith(MEAN):  # the runs of other seeds are the ground truth's, of which some are not compared with
        runs, seeds = int(method.removeprefix(MEAN).split()[0]), found["settings"]["seeds"]
        others = _add(found["seconds"], (f"replaying {seeds} other seeds",)) * (runs - 1) / seeds
        return f"{_add(found['seconds'], COSTS[EXACT]('')) + others:.0f}"
    return f"{_add(found['seconds'], COSTS[method](variant)):.0f}" if method in COSTS else ""


def _add(seconds: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(taken for what, taken in seconds.items() if any(f"{what} ".startswith(f"{name} ") for name in names))
