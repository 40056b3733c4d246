"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

from imprint.benchmarking.settings.catalogue import SETTINGS

TaskString = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py:NAME|SETTING",
        help="The task: an `imprint.Task`, or a function returning one; or a ready-made setting, "
        f"{', '.join(SETTINGS)}.",
    ),
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
    str | None,
    typer.Option("--queries", metavar="FILE.py:NAME", help="The queries. Default: `queries` beside the task."),
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
        help="`auto` to have a plan chosen; or a field of it, such as `steps=100`, `engine=trajectories` or `lr=0.1`; "
        "with commas one value for each checkpoint. Over `plan` beside the task, if there is one.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Examples evaluated at once: memory and speed only.")]
DtypeName = Annotated[str | None, typer.Option("--dtype", help="Of stored imprints: float32, bfloat16 or float64.")]
HashDataName = Annotated[
    str | None,
    typer.Option(
        "--hash-data",
        help="How data is hashed: `all` (default), `sampled` for data that is slow to read, `none` for data that is "
        "drawn anew at each reading.",
    ),
]
MemoryText = Annotated[str | None, typer.Option("--memory", help='What may be used, such as "4GiB".')]
DeviceName = Annotated[str | None, typer.Option("--device", help="Where the model is put, such as `cuda`.")]
ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file of settings; flags go over it.", dir_okay=False),
]
StoreTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:NAME",
        help="The task the store was made with. Needed unless that is a ready-made setting: no code that a store names "
        "is loaded.",
    ),
]
ReadoutName = Annotated[str, typer.Option("--readout", help="`jvp`, `central`, `literal` or `gradient`.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for programs.")]
StorePath = Annotated[Path, typer.Argument(help="Folder of a store.")]
