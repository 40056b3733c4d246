"""Implements `imprint inside`: which documents of a source moved a query."""

import warnings
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

import imprint
from imprint.cli.asking import CompletionTexts, PromptTexts, ask, check_texts
from imprint.cli.commands.options import (
    AsJson,
    BatchSize,
    CheckpointStrings,
    CollateString,
    ConfigPath,
    DeviceName,
    MemoryText,
    QueriesString,
    RunString,
    SignedBy,
    StorePath,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints, render_documents, show_progress
from imprint.cli.writing import check_output
from imprint.errors import ReliabilityWarning
from imprint.sources import find_source
from imprint.store.files import write


def inside(
    context: typer.Context,
    store: StorePath,
    source: Annotated[str, typer.Argument(help="The source to look into, by its id or name.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    prompt: PromptTexts = None,
    completion: CompletionTexts = None,
    collate: CollateString = None,
    checkpoint: CheckpointStrings = None,
    run: RunString = None,
    top: Annotated[int, typer.Option(min=1, help="How many documents to show for each query.")] = 5,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep what is computed about the documents in this folder: the next call only reads it."),
    ] = None,
    batch_size: BatchSize = None,
    memory: MemoryText = None,
    device: DeviceName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the documents to an `.html` page.", dir_okay=False)
    ] = None,
    signed_by: SignedBy = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Show which documents of one source moved each query.

    Documents are the source's training examples, or groups of them: `documents` in the task's file is either the
    `language.Documents` that its data come from, or a list with the document of each training example. Their effects
    are estimated from the checkpoints, which answers the question "expected"; with --run, the recorded run is repeated
    without each document, which is exact for this run.

    For example:

    - `imprint inside runs/news times --task my_model.py:task --keep runs/times`

    - `imprint inside runs/news times --task my_model.py:task --prompt "The old ship" --completion " sails on"`
    """
    check_output(out, ".html")
    check_texts(queries, prompt, completion)
    opened = imprint.Store(store, signed_by=signed_by)
    find_source(source, opened.source_ids, opened.source_names)
    given = Experiment(
        task=task,
        queries=queries,
        collate_fn=collate,
        checkpoints=tuple(checkpoint or ()),
        run=run,
        batch_size=batch_size,
        memory=memory,
        device=device,
    ).override_file(config)
    if given.task is None:
        named = ("task", "data", "sources", "queries", "collate_fn", "checkpoints")
        given = merge_with_store(given, opened, named, context)
    with redirect_prints(), warnings.catch_warnings(), show_progress(errors, "looking inside") as advance:
        if not json:  # the table shows the warnings
            warnings.simplefilter("ignore", ReliabilityWarning)
        objects = Objects(given)
        found = _look_inside(objects, opened, source, (prompt, completion), keep, advance)
    if out is not None:
        write(out, lambda path: path.write_text(found.to_html(), encoding="utf-8"))
        errors.print(f"written to [bold]{escape_markup(out)}[/bold]")
    if json:
        texts = dict(zip(found.result.labels.source_ids, found.texts, strict=False))
        about = {"source": found.source, "query_texts": found.asked, "document_texts": texts}
        typer.echo(dumps({**found.result.top(top).to_json(), **about}))
    else:
        console.print(render_documents(found, top))


def _look_inside(
    objects: Objects, store: imprint.Store, source: str, texts: tuple[Any, Any], keep: Path | None, advance: Any
) -> imprint.Inside:
    _ = objects.task  # first: the function that returns the task may train it, and fill the list of checkpoints
    prompts, completions = texts
    completed = ask(objects, prompts, completions) if completions else None
    shown = objects.illustrations
    own = objects.experiment.queries is None
    found = imprint.drill_down(
        objects.task,
        objects.data,
        objects.sources,
        source,
        objects.queries if completed is None else completed.columns,
        documents=_find_documents(objects),
        texts=shown.example_texts,
        asked=completed.texts if completed is not None else shown.texts if own else None,
        checkpoints=None if objects.run is not None else objects.checkpoints,
        run=objects.run,
        store=store,
        out=keep,
        batch_size=objects.experiment.batch_size,
        collate_fn=objects.examples_collate_fn,
        query_collate_fn=objects.query_collate_fn if completed is None else None,
        memory=objects.experiment.memory,
        progress=advance,
    )
    return found if completed is None else replace(found, result=found.result.with_warnings(*completed.warnings))


def _find_documents(objects: Objects) -> Any:
    """Return the document of each training example, if the task's file says so."""
    found = objects.call_optional("documents")
    return getattr(found, "documents", found)
