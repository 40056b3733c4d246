"""Implements `imprint update` and `drop`: stores whose sources change."""

import os
from json import dumps
from typing import Annotated

import typer

import imprint
from imprint.cli.commands.options import (
    AboutFiles,
    AsJson,
    CheckpointStrings,
    CollateString,
    DataString,
    DeviceName,
    MemoryText,
    PlanPairs,
    RunString,
    SignedBy,
    SourcesString,
    StorePath,
    TaskString,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment, parse_plan
from imprint.cli.inspection import inspect_store
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, redirect_prints, render_store, show_progress

_LOADED = ("task", "data", "sources", "collate_fn", "checkpoints", "run")


def update(
    context: typer.Context,
    store: StorePath,
    task: TaskString = None,
    data: DataString = None,
    sources: SourcesString = None,
    checkpoint: CheckpointStrings = None,
    run: RunString = None,
    plan: PlanPairs = None,
    collate: CollateString = None,
    drop: Annotated[
        bool, typer.Option("--drop", help="Drop sources of the store that are not among those given.")
    ] = False,
    memory: MemoryText = None,
    device: DeviceName = None,
    about: AboutFiles = None,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Bring a store up to date: simulate sources that are new or have changed, or further checkpoints, and no others.

    Give the task, data and checkpoints that the store was made from, with all sources that it is to have now. The
    result is what simulating them anew would make. Other training data is refused: it changes every imprint. Until the
    update is complete, the store is read as it was; to resume an interrupted update, run the same command again.
    Validate and sign the store again afterwards.

    For example:

    - `imprint update runs/news my_model.py:task`, after `sources` in `my_model.py` has grown

    - `imprint update runs/news my_model.py:task --drop`, after a source was split into others, or removed

    - `imprint update runs/news my_model.py:task -c epoch-1.safetensors -c epoch-2.safetensors`, to add a checkpoint
    """
    opened = imprint.Store(store, signed_by=signed_by)
    given = Experiment(
        task=task,
        data=data,
        sources=sources,
        run=run,
        memory=memory,
        device=device,
        collate_fn=collate,
        checkpoints=tuple(checkpoint or ()),
        plan=parse_plan(plan or []),
        about=tuple(about or ()),
    )
    experiment = merge_with_store(given, opened, _LOADED, context)
    with redirect_prints():
        objects = Objects(experiment)
        known = (objects.task, objects.data, objects.sources)
    names = ("checkpoints", "run", "collate_fn", "device", "memory")
    options = {name: value for name, value in objects.options.items() if name in names}
    with redirect_prints(), show_progress(errors, "simulating") as advance:
        made = imprint.update(store, *known, plan=objects.plan, drop=drop, progress=advance, **options)
    _show(made, json=json)


def drop(
    store: StorePath,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Ids of sources, or names that only one source has.")
    ],
    erase: Annotated[
        bool,
        typer.Option(
            "--erase",
            help="Remove the files with their imprints at once. By default they stay until the next change, for "
            "whoever has the store open.",
        ),
    ] = False,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Drop sources from a store. Neither the task nor the data is needed.

    The training data stays what it was: a dropped source was trained on, and gets no more credit. Validate and sign
    the store again afterwards.

    For example: `imprint drop runs/news times post`
    """
    imprint.Store(store, signed_by=signed_by)
    with show_progress(errors, "writing") as advance:
        made = imprint.drop(os.fspath(store), sources, erase=erase, progress=advance)
    _show(made, json=json)


def _show(store: imprint.Store, *, json: bool) -> None:
    values = inspect_store(store)
    if json:
        typer.echo(dumps(values))
    else:
        console.print(render_store({**values, "warnings": []}))
