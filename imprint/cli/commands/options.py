"""Defines the options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from imprint.benchmarking.settings.catalogue import SETTINGS

TaskString = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py:NAME|SETTING",
        help="The task: an `imprint.Task`, or a function that returns one; or a built-in setting: "
        f"{', '.join(SETTINGS)}.",
    ),
]
DataString = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE.py:NAME", help="The training data. Default: `data` beside the task."),
]
SourcesString = Annotated[
    str | None,
    typer.Option(
        "--sources",
        metavar="FILE.py:NAME",
        help="An `imprint.Sources`, or `per-example` to make every training example a source. Default: `sources` "
        "beside the task.",
    ),
]
QueriesString = Annotated[
    str | None,
    typer.Option("--queries", metavar="FILE.py:NAME", help="The queries. Default: `queries` beside the task."),
]
CollateString = Annotated[
    str | None,
    typer.Option(
        "--collate", metavar="FILE.py:NAME", help="The collate function. Default: `collate_fn` beside the task, if any."
    ),
]
CheckpointStrings = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="FILE",
        help="A `.safetensors` file (repeat the option for several), or the import string of a list of state dicts. "
        "Default: `checkpoints` beside the task, else the model as it is.",
    ),
]
PlanPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        "-p",
        metavar="NAME=VALUE",
        help="A field of the plan, such as `steps=100`, `engine=trajectories` or `lr=0.1`, or `lr=0.1,0.05` with one "
        "value for each checkpoint; or `auto` to have the plan chosen. Overrides `plan` beside the task.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(min=1, help="How many examples are evaluated at once; changes memory and speed, not results."),
]
DtypeName = Annotated[
    str | None, typer.Option("--dtype", help="The dtype of stored imprints: `float32`, `bfloat16` or `float64`.")
]
HashDataName = Annotated[
    str | None,
    typer.Option(
        "--hash-data",
        help="Which training data to hash: `all` (default), `sampled` for data that is slow to read, `none` for data "
        "that changes each time it is read.",
    ),
]
MemoryText = Annotated[
    str | None, typer.Option("--memory", help='The memory budget, such as "4GiB". Default: from the available memory.')
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="The device to use, such as `cuda`. Default: where the model is.")
]
ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file of settings, which flags override.", dir_okay=False),
]
StoreTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:NAME",
        help="The task that the store was made with. Needed unless that is a built-in setting: code that a store names "
        "is never loaded on its own.",
    ),
]
ReadoutName = Annotated[
    str, typer.Option("--readout", help="How scores are read out: `jvp`, `central`, `literal` or `gradient`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
StorePath = Annotated[Path, typer.Argument(help="The folder of the store.")]
