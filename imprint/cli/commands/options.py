"""Defines the options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from imprint.benchmarking.settings.catalogue import SETTINGS
from imprint.errors import ConfigurationError
from imprint.simulation.executors import RayExecutor

TaskString = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE.py:NAME|SETTING",
        help=f"The task: an `imprint.Task`, a function that returns one, or a built-in setting: {', '.join(SETTINGS)}.",
    ),
]
DataString = Annotated[
    str | None,
    typer.Option("--data", metavar="FILE.py:NAME", help="The training data. Default: `data` in the task's file."),
]
SourcesString = Annotated[
    str | None,
    typer.Option(
        "--sources",
        metavar="FILE.py:NAME",
        help="An `imprint.Sources`, or `per-example` to make every training example a source. Default: `sources` in "
        "the task's file.",
    ),
]
QueriesString = Annotated[
    str | None,
    typer.Option("--queries", metavar="FILE.py:NAME", help="The queries. Default: `queries` in the task's file."),
]
CollateString = Annotated[
    str | None,
    typer.Option(
        "--collate",
        metavar="FILE.py:NAME",
        help="The collate function. Default: `collate_fn` in the task's file, if there is one.",
    ),
]
CheckpointStrings = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="FILE",
        help="A `.safetensors` or `.pt` file, or a Trainer's checkpoint folder (repeat the option for several), or the "
        "import string of a list of state dicts. "
        "For several training runs, repeat it for each run, with commas between or after its files. "
        "Default: `checkpoints` in the task's file, or else the current weights of the model.",
    ),
]
RunString = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="FOLDER",
        help="A recorded training run, in place of checkpoints: its folder, or the import string of an "
        "`imprint.Recording`. The run is repeated once for each source.",
    ),
]
PlanPairs = Annotated[
    list[str] | None,
    typer.Option(
        "--plan",
        "-p",
        metavar="NAME=VALUE",
        help="A field of the plan, such as `steps=100`, `engine=trajectories` or `lr=0.1`; `lr=0.1,0.05` gives one "
        "value for each checkpoint. `auto` chooses the plan for you. Overrides `plan` in the task's file.",
    ),
]
BatchSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="How many examples to evaluate at once. Affects memory and speed, but not results, unless the plan draws "
        "dropout.",
    ),
]
DtypeName = Annotated[
    str | None, typer.Option("--dtype", help="The dtype of the stored imprints: `float32`, `bfloat16` or `float64`.")
]
HashDataName = Annotated[
    str | None,
    typer.Option(
        "--hash-data",
        help="How much of the training data to hash: `all` (default), `sampled` for data that is slow to read, or "
        "`none` for data that changes each time it is read.",
    ),
]
MemoryText = Annotated[
    str | None,
    typer.Option("--memory", help='The memory budget, such as "4GiB". Default: based on the available memory.'),
]
PartText = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Make only the K-th of N parts, such as `3/8`, in a folder of its own in `--out`. Run the same command "
        "for the other parts, on as many machines as you like, and then `imprint merge`.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="auto|local|ADDRESS",
        help="Run in parts on a Ray cluster, and merge them: `auto` for the cluster of this machine, an address, or "
        "`local` to start one on this machine alone. `--out` must be a folder that all of its nodes see.",
    ),
]
PartCount = Annotated[
    int | None,
    typer.Option(
        "--parts",
        min=1,
        help="With `--ray`: how many parts. Default: as many as are there already, or as the cluster can run at once.",
        show_default=False,
    ),
]
PartCpus = Annotated[
    int, typer.Option("--cpus", min=1, help="With `--ray`: the CPUs of a part, which is also its number of threads.")
]
PartGpus = Annotated[
    float,
    typer.Option(
        "--gpus", min=0, help="With `--ray`: the GPUs of a part, to which its model is moved; 0.5 for two on one GPU."
    ),
]
DeviceName = Annotated[
    str | None, typer.Option("--device", help="The device to use, such as `cuda`. Default: the model's device.")
]
ConfigPath = Annotated[
    Path | None,
    typer.Option("--config", help="A TOML file of settings. Flags override it.", dir_okay=False),
]
StoreTask = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:NAME",
        help="The task that the store was made with. Required unless it is a built-in setting, because code named in a "
        "store is never loaded automatically.",
    ),
]
ReadoutName = Annotated[
    str | None,
    typer.Option(
        "--readout",
        help="How to read out scores: `jvp`, `central`, `literal` or `gradient`; `removed` for a repeated run.",
        show_default="jvp, or removed where the store needs it",
    ),
]
TrainingSteps = Annotated[
    int | None,
    typer.Option(
        "--training-steps",
        min=1,
        help="How many steps a training has, to compare the simulation with retraining. Not needed with `--run`, or if "
        "`train` in the task's file is a `Together`.",
    ),
]
TrainingBatch = Annotated[
    int | None, typer.Option("--training-batch", min=1, help="How many examples each of those steps has.")
]
SignedBy = Annotated[
    Path | None,
    typer.Option(
        "--signed-by",
        envvar="IMPRINT_SIGNED_BY",
        help="A public key: refuse a store that is not signed with it (`imprint sign`).",
        dir_okay=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AboutFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--about",
        metavar="[SOURCE=]FILE",
        help="Files with each source's owner, licence and address: a `.csv` or `.json` table with the columns source, "
        "owner, licence and url, or a Croissant file, which describes one source (repeat the option for several). "
        "`SOURCE=FILE` where the dataset of a Croissant file has another name than the source.",
    ),
]
StorePath = Annotated[
    Path, typer.Argument(help="The store's folder, or its address in a bucket, such as `s3://bucket/news`.")
]


def choose_executor(
    address: str | None, part: str | None, parts: int | None, cpus: int, gpus: float
) -> RayExecutor | None:
    """Return what runs the parts, if a cluster does; refuse options that do not go together."""
    if address is not None:
        if part is not None:
            raise ConfigurationError(
                "--part makes one part here, --ray makes all of them on a cluster: use one of them."
            )
        return RayExecutor(address, parts, cpus, gpus)
    given = {"--parts": parts is not None, "--cpus": cpus != 1, "--gpus": gpus != 0}
    if alone := [name for name, is_given in given.items() if is_given]:
        raise ConfigurationError(f"{alone[0]} is about parts on a cluster: add --ray auto, or an address.")
    return None
