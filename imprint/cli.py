"""The command line, `imprint`.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 refused or failed, with a
message, 2 a wrong command line, 130 interrupted.
"""

import csv
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

import imprint
from imprint.errors import ConfigurationError, ImprintError, StoreError
from imprint.store import JOURNAL

app = typer.Typer(
    help="How much does each data source move this prediction? Answered with forward passes only.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
console = Console()
errors = Console(stderr=True)


def _version(asked: bool) -> None:
    if asked:
        console.print(f"imprint {imprint.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


TaskString = Annotated[
    str | None,
    typer.Argument(metavar="FILE.py:NAME", help="The task: an `imprint.Task`, or a function returning one."),
]
DataString = Annotated[
    str | None, typer.Option("--data", metavar="FILE.py:NAME", help="Training data. Default: `data` beside the task.")
]
SourcesString = Annotated[
    str | None,
    typer.Option(
        "--sources",
        metavar="FILE.py:NAME",
        help="An `imprint.Sources`, or `per-example`. Default: `sources` beside the task.",
    ),
]
QueriesString = Annotated[
    str | None, typer.Option("--queries", metavar="FILE.py:NAME", help="Default: `queries` beside the task.")
]
CollateString = Annotated[
    str | None,
    typer.Option(
        "--collate", metavar="FILE.py:NAME", help="A collate function. Default: `collate_fn` beside the task, if any."
    ),
]
CheckpointStrings = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="FILE",
        help="A `.safetensors` file (repeat for several), or the import string of a list of state dicts. "
        "Default: `checkpoints` beside the task, else the model as it is.",
    ),
]
PlanPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        "-p",
        metavar="NAME=VALUE",
        help="A field of the plan, such as `steps=100`, `engine=trajectories` or `lr=0.1`; with commas one value for "
        "each checkpoint. Over `plan` beside the task, if there is one.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Examples evaluated at once: memory and speed only.")]
DtypeName = Annotated[str | None, typer.Option("--dtype", help="Of stored imprints: float32, bfloat16 or float64.")]
MemoryText = Annotated[str | None, typer.Option("--memory", help='What may be used, such as "4GiB".')]
DeviceName = Annotated[str | None, typer.Option("--device", help="Where the model is put, such as `cuda`.")]
ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file of settings; flags go over it.", dir_okay=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
StorePath = Annotated[Path, typer.Argument(help="Folder of a store.")]


def _experiment(config: Path | None, **flags: Any) -> Any:
    """The flags of a command over its configuration file."""
    from imprint.experiment import Experiment, plan_values

    plan, checkpoints = plan_values(flags.pop("plan", None) or []), tuple(flags.pop("checkpoints", None) or ())
    given = Experiment(plan=plan, checkpoints=checkpoints, **flags)
    return given if config is None else given.over(Experiment.from_toml(config))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report and its pictures.")] = Path("imprint-demo"),
    split: Annotated[int, typer.Option(min=0, help="Which division of the digits among the contributors.")] = 0,
    retrainings: Annotated[int, typer.Option(min=2, help="How often to retrain without each contributor.")] = 24,
    json: AsJson = False,
) -> None:
    """Credit twelve contributors of handwritten digits, then check it by really removing them.

    Trains a small model, simulates the imprint of every contributor, predicts what removing each of them would do to
    held-out predictions, and retrains without each to compare. Takes about a minute on two cores and writes
    `imprint-demo/report.html`.

    For example: `imprint demo --split 3 --out runs/demo-3`
    """
    from imprint.demo.experiment import run
    from imprint.demo.report import rows, statistics, write
    from imprint.terminal import shown_demo

    if out.exists() and not out.is_dir():
        raise StoreError(f"{out} is a file: give a folder for the report.")
    errors.print("[bold]Twelve contributors, one of whom mislabels. Who moved which prediction?[/bold]")
    outcome = run(split, retrainings, say=lambda text: errors.print(f"  {text}", style="dim"))
    page = write(outcome, out)
    if json:
        contributors = [asdict(row) for row in rows(outcome)]
        typer.echo(dumps({"report": str(page), "contributors": contributors, "statistics": statistics(outcome)}))
        return
    console.print(shown_demo(rows(outcome), statistics(outcome)))
    console.print(f"Report: [bold]{escape(str(page))}[/bold]")


@app.command()
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
    device: DeviceName = None,
    out: Annotated[str | None, typer.Option(help="Where the store will be: its disk is measured.")] = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Will it work, and what will it take? Tries every engine and readout, and measures a few steps.

    Shows the selected parameters, bytes per source and in all, the time and memory to expect, and the reason wherever
    something falls back or fails. Nothing is written. Leaves with 1 if the simulation could not begin.

    For example:

    - `imprint check my_model.py:task`, where `my_model.py` has `task`, `data` and `sources`

    - `imprint check my_model.py:task -p engine=trajectories -p steps=50 -c epoch-1.safetensors -c epoch-3.safetensors`
    """
    from imprint.loading import Objects
    from imprint.terminal import shown_check

    flags = {
        **{"task": task, "data": data, "sources": sources, "queries": queries, "checkpoints": checkpoint, "plan": plan},
        **{"collate_fn": collate, "batch_size": batch_size, "dtype": dtype, "memory": memory, "device": device},
    }
    experiment = _experiment(config, **flags, out=out)
    with errors.status("loading and measuring"):
        found = _checked(Objects(experiment), experiment.out)
    if json:
        typer.echo(dumps(found.to_json()))
    else:
        console.print(shown_check(found))
    if not found.ok:
        raise typer.Exit(1)


def _checked(objects: Any, out: str | None) -> imprint.Check:
    queries = objects.queries if objects.has("queries") else None
    return imprint.check(
        objects.task, objects.data, objects.sources, objects.plan, queries=queries, out=out, **objects.options
    )


@app.command()
def simulate(
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
    device: DeviceName = None,
    config: ConfigPath = None,
    manifest: Annotated[
        Path | None,
        typer.Option("--from", help="Replay a store: its folder or manifest.json. What is not given comes from it."),
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

    - `imprint simulate --config news.toml`

    - `imprint simulate --from runs/news/manifest.json --out runs/again`, which repeats a run to the bit
    """
    from imprint.experiment import Experiment
    from imprint.inspection import inspected
    from imprint.loading import Objects
    from imprint.terminal import progress, shown_check, shown_store

    flags = {
        **{"task": task, "data": data, "sources": sources, "checkpoints": checkpoint, "plan": plan, "out": out},
        **{"collate_fn": collate, "batch_size": batch_size, "dtype": dtype, "memory": memory, "device": device},
    }
    experiment = _experiment(config, **flags)
    recorded = None if manifest is None else imprint.Store(manifest.parent if manifest.is_file() else manifest)
    replay = recorded if recorded is not None and not experiment.plan and experiment.dtype is None else None
    if replay is not None and isinstance(threads := replay.manifest.execution.get("threads"), int):
        torch.set_num_threads(threads)
    if recorded is not None:
        experiment = experiment.over(Experiment.from_manifest(recorded.manifest))
    if experiment.out is None:
        raise ConfigurationError("no folder for the store is given: --out runs/NAME.")
    objects = Objects(experiment)
    note: dict[str, Any] = {"command": experiment.to_json()}
    if checking and not Path(experiment.out).exists():
        with errors.status("loading and measuring"):
            found = _checked(objects, experiment.out)
        errors.print(shown_check(found))
        if not found.ok:
            raise typer.Exit(1)
        assert found.estimate is not None
        note["estimate"] = {"seconds": found.estimate.seconds, "peak_bytes": found.estimate.peak_bytes}
    with _interruptible(Path(experiment.out)), progress(errors, "simulating") as advance:
        store = imprint.simulate(
            objects.task,
            objects.data,
            objects.sources,
            objects.plan,
            out=experiment.out,
            note=note,
            replay=replay,
            progress=advance,
            **objects.options,
        )
    if json:
        typer.echo(dumps(inspected(store)))
    else:
        console.print(shown_store(inspected(store)))


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Say what becomes of a simulation that is interrupted; where it can go on, the library says so itself."""
    try:
        yield
    except KeyboardInterrupt:
        if not (out / JOURNAL).exists():
            errors.print("stopped before a first part was finished: the same command again starts over")
        raise


@app.command()
def attribute(
    store: StorePath,
    task: Annotated[
        str | None,
        typer.Option(
            "--task", metavar="FILE.py:NAME", help="Default: the task the store was simulated with by command."
        ),
    ] = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    top: Annotated[int, typer.Option(min=1, help="How many sources to show for each query.")] = 5,
    by: Annotated[str, typer.Option(help="Order: `magnitude`, or whose removal `raises` or `lowers` F.")] = "magnitude",
    readout: Annotated[str, typer.Option(help="`jvp`, `central`, `literal` or `gradient`.")] = "jvp",
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

    - `imprint attribute runs/news --queries my_model.py:queries`

    - `imprint attribute runs/news --task my_model.py:task --top 3 --json`

    - `imprint attribute runs/news --out scores.csv`
    """
    from imprint.experiment import Experiment
    from imprint.loading import Objects
    from imprint.terminal import progress, shown_top

    if out is not None and out.suffix not in (".csv", ".safetensors"):
        raise ConfigurationError(f"{out}: scores are written as .csv or .safetensors.")
    if out is not None and not out.parent.is_dir():
        raise StoreError(f"could not write {out}: there is no folder {out.parent}.")
    opened = imprint.Store(store)
    given = _experiment(config, task=task, queries=queries, collate_fn=collate, memory=memory, device=device)
    objects = Objects(given.over(Experiment.from_manifest(opened.manifest)))
    options: Any = {
        **{"readout": readout, "by": by, "batch_size": batch_size, "memory": objects.experiment.memory},
        "collate_fn": objects.collate_fn,
    }
    with progress(errors, "attributing") as advance:
        if out is None:
            first = imprint.attribute(objects.task, opened, objects.queries, top=top, progress=advance, **options)
        else:
            result = imprint.attribute(objects.task, opened, objects.queries, progress=advance, **options)
            first = result.top(top, options["by"])
    if out is not None:
        _write_scores(result, out)
        errors.print(f"all scores: [bold]{escape(str(out))}[/bold]")
    if json:
        typer.echo(dumps(first.to_json()))
    else:
        console.print(shown_top(first))


def _write_scores(result: imprint.Attribution, out: Path) -> None:
    if out.suffix == ".safetensors":
        result.save(out)
        return
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(imprint.Credit._fields)
            for credits in result.top(result.scores.shape[1]):
                writer.writerows(credits)
    except OSError as error:
        raise StoreError(f"could not write {out}: {error}") from error


@app.command()
def inspect(store: StorePath, json: AsJson = False) -> None:
    """Show what a store holds: plan, sources, sizes, and the figures measured while it was made.

    For example: `imprint inspect runs/news`
    """
    from imprint.inspection import inspected
    from imprint.terminal import shown_store

    values = inspected(imprint.Store(store))
    if json:
        typer.echo(dumps(values))
    else:
        console.print(shown_store(values))


@app.command()
def verify(store: StorePath, json: AsJson = False) -> None:
    """Check every file of a store against its checksum. Leaves with 1 if one is damaged or missing.

    For example: `imprint verify runs/news`
    """
    opened = imprint.Store(store)
    opened.verify()
    if json:
        typer.echo(dumps({"path": str(opened.path), "bytes": opened.bytes, "sound": True}))
    else:
        text = f"{escape(str(opened.path))}: all files are as they were written ({opened.bytes:,} bytes)."
        console.print(text, soft_wrap=True)


def _show_warning(message: Warning | str, *origin: Any, **more: Any) -> None:
    _one_line("[yellow]warning:[/yellow]", message)


def _one_line(head: str, message: Exception | str) -> None:
    text = " ".join(line.strip() for line in str(message).splitlines())
    errors.print(f"{head} {escape(text)}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line; errors of this library are one line, not a traceback."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    warnings.showwarning = _show_warning
    try:
        app()
    except ImprintError as error:
        _one_line("[red]error:[/red]", error)
        raise SystemExit(1) from None
