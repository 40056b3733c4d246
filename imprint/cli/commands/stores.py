"""`imprint check`, `simulate`, `attribute`, `inspect` and `verify`: making stores and reading them."""

import csv
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import imprint
from imprint.cli.commands.options import (
    AsJson,
    BatchSize,
    CheckpointStrings,
    CollateString,
    ConfigPath,
    DataString,
    DeviceName,
    DtypeName,
    HashDataName,
    MemoryText,
    PlanPairs,
    QueriesString,
    ReadoutName,
    SourcesString,
    StorePath,
    StoreTask,
    TaskString,
)
from imprint.cli.commands.repeating import over_store
from imprint.cli.experiment import NOTE, Experiment, plan_values
from imprint.cli.inspection import inspected
from imprint.cli.loading import Objects
from imprint.cli.terminal import (
    console,
    errors,
    marked,
    progress,
    shown_check,
    shown_mean,
    shown_store,
    shown_top,
    working,
)
from imprint.display import for_csv, for_terminal
from imprint.errors import ConfigurationError, ReliabilityWarning, StoreError
from imprint.store.files import write
from imprint.store.manifest import JOURNAL, MANIFEST

_NAMED = ("task", "data", "sources", "collate_fn", "checkpoints")  # what a simulation loads


def check(
    task: TaskString = None,
    data: DataString = None,
    sources: SourcesString = None,
    queries: QueriesString = None,
    checkpoint: CheckpointStrings = None,
    plan: PlanPairs = None,
    collate: CollateString = None,
    batch_size: BatchSize = None,
    dtype: DtypeName = None,
    memory: MemoryText = None,
    hash_data: HashDataName = None,
    device: DeviceName = None,
    out: Annotated[str | None, typer.Option(help="Where the store will be: its disk is measured.")] = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Will it work, and what will it take? Tries every engine and readout, and measures a few steps.

    Shows the selected parameters, bytes per source and in all, the time and memory to expect, and the reason wherever
    something falls back or fails. Nothing stays on disk. Leaves with 1 if the simulation could not begin.

    For example:

    - `imprint check my_model.py:task`, where `my_model.py` has `task`, `data` and `sources`

    - `imprint check my_model.py:task -p engine=trajectories -p steps=50 -c epoch-1.safetensors -c epoch-3.safetensors`
    """
    experiment = Experiment(
        task=task,
        data=data,
        sources=sources,
        queries=queries,
        collate_fn=collate,
        checkpoints=tuple(checkpoint or ()),
        plan=plan_values(plan or []),
        batch_size=batch_size,
        dtype=dtype,
        memory=memory,
        hash_data=hash_data,
        device=device,
        out=out,
    ).over_file(config)
    with working(), errors.status("loading and measuring"):
        objects = Objects(experiment)
        queries_too = objects.queries if objects.has("queries") else None
        found = _checked(objects, experiment.out, queries_too)
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(shown_check(found))
    if not found.ok:
        raise typer.Exit(1)


def _checked(objects: Objects, out: str | None, queries: Any = None) -> imprint.Check:
    given = (objects.task, objects.data, objects.sources, objects.plan)
    return imprint.check(*given, queries=queries, out=out, **objects.options)


def simulate(
    context: typer.Context,
    task: TaskString = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder of the store.")] = None,
    data: DataString = None,
    sources: SourcesString = None,
    checkpoint: CheckpointStrings = None,
    plan: PlanPairs = None,
    collate: CollateString = None,
    batch_size: BatchSize = None,
    dtype: DtypeName = None,
    memory: MemoryText = None,
    hash_data: HashDataName = None,
    device: DeviceName = None,
    config: ConfigPath = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Replay a store: its folder or manifest.json. Plan and precision come from it; the task, and whatever "
            "else it names, is repeated here.",
        ),
    ] = None,
    checking: Annotated[bool, typer.Option("--check/--no-check", help="Check and estimate first.")] = True,
    json: AsJson = False,
) -> None:
    """Simulate the imprint of every source and keep them in a store.

    A simulation that was killed or interrupted goes on where it stood when the same command is given again; a finished
    one is left as it is. Another plan, model, loss or dataset on the same folder is refused.

    For example:

    - `imprint simulate my_model.py:task --out runs/news`, where `my_model.py` has `task`, `data` and `sources`

    - `imprint simulate my_model.py:task --sources per-example -p steps=50 -c epoch-1.safetensors --out runs/each`

    - `imprint simulate digits --out runs/digits`, a ready-made setting, whose model is trained first

    - `imprint simulate --config news.toml`

    - `imprint simulate my_model.py:task --from runs/news --out runs/again`, which repeats a run to the bit
    """
    experiment = Experiment(
        task=task,
        data=data,
        sources=sources,
        collate_fn=collate,
        checkpoints=tuple(checkpoint or ()),
        plan=plan_values(plan or []),
        batch_size=batch_size,
        dtype=dtype,
        memory=memory,
        hash_data=hash_data,
        device=device,
        out=out,
    ).over_file(config)
    recorded = None if manifest is None else imprint.Store(manifest.parent if manifest.is_file() else manifest)
    replay = recorded if recorded is not None and not experiment.plan and experiment.dtype is None else None
    if recorded is not None:
        if replay is None:
            errors.print("a variation of the store, no replay: its plan or dtype is given anew")
        experiment = over_store(experiment, recorded, _NAMED, context)
    if experiment.out is None:
        raise ConfigurationError("no folder for the store is given: --out runs/NAME.")
    if (Path(experiment.out) / MANIFEST).is_file():
        errors.print(f"{marked(experiment.out)} is complete already; it is only compared", soft_wrap=True)
    with working():
        objects = Objects(experiment)
        _ = objects.task  # which sets the number of threads
    if replay is not None:
        _take_threads(replay)
    note: dict[str, Any] = {"command": experiment.to_json()}
    shown: tuple[str, ...] = ()
    if checking and not Path(experiment.out).exists():
        with working(), errors.status("loading and measuring"):
            found = _checked(objects, experiment.out)
        errors.print(shown_check(found))
        if not found.ok:
            raise typer.Exit(1)
        assert found.estimate is not None
        shown = found.warnings
        note["estimate"] = {"seconds": found.estimate.seconds, "peak_bytes": found.estimate.peak_bytes}
    with working(), _silent(shown), _interruptible(Path(experiment.out)), progress(errors, "simulating") as advance:
        store = imprint.simulate(
            objects.task,
            objects.data,
            objects.sources,
            objects.plan,
            out=experiment.out,
            note={NOTE: note},
            replay=replay,
            progress=advance,
            **objects.options,
        )
    if json:
        typer.echo(dumps(inspected(store)))
    else:  # each warning was shown when it came up
        console.print(shown_store({**inspected(store), "warnings": []}))


@contextmanager
def _silent(shown: Iterable[str]) -> Iterator[None]:
    """Leave out warnings that were shown already."""
    with warnings.catch_warnings():
        for message in shown:
            warnings.filterwarnings("ignore", re.escape(for_terminal(message)), ReliabilityWarning)
        yield


def _take_threads(store: imprint.Store) -> None:
    """Compute with as many threads as a store was made with, if this machine can be asked for so many."""
    threads, most = store.manifest.execution.threads, max(64, 4 * (os.cpu_count() or 1))
    if threads <= most:
        torch.set_num_threads(threads)
    else:
        errors.print(
            f"the store was made with {threads:,} threads, and at most {most} are used here: imprints may differ in "
            "their last digits",
            soft_wrap=True,
        )


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Say what becomes of a simulation that is interrupted; where it can go on, the library says so itself."""
    try:
        yield
    except KeyboardInterrupt:
        if not (out / JOURNAL).exists():
            errors.print("stopped before a first part was finished: the same command again starts over")
        raise


def attribute(
    context: typer.Context,
    store: StorePath,
    task: StoreTask = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    top: Annotated[int, typer.Option(min=1, help="How many sources to show for each query.")] = 5,
    by: Annotated[str, typer.Option(help="Order: `magnitude`, or whose removal `raises` or `lowers` F.")] = "magnitude",
    readout: ReadoutName = "jvp",
    batch_size: Annotated[int, typer.Option(min=1, help="Queries evaluated at once.")] = 64,
    memory: MemoryText = None,
    device: DeviceName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all scores: `.csv`, or `.safetensors`.", dir_okay=False)
    ] = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """How much does each source of a store move each query? Read out with forward passes only.

    Effects are predicted changes of the measurement if the source were removed; the table says what it is measured in
    and which sign means that the source helps.

    For example:

    - `imprint attribute runs/news --task my_model.py:task`

    - `imprint attribute runs/news --task my_model.py:task --queries other.py:queries --top 3 --json`

    - `imprint attribute runs/digits --out scores.csv`, of a ready-made setting, which needs no task
    """
    if out is not None and out.suffix not in (".csv", ".safetensors"):
        raise ConfigurationError(f"{out}: scores are written as .csv or .safetensors.")
    if out is not None and not out.parent.is_dir():
        raise StoreError(f"could not write {out}: there is no folder {out.parent}.")
    opened = imprint.Store(store)
    given = Experiment(task=task, queries=queries, collate_fn=collate, memory=memory, device=device).over_file(config)
    if given.task is None:
        given = over_store(given, opened, ("task", "queries", "collate_fn"), context)
    with working(), warnings.catch_warnings(), progress(errors, "attributing") as advance:
        if not json:  # the table shows them
            warnings.simplefilter("ignore", ReliabilityWarning)
        objects = Objects(given)
        options: Any = {
            "readout": readout,
            "by": by,
            "batch_size": batch_size,
            "memory": given.memory,
            "collate_fn": objects.query_collate_fn,
        }
        result = imprint.attribute(objects.task, opened, objects.queries, progress=advance, **options)
    first = result.top(top, options["by"])
    if out is not None:
        _write_scores(result, out)
        errors.print(f"all scores: [bold]{marked(out)}[/bold]")
    if json:
        typer.echo(dumps(first.to_json()))
    else:
        console.print(shown_mean(result.mean().top(top, options["by"])), shown_top(first))


def _write_scores(result: imprint.Attribution, out: Path) -> None:
    if out.suffix == ".safetensors":
        result.save(out)
        return

    def fill(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(imprint.Credit._fields)
            for credits in result.top(result.scores.shape[1]):
                writer.writerows(map(for_csv, credit) for credit in credits)

    write(out, fill)


def inspect(store: StorePath, json: AsJson = False) -> None:
    """Show what a store holds: plan, sources, sizes, and the figures measured while it was made.

    For example: `imprint inspect runs/news`
    """
    values = inspected(imprint.Store(store))
    if json:
        typer.echo(dumps(values))
    else:
        console.print(shown_store(values))


def verify(store: StorePath, json: AsJson = False) -> None:
    """Check every file of a store against its checksum. Leaves with 1 if one is damaged or missing.

    For example: `imprint verify runs/news`
    """
    opened = imprint.Store(store)
    opened.verify()
    if json:
        typer.echo(dumps({"path": str(opened.path), "bytes": opened.bytes, "sound": True}))
    else:
        text = f"{marked(opened.path)}: all files are as they were written ({opened.bytes:,} bytes)."
        console.print(text, soft_wrap=True)
