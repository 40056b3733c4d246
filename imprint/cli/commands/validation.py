"""Implements `imprint validate`: compares the effects that a store predicts with removals that are really made."""

from json import dumps
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.options import (
    AsJson,
    CollateString,
    ConfigPath,
    DataString,
    DeviceName,
    MemoryText,
    QueriesString,
    RunString,
    SourcesString,
    StorePath,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.commands.retraining import find_record
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, redirect_prints, render_comparison, show_progress
from imprint.evaluation.together import Together

_NAMES = ("task", "data", "sources", "queries", "collate_fn")


def validate(
    context: typer.Context,
    store: StorePath,
    task: StoreTask = None,
    queries: QueriesString = None,
    data: DataString = None,
    sources: SourcesString = None,
    collate: CollateString = None,
    run: RunString = None,
    runs: Annotated[
        int, typer.Option(min=1, help="How many training runs to compare with, for a store of `expected`.")
    ] = 3,
    removals: Annotated[int, typer.Option(min=2, help="How many removals to make in each run.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the removals and of the training runs.")] = 0,
    memory: MemoryText = None,
    device: DeviceName = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Compare the effects that a store predicts with removals that are really made, and keep the outcome in the store.

    A store that repeats a recorded run (`this_run`) is compared with the run repeated without sets of 2 to 4 sources;
    give the run with --run. A store that was simulated from checkpoints (`expected`) is compared with training runs of
    several seeds, each repeated without single sources; your file needs a function `record(seed, folder)`, or a
    `Together` called `train`.

    The outcome is *sizes validated*, *ranks validated*, *failed* or *undecided* (with fewer than 20 queries). From then
    on `imprint inspect`, `attribute` and every result show it. An interrupted command resumes when you run it again.

    For example:

    - `imprint validate runs/news --task my_model.py:task --run runs/train`

    - `imprint validate runs/expected --task my_model.py:task --runs 5`
    """
    opened = imprint.Store(store)
    named: dict[str, Any] = {"task": task, "data": data, "sources": sources, "queries": queries, "collate_fn": collate}
    given = Experiment(**named, run=run, memory=memory, device=device).override_file(config)
    if given.task is None:
        given = merge_with_store(given, opened, _NAMES, context)
    with redirect_prints(), show_progress(errors, "validating") as advance:
        objects = Objects(given)
        found = imprint.validate(
            opened,
            objects.queries,
            task=objects.task,
            data=objects.data,
            sources=objects.sources,
            run=objects.run,
            record=_find_training(objects) if opened.question == "expected" else None,
            runs=runs,
            removals=removals,
            seed=seed,
            collate_fn=objects.examples_collate_fn,
            memory=given.memory,
            progress=advance,
        )
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(render_comparison(found))


def _find_training(objects: Objects) -> Any:
    """Find what trains and records a run: a `Together` that is called `train`, or the function `record`."""
    found = objects.find_optional("train")
    return found if isinstance(found, Together) else find_record(objects, objects.module)
