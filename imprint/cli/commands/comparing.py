"""Implements `imprint compare`: what changed between two versions of a model."""

import csv
import warnings
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.changes import render_changes
from imprint.cli.commands.options import (
    AsJson,
    CollateString,
    DeviceName,
    MemoryText,
    QueriesString,
    ReadoutName,
    SignedBy,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints, show_progress
from imprint.cli.writing import check_output
from imprint.display import for_csv
from imprint.errors import ConfigurationError, ReliabilityWarning
from imprint.store.files import write

_SAVED = ".safetensors"


def compare(
    context: typer.Context,
    first: Annotated[Path, typer.Argument(help="The earlier version: a saved attribution, or a store's folder.")],
    second: Annotated[Path, typer.Argument(help="The later version: a saved attribution, or a store's folder.")],
    task: StoreTask = None,
    second_task: Annotated[
        str | None,
        typer.Option(
            "--second-task",
            metavar="FILE.py:NAME",
            help="The task of the later store, where it is another one. Default: that of `--task`.",
        ),
    ] = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    readout: ReadoutName = None,
    memory: MemoryText = None,
    device: DeviceName = None,
    top: Annotated[int, typer.Option(min=1, help="How many sources to show, and to compare for each query.")] = 5,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all sources to a `.csv` file.", dir_okay=False)
    ] = None,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Show what changed between two versions of a model: whose ranks are stable, who gained and who lost.

    Both versions are attributed on the same queries: give the files that `imprint attribute --out FILE.safetensors`
    wrote, or two stores and the tasks to read them with. Sources are matched by their ids.

    A source gained or lost only if its mean effect differs beyond what queries and training runs do by chance, for all
    sources together. That takes stores with checkpoints of several runs each, or replays; otherwise nothing is claimed.

    For example:

    - `imprint compare june.safetensors july.safetensors`

    - `imprint compare runs/june runs/july --task june.py:task --second-task july.py:task --queries june.py:queries`
    """
    check_output(out, ".csv")
    for_stores = {"task": task, "queries": queries, "collate": collate, "readout": readout, "memory": memory}
    for_stores |= {"device": device}
    _refuse_for_saved(for_stores, first, second)
    _refuse_for_saved({"second-task": second_task}, second)
    results = []
    for place, task_of in ((first, task), (second, second_task or task)):
        if _is_saved(place):
            _refuse_for_saved({"signed-by": signed_by}, place)
            results.append(imprint.Attribution.load(place))
            continue
        given = Experiment(task=task_of, queries=queries, collate_fn=collate, memory=memory, device=device)
        results.append(_attribute(imprint.Store(place, signed_by=signed_by), given, readout, context, quiet=not json))
    found = imprint.compare(*results, k=top)
    if out is not None:
        _write_rows(found, out)
        errors.print(f"all sources written to [bold]{escape_markup(out)}[/bold]")
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(render_changes(found, top))


def _is_saved(place: Path) -> bool:
    """Tell whether a path is that of a saved attribution, and not of a store."""
    return place.is_file() or place.suffix == _SAVED


def _refuse_for_saved(options: dict[str, Any], *places: Path) -> None:
    """Refuse options for stores where all of these are saved attributions, which have their scores already."""
    given = [name for name, value in options.items() if value is not None]
    if given and all(map(_is_saved, places)):
        listed = " and ".join(map(str, places))
        are = "is a saved attribution" if len(places) == 1 else "are saved attributions"
        raise ConfigurationError(f"--{given[0]} is for stores, and {listed} {are}: omit it.")


def _attribute(
    store: imprint.Store, given: Experiment, readout: Any, context: typer.Context, *, quiet: bool
) -> imprint.Attribution:
    """Attribute the queries of a task's file, or those that were named, with a store."""
    if given.task is None:
        given = merge_with_store(given, store, ("task", "queries", "collate_fn"), context)
    with redirect_prints(), warnings.catch_warnings(), show_progress(errors, "attributing") as advance:
        if quiet:  # what is shown has the warnings
            warnings.simplefilter("ignore", ReliabilityWarning)
        objects = Objects(given)
        return imprint.attribute(
            *(objects.task, store, objects.queries),
            readout=readout,
            collate_fn=objects.query_collate_fn,
            memory=given.memory,
            progress=advance,
        )


def _write_rows(found: imprint.Changes, out: Path) -> None:
    rows = found.to_json()["sources"]

    def fill(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({name: for_csv(value) for name, value in row.items()} for row in rows)

    write(out, fill)
