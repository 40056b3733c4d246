"""Implements `imprint evaluate`: how close scores come to ground truth."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.options import AsJson, CollateString, QueriesString, SignedBy, StoreTask
from imprint.cli.commands.repeating import format_command, merge_with_store
from imprint.cli.commands.retraining import is_truth
from imprint.cli.experiment import Experiment
from imprint.cli.ground_truth import render_metrics
from imprint.cli.loading import Objects
from imprint.cli.terminal import (
    console,
    errors,
    escape_markup,
    redirect_prints,
    show_progress,
)
from imprint.errors import ConfigurationError
from imprint.evaluation.metrics import evaluate as evaluate_scores
from imprint.evaluation.reports.page import Preface, check_place, write_report
from imprint.evaluation.truth import Truth
from imprint.store.manifest import MANIFEST
from imprint.store.remote import has_file, name_place


def evaluate(
    context: typer.Context,
    store: Annotated[
        Path,
        typer.Argument(
            help="A store's folder, or a `.safetensors` file of scores from `imprint attribute --out` or `result.save`."
        ),
    ],
    truth: Annotated[Path, typer.Argument(help="A folder of ground truth, from `imprint retrain`.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    readout: Annotated[
        str | None,
        typer.Option(
            help="How to read out scores: `jvp` (the default), `central`, `literal`, `gradient`; `removed` of replays.",
            show_default=False,
        ),
    ] = None,
    across: Annotated[
        bool,
        typer.Option(
            "--across",
            help="Compare scores of one question with ground truth of the other, refused by default.",
        ),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE.html",
            help="Also write the comparison as a page: a verdict in words, every source, plots and single queries.",
            show_default=False,
        ),
    ] = None,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Compare scores with ground truth, and with the best that any scores could achieve.

    The metrics depend on what the models were retrained on. Random halves give the linear datamodelling score (LDS);
    removed sources give the correlation, rank correlation and slope; removed examples give the leave-one-out
    correlation. Each metric comes with a 95% interval over queries (over runs and queries, if there are several runs),
    and with the ceiling set by the noise of retraining. Writes nothing, unless you ask for a page with `--report`: it
    says in words what was asked, how well predictions agree with real removals and what to do next, and shows sources
    and single queries. Queries that are images are shown as such; `query_pictures`, `query_texts` and `query_labels` in
    the task's file show others.

    Scores and ground truth answer one of two questions: what a removal does to the model of this very run
    (`this_run`), or to models trained like it on average (`expected`). Scores of one question are compared with ground
    truth of the other only with `--across`.

    The queries must be the same as those of the ground truth, in the same order. To scale effects to the sizes seen in
    retraining, use `result.calibrate(truth)` in Python.

    For example:

    - `imprint evaluate runs/news truth/news --task my_model.py:task`

    - `imprint evaluate runs/news truth/news --task my_model.py:task --report news.html`

    - `imprint evaluate scores.safetensors truth/news`
    """
    _refuse_wrong_paths(store, truth)
    if report is not None:
        check_place(report)
    known, opened = Truth.load(truth), None
    named = Experiment(task=task, queries=queries, collate_fn=collate)
    if store.suffix == ".safetensors":
        _refuse_unused(store, named, readout, report)
        result, objects = imprint.Attribution.load(store), Objects(named) if task is not None else None
    else:
        opened = imprint.Store(store, signed_by=signed_by)
        result, objects = _attribute(opened, named, readout, context)
    metrics = evaluate_scores(result, known, across=across)
    if report is not None:
        _write_page(report, result, known, objects, store=opened, across=across, command=format_command(context))
    if json:
        found = {"truth": str(truth), "question": known.question, "metrics": [metric.to_json() for metric in metrics]}
        typer.echo(dumps(found if report is None else {**found, "report": str(report)}))
        return
    console.print(render_metrics(metrics, known))
    if report is not None:
        console.print(f"Report: [bold]{escape_markup(report)}[/bold]", soft_wrap=True)


def _refuse_unused(scores: Path, named: Experiment, readout: str | None, report: Path | None) -> None:
    """Refuse options that a file of finished scores does not need; a report may show the queries of a task."""
    shown = {"--task": named.task, "--queries": named.queries}
    given = {**(shown if report is None else {}), "--collate": named.collate_fn, "--readout": readout}
    if unused := [option for option, value in given.items() if value is not None]:
        raise ConfigurationError(f"{scores} holds finished scores, which need no {' or '.join(unused)}: omit it.")
    if named.queries is not None and named.task is None:
        raise ConfigurationError("--queries shows the queries of a task: name it with --task FILE.py:NAME.")


def _write_page(
    place: Path, result: imprint.Attribution, truth: Truth, objects: Objects | None, *, command: str, **options: Any
) -> None:
    """Write the report, with what the task's file says about showing its queries."""
    with redirect_prints():
        shown = {} if objects is None else {"queries": objects.queries, "illustrations": objects.illustrations}
        write_report(result, truth, place, **shown, **options, preface=Preface(command=command))


def _refuse_wrong_paths(store: Path, truth: Path) -> None:
    """Refuse arguments of `evaluate` that are swapped, or not a store and a ground truth."""
    first, second = name_place(store), name_place(truth)
    if store.suffix == ".csv":
        raise ConfigurationError(
            f"{first} is a table, which does not record what its scores belong to: give the store, or the file written "
            "by `imprint attribute STORE --out scores.safetensors`."
        )
    is_scores = truth.suffix == ".safetensors"
    if is_truth(store) and (is_scores or _is_store(truth)):
        raise ConfigurationError(f"{first} is a ground truth and comes second: imprint evaluate {second} {first}.")
    if is_truth(store):
        raise ConfigurationError(f"{first} is a ground truth: the first argument must be a store, or a file of scores.")
    if is_scores or _is_store(truth):
        raise ConfigurationError(
            f"{second} {'holds scores' if is_scores else 'is a store'}: the second argument must be a ground truth, "
            "from `imprint retrain`."
        )


def _is_store(path: Path) -> bool:
    return has_file(path, MANIFEST)


def _attribute(
    store: imprint.Store, given: Experiment, readout: Any, context: typer.Context
) -> tuple[imprint.Attribution, Objects]:
    """Read out the scores of the queries; return them, and what the task's file holds."""
    if given.task is None:
        given = merge_with_store(given, store, ("task", "queries", "collate_fn"), context)
    with redirect_prints(), show_progress(errors, "attributing") as advance:
        objects = Objects(given)
        result = imprint.attribute(
            objects.task,
            store,
            objects.queries,
            readout=readout,
            collate_fn=objects.query_collate_fn,
            progress=advance,
        )
    return result, objects
