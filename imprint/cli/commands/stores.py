"""Implements `imprint check`, `simulate`, `inspect` and `describe`: making stores and reading them."""

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
from imprint.cli.commands.merging import show_part
from imprint.cli.commands.options import (
    AboutFiles,
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
    PartCount,
    PartCpus,
    PartGpus,
    PartText,
    PlanPairs,
    QueriesString,
    RayAddress,
    RunString,
    SignedBy,
    SourcesString,
    StorePath,
    TaskString,
    TrainingBatch,
    TrainingSteps,
    choose_executor,
)
from imprint.cli.commands.repeating import format_command, merge_with_store
from imprint.cli.comparison import render_ways
from imprint.cli.describing import read_descriptions
from imprint.cli.experiment import NOTE, Experiment, parse_plan
from imprint.cli.inspection import describe_ownership, inspect_recording, inspect_store
from imprint.cli.loading import Objects
from imprint.cli.terminal import (
    console,
    errors,
    escape_markup,
    redirect_prints,
    render_check,
    render_ownership,
    render_recording,
    render_store,
    show_progress,
)
from imprint.display import for_terminal
from imprint.errors import ConfigurationError, ReliabilityWarning
from imprint.recording.header import RECORD
from imprint.store.addresses import is_address, parse_address
from imprint.store.manifest import JOURNAL, MANIFEST
from imprint.store.parts import PART, PartsFolder, Share
from imprint.store.remote import WORK, has_anything, has_file, name_place

_LOADED = ("task", "data", "sources", "collate_fn", "checkpoints", "run")  # what a simulation loads


def _read_experiment(context: typer.Context) -> Experiment:
    """Collect the flags of `check` or `simulate`, and what they leave open from the file of --config."""
    given = context.params
    plain = (
        *("task", "data", "sources", "queries", "run", "batch_size", "dtype", "memory", "hash_data", "device", "out"),
        *("training_steps", "training_batch"),
    )
    experiment = Experiment(
        **{name: given[name] for name in plain if name in given},
        collate_fn=given["collate"],
        checkpoints=tuple(given["checkpoint"] or ()),
        plan=parse_plan(given["plan"] or []),
        about=tuple(given.get("about") or ()),
    )
    return experiment.override_file(given["config"] and Path(given["config"]))


def check(
    context: typer.Context,
    task: TaskString = None,
    data: DataString = None,
    sources: SourcesString = None,
    queries: QueriesString = None,
    checkpoint: CheckpointStrings = None,
    run: RunString = None,
    plan: PlanPairs = None,
    collate: CollateString = None,
    batch_size: BatchSize = None,
    dtype: DtypeName = None,
    memory: MemoryText = None,
    hash_data: HashDataName = None,
    device: DeviceName = None,
    out: Annotated[str | None, typer.Option(help="Where the store will be, to check for free disk space.")] = None,
    training_steps: TrainingSteps = None,
    training_batch: TrainingBatch = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Check whether a simulation will work, what it takes, and whether retraining would be cheaper.

    Tries every engine and readout on a few examples and times a few steps. Shows the selected parameters, the size of
    the store, and the expected time and memory. Where something fails or falls back to a slower method, it shows the
    reason. Writes nothing. Exits with status 1 if the simulation cannot start.

    A last table answers "retrain, replay or simulate?" for this task: what each takes, which question it answers, and
    which is the cheapest. For that, the length of a training must be known: from a recorded run, from a `train` in the
    task's file that is a `Together`, or from `--training-steps` and `--training-batch`.

    For example:

    - `imprint check my_model.py:task`, where `my_model.py` defines `task`, `data` and `sources`

    - `imprint check my_model.py:task -p engine=trajectories -p steps=50 -c epoch-1.safetensors -c epoch-3.safetensors`

    - `imprint check my_model.py:task --training-steps 1000 --training-batch 32`, for a training of 1,000 steps
    """
    experiment = _read_experiment(context)
    with redirect_prints(), show_progress(errors, "checking") as advance:
        objects = Objects(experiment)
        queries_too = objects.queries if objects.has("queries") else None
        found = _check(objects, experiment.out, queries=queries_too, progress=advance, **objects.training)
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(render_check(found))
        console.print(render_ways(found))
    if not found.ok:
        raise typer.Exit(1)


def _check(objects: Objects, out: str | None, **more: Any) -> imprint.Check:
    given = (objects.task, objects.data, objects.sources, objects.plan)
    options: dict[str, Any] = {**objects.options, **more}
    return imprint.check(*given, out=out, **options)


def simulate(
    context: typer.Context,
    task: TaskString = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The folder for the store, or its address in a bucket.")
    ] = None,
    data: DataString = None,
    sources: SourcesString = None,
    checkpoint: CheckpointStrings = None,
    run: RunString = None,
    plan: PlanPairs = None,
    collate: CollateString = None,
    batch_size: BatchSize = None,
    dtype: DtypeName = None,
    memory: MemoryText = None,
    hash_data: HashDataName = None,
    device: DeviceName = None,
    about: AboutFiles = None,
    config: ConfigPath = None,
    manifest: Annotated[
        Path | None,
        typer.Option(
            "--repeat",
            help="Repeat the simulation that made a store, given its folder or manifest.json. The plan and precision "
            "come from the store; give the task, and anything else it names, again.",
        ),
    ] = None,
    checking: Annotated[
        bool, typer.Option("--check/--no-check", help="Run `imprint check` first. Parts are not checked.")
    ] = True,
    part: PartText = None,
    ray: RayAddress = None,
    parts: PartCount = None,
    cpus: PartCpus = 1,
    gpus: PartGpus = 0,
    json: AsJson = False,
) -> None:
    """Simulate the imprint of every source and write the imprints to a store.

    To resume an interrupted simulation, run the same command again; a finished one is left unchanged. A folder made
    with a different plan, model, loss or dataset is refused.

    For example:

    - `imprint simulate my_model.py:task --out runs/news`, where `my_model.py` defines `task`, `data` and `sources`

    - `imprint simulate my_model.py:task --sources per-example -p steps=50 -c epoch-1.safetensors --out runs/each`

    - `imprint simulate digits --out runs/digits`, for a built-in setting, whose model is trained first

    - `imprint simulate my_model.py:task --run runs/train --out runs/news`, to repeat a recorded run without each source

    - `imprint simulate my_model.py:task --about owners.csv --out runs/news`, to keep the owner of each source

    - `imprint simulate --config news.toml`

    - `imprint simulate my_model.py:task --repeat runs/news --out runs/again`, to repeat a simulation bit for bit

    - `imprint simulate my_model.py:task --out runs/news --part 3/8`, for the third of eight parts of the sources

    - `imprint simulate my_model.py:task --out /shared/runs/news --ray auto --gpus 1`, for all parts on a Ray cluster
    """
    executor = choose_executor(ray, part, parts, cpus, gpus)
    experiment = _read_experiment(context)
    recorded = None if manifest is None else imprint.Store(manifest.parent if manifest.is_file() else manifest)
    repeat = recorded if recorded is not None and not experiment.plan and experiment.dtype is None else None
    if recorded is not None:
        if repeat is None:
            errors.print("plan or dtype differs from the store: this is a variation, not a repetition")
        experiment = merge_with_store(experiment, recorded, _LOADED, context)
    folder = experiment.out
    if folder is None:
        raise ConfigurationError("no folder was given for the store: add --out runs/NAME.")
    if has_file(folder, MANIFEST):
        errors.print(f"{escape_markup(name_place(folder))} is complete; only checking that it matches", soft_wrap=True)
    with redirect_prints():
        objects = Objects(experiment, None if part is None else Share.parse(part))
        _ = objects.task  # which sets the number of threads
    if repeat is not None:
        _use_threads_of(repeat)
    note: dict[str, Any] = {"command": experiment.to_json()}
    shown: tuple[str, ...] = ()
    if part is not None:
        note["line"] = format_command(context)
    elif checking and not has_anything(folder):
        with redirect_prints(), show_progress(errors, "checking") as advance:
            found = _check(objects, folder, compare=False, progress=advance)
        errors.print(render_check(found))
        if not found.ok:
            raise typer.Exit(1)
        assert found.estimate is not None
        shown = found.warnings
        note["estimate"] = {"seconds": found.estimate.seconds, "peak_bytes": found.estimate.peak_bytes}
    with (
        redirect_prints(),
        _silence(shown),
        _explain_interruption(_find_workspace(folder, part)),
        show_progress(errors, "simulating") as advance,
    ):
        known = (objects.task, objects.data, objects.sources, objects.plan)
        options: dict[str, Any] = {"out": folder, "note": {NOTE: note}, "repeat": repeat, "progress": advance}
        options |= objects.options
        if part is None:
            made: imprint.Store | imprint.Part = imprint.simulate(*known, **options, executor=executor)
        else:
            made = imprint.simulate_part(part, *known, **options)
    if isinstance(made, imprint.Part):
        show_part(made, Path(folder), json=json)
    elif json:
        typer.echo(dumps(inspect_store(made)))
    else:  # warnings were shown as they came up
        console.print(render_store({**inspect_store(made), "warnings": []}))


@contextmanager
def _silence(shown: Iterable[str]) -> Iterator[None]:
    """Suppress warnings that were shown before."""
    with warnings.catch_warnings():
        for message in shown:
            warnings.filterwarnings("ignore", re.escape(for_terminal(message)), ReliabilityWarning)
        yield


def _use_threads_of(store: imprint.Store) -> None:
    """Use as many threads as the store was made with, unless that is absurd on this machine."""
    threads, most = store.manifest.execution.threads, max(64, 4 * (os.cpu_count() or 1))
    if threads <= most:
        torch.set_num_threads(threads)
    else:
        errors.print(
            f"the store was made with {threads:,} threads, more than the {most} allowed here: imprints may differ in "
            "their last digits",
            soft_wrap=True,
        )


def _find_workspace(out: str, part: str | None) -> Path:
    """Return the folder that this process writes to."""
    if part is not None:
        return PartsFolder(out).of(Share.parse(part))
    return parse_address(out).cache / WORK if is_address(out) else Path(out)


@contextmanager
def _explain_interruption(out: Path) -> Iterator[None]:
    """Say that an interrupted simulation has nothing to resume from; otherwise the library explains how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        if not any(out.rglob(JOURNAL)) and not any(out.rglob(PART)):
            errors.print("stopped before the first sources were finished: the same command will start over")
        raise


def inspect(store: StorePath, signed_by: SignedBy = None, json: AsJson = False) -> None:
    """Show what a store holds: its plan, sources, sizes, and the figures measured during the simulation.

    Of a recorded run, show its steps, optimiser and checkpoints.

    For example: `imprint inspect runs/news`
    """
    recorded = has_file(store, RECORD) and not has_file(store, MANIFEST)
    values = inspect_recording(store) if recorded else inspect_store(imprint.Store(store, signed_by=signed_by))
    if json:
        typer.echo(dumps(values))
    else:
        console.print(render_recording(values) if recorded else render_store(values))


def describe(
    store: StorePath,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="[SOURCE=]FILE...",
            help="Tables (`.csv`, `.json`) with the columns source, owner, licence and url, or Croissant files, which "
            "describe one source each. `SOURCE=FILE` where the dataset has another name than the source.",
        ),
    ],
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Set the owner, licence and address of a store's sources.

    Sources are named by their ids, or by names that only one has. Those in no file keep what is known of them, and an
    empty row removes it. The store keeps what was known before. Imprints, validation and logs stay as they are, but a
    signature covers descriptions: sign the store again.

    For example: `imprint describe runs/news owners.csv`, or `imprint describe runs/news times=croissant.json`
    """
    opened = imprint.Store(store, signed_by=signed_by)
    opened.describe(read_descriptions(files))
    values = describe_ownership(opened)
    if json:
        typer.echo(dumps({"path": opened.place, **values}))
    else:
        console.print(f"{escape_markup(opened.place)}: {escape_markup(render_ownership(values))}", soft_wrap=True)
