"""Implements `imprint suspects`: training examples that look mislabelled, by self-influence and by plain loss."""

import csv
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

import imprint
from imprint.cli.commands.options import (
    AsJson,
    CollateString,
    ConfigPath,
    DataString,
    DeviceName,
    MemoryText,
    SignedBy,
    StorePath,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.suspicions import render_suspects
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints, show_progress
from imprint.cli.writing import check_output
from imprint.display import for_csv, shorten
from imprint.errors import ConfigurationError, DataError
from imprint.evaluation.mislabels import MislabelDetection, Suspects, example_losses, mislabel_auc
from imprint.store.files import write


def suspects(
    context: typer.Context,
    store: StorePath,
    task: StoreTask = None,
    data: DataString = None,
    collate: CollateString = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            "-c",
            metavar="FILE",
            help="A file or a Trainer's folder with the trained weights, for the plain loss. Default: the task's model "
            "as it is loaded.",
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many examples to show.")] = 20,
    memory: MemoryText = None,
    device: DeviceName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write all examples to a `.csv` file.", dir_okay=False)
    ] = None,
    signed_by: SignedBy = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """List training examples that look mislabelled: by their influence on themselves, beside their plain loss.

    The store must have every training example as a source: `imprint simulate ... --sources per-example -p auto`.
    A wrong label is learnt by heart: more than others, the example itself is what makes the model predict it. Plain
    loss costs one forward pass and often finds as much, so both orders are shown. If the task's file has `mislabelled`,
    a flag for each example, both are also measured against it.

    For example:

    - `imprint suspects runs/each --task my_model.py:task`

    - `imprint suspects runs/each --task my_model.py:task --checkpoint final.safetensors --out suspects.csv`
    """
    check_output(out, ".csv")
    opened = imprint.Store(store, signed_by=signed_by)
    given = Experiment(task=task, data=data, collate_fn=collate, memory=memory, device=device).override_file(config)
    if given.task is None:
        given = merge_with_store(given, opened, ("task", "data", "collate_fn"), context)
    with redirect_prints(), show_progress(errors, "self-influence") as advance:
        objects = Objects(given)
        _refuse_groups(opened)
        options: dict[str, Any] = {"collate_fn": objects.examples_collate_fn}
        influence = imprint.self_influence(
            objects.task, opened, objects.data, memory=given.memory, progress=advance, **options
        )
        losses = example_losses(objects.task, objects.data, checkpoint=checkpoint, **options)
    found = Suspects.rank(influence, losses, objects.task.better, opened.n)
    texts = objects.illustrations.example_texts
    if texts is not None and len(texts) != opened.n:
        raise DataError(f"there are {len(texts)} texts of examples, and {opened.n} examples: give one for each.")
    names = [shorten(text) for text in texts or ()]
    measured = _measure(objects, influence, losses)
    if out is not None:
        _write_examples(found, names, out)
        errors.print(f"all examples written to [bold]{escape_markup(out)}[/bold]")
    if json:
        typer.echo(dumps({**found.to_json(top), "auc": measured and measured.to_json()}))
    else:
        console.print(render_suspects(found, top, names, measured))


def _refuse_groups(store: imprint.Store) -> None:
    if len(store) != store.n or max(store.source_sizes) > 1:
        raise ConfigurationError(
            f"{store.path} has {len(store):,} sources for {store.n:,} training examples. To suspect single examples, "
            "make a store of each of them: imprint simulate TASK --sources per-example -p auto."
        )


def _measure(objects: Objects, influence: Tensor, losses: Tensor) -> MislabelDetection | None:
    """Compare both orders with the flags in the task's file, if there are any."""
    flags = objects.call_optional("mislabelled")
    return None if flags is None else mislabel_auc(influence, torch.as_tensor(flags), losses, objects.task.better)


def _write_examples(found: Suspects, names: list[str], out: Path) -> None:
    def write_rows(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*found.rows[0]._fields, *["text"] * bool(names)])
            for row in found.rows:
                writer.writerow([*row, *([for_csv(names[row.example])] if names else [])])

    write(out, write_rows)
