"""`imprint export`: imprints for where only inference exists."""

from dataclasses import asdict
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.options import AsJson, ConfigPath, DeviceName, QueriesString, StorePath, StoreTask
from imprint.cli.commands.repeating import over_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, working
from imprint.errors import ConfigurationError


class Format(StrEnum):
    """What is written."""

    peft = "peft"
    onnx = "onnx"


class Precision(StrEnum):
    """What adapters will be served in."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    context: typer.Context,
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder for the export.")],
    format: Annotated[
        Format, typer.Option(help="`peft`: a pair of LoRA adapters for each source. `onnx`: one graph for all of them.")
    ] = Format.peft,
    task: StoreTask = None,
    queries: QueriesString = None,
    source: Annotated[
        list[str] | None, typer.Option("--source", "-s", help="The id of a source; repeat for several. Default: all.")
    ] = None,
    checkpoint: Annotated[
        int | None, typer.Option(min=0, help="Which one of the store. Default: the one with the most weight.")
    ] = None,
    dtype: Annotated[
        Precision, typer.Option(help="The precision adapters will be served in, which their gains are chosen for.")
    ] = Precision.float32,
    base: Annotated[
        str | None,
        typer.Option(help="The plain model's name or path, which is checked. Default: it is written, to `model/`."),
    ] = None,
    device: DeviceName = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Write the imprints of a store as LoRA adapters or as an ONNX graph, and test them on the queries.

    The store must hold imprints of LoRA parameters, and the task must measure the log-likelihood of completions, as
    those of `imprint.language` do. Leaves with 1 if scores read from what was written are not those of the library.

    For example:

    - `imprint export runs/news --task my_model.py:task --out news-adapters --dtype bfloat16`

    - `imprint export runs/news --task my_model.py:task --out news-onnx --format onnx`
    """
    from imprint.export import to_onnx, to_peft

    if format is Format.onnx and (base is not None or dtype is not Precision.float32):
        raise ConfigurationError("--dtype and --base are for --format peft: a graph has its weights in it, in float32.")
    opened = imprint.Store(store)
    given = Experiment(task=task, queries=queries, device=device).over_file(config)
    if given.task is None:
        given = over_store(given, opened, ("task", "queries"), context)
    with working(), errors.status("exporting and testing"):
        objects = Objects(given)
        options: dict[str, Any] = {"sources": source or None, "checkpoint": checkpoint}
        if format is Format.peft:
            found = to_peft(objects.task, opened, out, objects.queries, dtype=dtype.value, base=base, **options)
        else:
            found = to_onnx(objects.task, opened, out, objects.queries, **options)
    if json:
        told = {"path": str(found.folder), "kind": found.kind, "sources": found.ids, "gains": found.gains.tolist()}
        typer.echo(dumps({**told, "floors": found.floors.tolist(), "self_test": asdict(found.self_test)}))
        return
    console.print(repr(found), markup=False, soft_wrap=True)
