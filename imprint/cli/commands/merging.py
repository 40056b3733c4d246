"""Implements `imprint merge`: joins the parts of a store or of a ground truth, or several stores."""

import re
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

import imprint
from imprint.cli.commands.options import AsJson
from imprint.cli.experiment import read_note
from imprint.cli.ground_truth import render_truth
from imprint.cli.inspection import inspect_store
from imprint.cli.terminal import console, errors, escape_markup, render_store, show_progress
from imprint.display import count_of
from imprint.errors import StoreError
from imprint.evaluation.parts import merge_truth, read_shared
from imprint.evaluation.truth import TRUTH
from imprint.store.merging import MissingPartsError, find_target
from imprint.store.part_writing import PartRecord
from imprint.store.parts import PART, Part, PartsFolder

_PART_OPTION = re.compile(r"--part[ =]\S+")


def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="FOLDER...",
            help="The folder that was `--out` of the parts; or several of them, if the parts were made on machines "
            "without a common file system. Or stores of one base.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The folder of the result. Default: the folder of the parts, if it is one."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Merge the parts that `simulate --part` or `retrain --part` made into one verified store or ground truth.

    Or merge several stores of the same data, checkpoints and plan, with other sources, into a new one. They may be in
    buckets; the new one is in a folder.

    All parts must be there and of the same simulation, and every file is compared with its checksum; what is missing,
    damaged or different is named. The result is complete at once or not at all: if the command is interrupted, run it
    again. Parts in the folder of the result are removed in the end, those in other folders stay.

    For example:

    - `imprint merge runs/news`

    - `imprint merge machine-1/news machine-2/news --out runs/news`, for parts that were copied from several machines

    - `imprint merge runs/news runs/books --out runs/both`, for two stores of one base
    """
    parts, target = find_target(folders, out)
    if (target / TRUTH).is_file() or any(map(read_shared, parts)):
        truth = merge_truth(folders, out)
        if json:
            typer.echo(dumps({"path": str(target), **truth.about}))
        else:
            console.print(render_truth(truth, str(target)))
        return
    with show_progress(errors, "merging") as advance:
        try:
            store = imprint.merge(folders, out, progress=advance)
        except MissingPartsError as error:
            if line := _find_line(folders, error):
                raise StoreError(f"{error} Parts were made by: {line}") from None
            raise
    if json:
        typer.echo(dumps(inspect_store(store)))
    else:
        console.print(render_store(inspect_store(store)))


def _find_line(folders: Sequence[Path], error: MissingPartsError) -> str | None:
    """Return the command that makes the first missing part, from what a finished one has noted; to be shown only."""
    for folder in map(PartsFolder, folders):
        for path in folder.find(error.missing[0].of).values():
            if (path / PART).is_file():
                line = read_note(PartRecord.read(path).manifest.note).get("line")
                if isinstance(line, str):
                    return _PART_OPTION.sub(f"--part {error.missing[0]}", line)
    return None


def show_part(part: Part, out: Path, *, json: bool) -> None:
    """Show a finished part, and what is left to do."""
    if json:
        about = {"part": str(part.share), "path": str(part.path), "count": part.count, "total": part.total}
        typer.echo(dumps({**about, "finished": part.finished}))
        return
    place = escape_markup(part.path)
    if part.path == out:
        text = f"{place} is complete: there is nothing to do for part {part.share}."
    else:
        made = f"{part.count:,} of {count_of(part.total, part.unit)}"
        ready = "Now run" if part.finished == part.share.of else "When all are, run"
        text = (
            f"Part {part.share}: {made}, in {place}. {part.finished} of {count_of(part.share.of, 'part')} "
            f"{'is' if part.finished == 1 else 'are'} finished. {ready}: imprint merge {escape_markup(out)}"
        )
    console.print(text, soft_wrap=True)
