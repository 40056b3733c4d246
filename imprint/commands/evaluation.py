"""`imprint retrain` and `imprint evaluate`: the truth, and how close scores come to it."""

from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import imprint
from imprint.commands.options import AsJson, QueriesString, ReadoutName, StoreTask
from imprint.data import length_of
from imprint.errors import ConfigurationError
from imprint.evaluation.metrics import evaluate as evaluated
from imprint.evaluation.retraining import retrain as retrained
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.experiment import Experiment
from imprint.loading import Objects
from imprint.settings.catalogue import SETTINGS, Ready, ready
from imprint.terminal import console, errors, progress, shown_metrics, shown_truth, working

Kind = Literal["halves", "sources", "examples", "unions"]
String = Annotated[str | None, typer.Option(metavar="FILE.py:NAME", help="Default: the usual name beside `train`.")]


def retrain(
    train: Annotated[
        str,
        typer.Argument(
            metavar="SETTING|FILE.py:NAME",
            help=f"One of {', '.join(SETTINGS)}; or a function `train(subset, seed)` that returns a trained model.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the truth.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="Train on random `halves` of the sources, or without each of the `sources`, each of the `examples`, "
            "or random `unions` of a fifth of the sources."
        ),
    ] = "halves",
    count: Annotated[int, typer.Option(min=1, help="How many halves or unions.")] = 100,
    runs: Annotated[int, typer.Option(min=1, help="How often each subset; two or more tell the noise.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the subsets and of the trainings.")] = 0,
    task: String = None,
    data: String = None,
    sources: String = None,
    queries: String = None,
    device: Annotated[str | None, typer.Option(help="Of a ready-made setting, such as `cuda`.")] = None,
    json: AsJson = False,
) -> None:
    """Retrain on subsets of the data, and keep what that does to every query: the truth that scores are held against.

    Goes on where it stood if it is interrupted. Small models are trained many at once (the ready-made settings, or an
    `imprint.evaluation.retraining.Together` in your file); any `train(subset, seed)` is called in a loop.

    For example:

    - `imprint retrain mnist-mlp --count 100 --runs 10 --device cuda --out truth/mnist`

    - `imprint retrain my_model.py:train --kind sources --runs 4 --out truth/news`
    """
    with working(), progress(errors, "retraining") as advance:
        found = ready(train, device or "cpu") if train in SETTINGS else _own(train, task, data, sources, queries)
        subsets = _subsets(kind, found, count, seed)
        truth = retrained(
            found.train, found.task, found.queries, subsets, runs=runs, seed=seed, out=out, progress=advance
        )
    if json:
        typer.echo(dumps({"path": str(out), **truth.about}))
    else:
        console.print(shown_truth(truth, out))


def _own(train: str, task: str | None, data: str | None, sources: str | None, queries: str | None) -> Ready:
    """What a user's file has."""
    module, colon, _ = train.rpartition(":")
    if not colon:
        raise ConfigurationError(
            f"{train!r} is neither a ready-made setting ({', '.join(SETTINGS)}) nor an import string FILE.py:NAME."
        )
    experiment = Experiment(task=task or f"{module}:task", data=data, sources=sources, queries=queries)
    objects = Objects(experiment)
    units = objects.sources
    if units.length is None:
        units = replace(units, length=length_of(objects.data))
    return Ready(objects.named("train", train), objects.task, objects.queries, units)


def _subsets(kind: Kind, found: Ready, count: int, seed: int) -> Subsets:
    sources = found.sources
    if kind == "halves":
        return Subsets.halves(sources, count, seed=seed)
    if kind == "unions":
        return Subsets.without_some(sources, count, seed=seed, baselines=4)
    if kind == "sources":
        return Subsets.without_each(sources, baselines=4)
    assert sources.length is not None
    return Subsets.without_each(sources.length)


def evaluate(
    store: Annotated[Path, typer.Argument(help="Folder of a store, or a .safetensors file of scores.")],
    truth: Annotated[Path, typer.Argument(help="Folder of a truth, made by `imprint retrain`.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    readout: ReadoutName = "jvp",
    json: AsJson = False,
) -> None:
    """How close do scores come to the truth, and how close could they come?

    Halves give the linear datamodelling score, removals of sources their correlation, rank correlation and slope,
    removals of single examples the leave-one-out correlation; each with a 95% interval over queries and the ceiling
    that the noise of retraining sets.

    For example: `imprint evaluate runs/news truth/news`
    """
    known = Truth.load(truth)
    metrics = evaluated(_attributed(store, task, queries, readout), known)
    if json:
        typer.echo(dumps({"truth": str(truth), "metrics": [metric.to_json() for metric in metrics]}))
    else:
        console.print(shown_metrics(metrics, known))


def _attributed(store: Path, task: str | None, queries: str | None, readout: Any) -> imprint.Attribution:
    if store.suffix == ".safetensors":
        return imprint.Attribution.load(store)
    opened = imprint.Store(store)
    given = Experiment(task=task, queries=queries)
    with working(), progress(errors, "attributing") as advance:
        objects = Objects(given if task is not None else given.over_store(opened))
        collate = objects.query_collate_fn
        return imprint.attribute(
            objects.task, opened, objects.queries, readout=readout, collate_fn=collate, progress=advance
        )
