"""Implements `imprint attribute`: the effect of every source on queries, on completions, and on their words."""

import csv
import warnings
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import imprint
from imprint.attribution.top import list_columns, tabulate
from imprint.cli.asking import CompletionTexts, PromptTexts, ask, check_texts, find_tokenizer
from imprint.cli.commands.options import (
    AsJson,
    CollateString,
    ConfigPath,
    DeviceName,
    MemoryText,
    QueriesString,
    ReadoutName,
    SignedBy,
    StorePath,
    StoreTask,
)
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import (
    console,
    errors,
    escape_markup,
    redirect_prints,
    render_attribution,
    render_words,
    show_progress,
)
from imprint.cli.writing import check_output
from imprint.display import for_csv, shorten
from imprint.errors import ConfigurationError, ReliabilityWarning
from imprint.store.files import write

if TYPE_CHECKING:
    from imprint.language import Completions, TokenAttribution


def attribute(
    context: typer.Context,
    store: StorePath,
    task: StoreTask = None,
    queries: QueriesString = None,
    prompt: PromptTexts = None,
    completion: CompletionTexts = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show which words of each --completion a source moved.")
    ] = False,
    source: Annotated[
        str | None,
        typer.Option(
            "--source", "-s", help="The source to shade words by, with --tokens. Default: the most helpful one."
        ),
    ] = None,
    collate: CollateString = None,
    top: Annotated[int, typer.Option(min=1, help="How many sources to show for each query.")] = 5,
    by: Annotated[
        str,
        typer.Option(
            help="Sort sources by `magnitude`, or list first those whose removal `raises` or `lowers` the measurement."
        ),
    ] = "magnitude",
    readout: ReadoutName = None,
    batch_size: Annotated[int, typer.Option(min=1, help="How many queries to evaluate at once.")] = 64,
    memory: MemoryText = None,
    device: DeviceName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write all scores to a `.csv` or `.safetensors` file, or the words to `.html`.",
            dir_okay=False,
        ),
    ] = None,
    signed_by: SignedBy = None,
    config: ConfigPath = None,
    json: AsJson = False,
) -> None:
    """Show how much each source moves each query, using forward passes only.

    An effect is the predicted change in the measurement if the source were removed. The table states the unit, and
    which sign means that a source helps. With --out, all scores are also written to a file. If the task's file has
    `query_labels` or `query_texts`, one for each query, the table shows them.

    For example:

    - `imprint attribute runs/news --task my_model.py:task`

    - `imprint attribute runs/news --task my_model.py:task --queries other.py:queries --top 3 --json`

    - `imprint attribute runs/news --task my_model.py:task --prompt "The old ship" --completion " sails on" --tokens`

    - `imprint attribute runs/digits --out scores.csv`, for a built-in setting, which needs no --task
    """
    if tokens:
        check_output(out, ".html", remark=", with --tokens")
    else:
        check_output(out, ".csv", ".safetensors", remark=" (or .html, with --tokens)")
    check_texts(queries, prompt, completion)
    _check_words(completion, tokens, source)
    opened = imprint.Store(store, signed_by=signed_by)
    given = Experiment(task=task, queries=queries, collate_fn=collate, memory=memory, device=device).override_file(
        config
    )
    if given.task is None:
        named = ("task", "collate_fn") if completion else ("task", "queries", "collate_fn")
        given = merge_with_store(given, opened, named, context)
    with redirect_prints(), warnings.catch_warnings(), show_progress(errors, "attributing") as advance:
        if not json:  # the table shows the warnings
            warnings.simplefilter("ignore", ReliabilityWarning)
        objects = Objects(given)
        options: Any = {"readout": readout, "memory": given.memory}
        if tokens and completion:
            words = _score_words(objects, opened, prompt or [""] * len(completion), completion, options)
        else:
            options |= {"by": by, "batch_size": batch_size, "progress": advance}
            asked = ask(objects, prompt, completion) if completion else None
            result, labels = _score(objects, opened, asked, options)
    order: Any = by
    if tokens:
        _show_words(words, source, [each.completion.top(top, order) for each in words], out, json)
        return
    first = result.top(top, order)
    if out is not None:
        _write_scores(result, labels, out)
        errors.print(f"all scores written to [bold]{escape_markup(out)}[/bold]")
    if json:
        typer.echo(dumps({**first.to_json(), **({"query_labels": labels} if labels else {})}))
    else:
        console.print(render_attribution(result.mean().top(top, order), first, labels))


def _check_words(completions: list[str] | None, tokens: bool, source: str | None) -> None:
    """Refuse to show words of no completion."""
    if tokens and not completions:
        raise ConfigurationError("--tokens needs a --completion to attribute.")
    if source is not None and not tokens:
        raise ConfigurationError("--source chooses whose words are shaded: it goes with --tokens.")


def _score(
    objects: Objects, store: imprint.Store, asked: "Completions | None", options: dict[str, Any]
) -> tuple[imprint.Attribution, list[str]]:
    """Attribute completions, or else the queries of the task's file; return a label of each too, if there are any."""
    if asked is not None:
        result = imprint.attribute(objects.task, store, asked.columns, **options)
        return result.with_warnings(*asked.warnings), [shorten(each) for each in asked.texts]
    result = imprint.attribute(objects.task, store, objects.queries, collate_fn=objects.query_collate_fn, **options)
    if objects.experiment.queries is not None:  # the labels in the file are those of its own queries
        return result, []
    return result, objects.illustrations.name_queries(len(result), store.n)


def _score_words(
    objects: Objects, store: imprint.Store, prompts: list[str], completions: list[str], options: dict[str, Any]
) -> "list[TokenAttribution]":
    from imprint.language import token_scores

    task: Any = objects.task
    tokenizer, pairs = find_tokenizer(objects), zip(prompts, completions, strict=True)
    return [token_scores(task, store, *pair, tokenizer, **options) for pair in pairs]


def _show_words(
    words: "list[TokenAttribution]", source: str | None, firsts: list[imprint.Top], out: Path | None, json: bool
) -> None:
    """Show or write the words of each completion, and its first sources."""
    from imprint.language import render_page

    shaded = [each.words(source) for each in words]
    if out is not None:
        write(out, lambda path: path.write_text(render_page(words, source), encoding="utf-8"))
        errors.print(f"written to [bold]{escape_markup(out)}[/bold]")
    if json:
        found = [
            {**first.to_json(), "shaded_by": each.name_source(source), "words": listed}
            for each, first, listed in zip(words, firsts, shaded, strict=True)
        ]
        typer.echo(dumps(found[0] if len(found) == 1 else {"completions": found}))
        return
    for each, first in zip(words, firsts, strict=True):
        console.print(render_words(each, source, first))


def _write_scores(result: imprint.Attribution, labels: Sequence[str], out: Path) -> None:
    if out.suffix == ".safetensors":
        result.save(out)
        return

    def write_rows(path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*list_columns(result.labels), *["query_label"] * bool(labels)])
            for query, credits in enumerate(result.top(result.scores.shape[1])):
                label = [for_csv(labels[query])] if labels else []
                rows = (tabulate(credit, result.labels).values() for credit in credits)
                writer.writerows([*map(for_csv, row), *label] for row in rows)

    write(out, write_rows)
