"""Implements `imprint export`: imprints for machines that only run inference."""

from dataclasses import asdict
from enum import StrEnum
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.commands.options import AsJson, ConfigPath, DeviceName, QueriesString, SignedBy, StorePath, StoreTask
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, redirect_prints
from imprint.display import for_terminal
from imprint.errors import ConfigurationError, first_line


class Format(StrEnum):
    """The format of an export."""

    peft = "peft"
    vllm = "vllm"
    onnx = "onnx"


class Precision(StrEnum):
    """The precision in which adapters will be served."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def export(
    context: typer.Context,
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", "-o", help="The new folder to write the export to.")],
    format: Annotated[
        Format,
        typer.Option(
            help="`peft`: a pair of LoRA adapters for each source. `vllm`: the same as vLLM takes them, with the "
            "tokenizer and a script that starts the server. `onnx`: one graph for all sources."
        ),
    ] = Format.peft,
    task: StoreTask = None,
    queries: QueriesString = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source", "-s", help="The id of a source to export; repeat the option for several. Default: all."
        ),
    ] = None,
    checkpoint: Annotated[
        int | None,
        typer.Option(min=0, help="The number of the checkpoint to export. Default: the one with the largest weight."),
    ] = None,
    dtype: Annotated[
        Precision, typer.Option(help="The precision in which adapters will be served; their gains are chosen for it.")
    ] = Precision.float32,
    base: Annotated[
        str | None,
        typer.Option(
            help="The name or path of the base model, which is checked. Default: the base model is written to `model/`."
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="With `--format vllm`: the name or path of the tokenizer. Default: that of the task."),
    ] = None,
    device: DeviceName = None,
    config: ConfigPath = None,
    signed_by: SignedBy = None,
    json: AsJson = False,
) -> None:
    """Write the imprints of a store as LoRA adapters or as an ONNX graph, and test them on the queries.

    The store must hold imprints of LoRA parameters, and the task must measure the log-likelihood of completions, as the
    tasks of `imprint.language` do. Exits with status 1 if scores from the exported files differ from the library's.

    For example:

    - `imprint export runs/news --task my_model.py:task --out news-adapters --dtype bfloat16`

    - `imprint export runs/news --task my_model.py:task --out news-vllm --format vllm`, then `news-vllm/serve.sh` where
      vLLM is installed, and `imprint verify news-vllm --url http://127.0.0.1:8000` to compare it with PyTorch

    - `imprint export runs/news --task my_model.py:task --out news-onnx --format onnx`
    """
    from imprint.export import to_onnx, to_peft, to_vllm
    from imprint.export.vllm import SCRIPT

    if format is Format.onnx and (base is not None or dtype is not Precision.float32):
        raise ConfigurationError(
            "--dtype and --base apply to --format peft and vllm only: an ONNX graph contains its weights, in float32."
        )
    if format is not Format.vllm and tokenizer is not None:
        raise ConfigurationError("--tokenizer applies to --format vllm only.")
    words = _load_tokenizer(tokenizer)
    opened = imprint.Store(store, signed_by=signed_by)
    given = Experiment(task=task, queries=queries, device=device).override_file(config)
    if given.task is None:
        given = merge_with_store(given, opened, ("task", "queries"), context)
    with redirect_prints(), errors.status("exporting and testing"):
        objects = Objects(given)
        options: dict[str, Any] = {"sources": source or None, "checkpoint": checkpoint}
        if format is Format.peft:
            found = to_peft(objects.task, opened, out, objects.queries, dtype=dtype.value, base=base, **options)
        elif format is Format.vllm:
            options |= {"dtype": dtype.value, "base": base, "tokenizer": words}
            found = to_vllm(objects.task, opened, out, objects.queries, **options)
        else:
            found = to_onnx(objects.task, opened, out, objects.queries, **options)
    if json:
        described = {"path": str(found.folder), "kind": found.kind, "sources": found.ids, "gains": found.gains.tolist()}
        if format is Format.vllm:
            described["serve"] = str(found.folder / SCRIPT)
        typer.echo(dumps({**described, "floors": found.floors.tolist(), "self_test": asdict(found.self_test)}))
        return
    console.print(repr(found), markup=False, soft_wrap=True)
    if format is Format.vllm:
        console.print(f"start the server: {for_terminal(found.folder / SCRIPT)}", markup=False, soft_wrap=True)


def _load_tokenizer(name: str | None) -> Any:
    """Load a tokenizer by its name or path."""
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the tokenizer {name!r} cannot be loaded: {first_line(error)}.") from error
