"""Renders ground truth, and scores compared with it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from imprint.attribution.labels import MEANINGS
from imprint.cli.terminal import cell, render_pairs
from imprint.display import count_of

if TYPE_CHECKING:
    from imprint.evaluation.metrics import Metric
    from imprint.evaluation.truth import Truth


def render_truth(truth: "Truth", path: str) -> RenderableType:
    """Render what a ground truth holds."""
    runs, subsets, queries = truth.values.shape
    what = "random halves" if truth.subsets.kind == "halves" else "all data, and removals from it"
    often = "once each" if runs == 1 else f"{runs:,} times each"
    made = "replayed from recorded runs" if truth.replayed else "trained"
    table = render_pairs(
        f"Ground truth {path}",
        (
            ("question", MEANINGS[truth.question]),
            ("models", f"{subsets:,} subsets ({what}), {made} {often}"),
            ("queries", f"{queries:,}, measured by {truth.measure}: {float(truth.values.mean()):.4g} on average"),
            ("sources", f"{len(truth.subsets.sources):,} of {truth.subsets.n:,} training examples"),
        ),
    )
    more = f"{_ONE_RUN}. The same command with --runs 2 adds a second run to this folder."
    return Group(table, *([Text(more)] if runs == 1 and truth.question == "expected" else []))


_ONE_RUN = "With a single run the noise of retraining is unknown, so there is no ceiling"


def render_metrics(metrics: "Sequence[Metric]", truth: "Truth") -> RenderableType:
    """Render metrics with their intervals and ceilings, within 80 columns."""
    what = "random halves" if truth.subsets.kind == "halves" else "removals"
    columns = ("", "value", "95% interval", "ceiling", "another\nrun")
    title = f"Scores compared with ground truth from {what}: {truth.question}"
    table = Table(*columns, title=title, title_justify="left", show_edge=False)
    for metric in metrics:
        found = metric.estimate
        table.add_row(
            metric.name.replace(" of removals", "").removesuffix(" effects"),
            f"{found.value:.3f}",
            "–" if found.low != found.low else cell(f"[{found.low:.3f}, {found.high:.3f}]"),
            *("–" if limit != limit else f"{limit:.3f}" for limit in (metric.ceiling, metric.single_run)),
        )
    remarks = [f"Intervals are over {over}." for over in sorted({m.over for m in metrics if m.over != "queries"})]
    remarks += [
        f"{m.name}: undefined for {count_of(m.undefined, 'query', 'queries')}, left out of the mean"
        for m in metrics
        if m.undefined
    ]
    for question in sorted({m.scores_question for m in metrics if m.scores_question} - {truth.question}):
        asked, known = MEANINGS[question], MEANINGS[truth.question]
        remarks.append(f"The scores answer {asked}, the ground truth {known}.")
    if truth.question == "this_run":
        remarks.append("There is no ceiling: the ground truth is this one run, without noise from other seeds.")
    elif truth.runs == 1:
        remarks.append(f"{_ONE_RUN}.")
    else:
        remarks.append(
            "Ceiling: about what a perfect predictor would reach against this ground truth; rough with few runs."
        )
        remarks.append("Another run: what the mean of the other runs reaches against one run.")
    return Group(table, *(Text(remark) for remark in remarks))
