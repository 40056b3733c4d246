"""`imprint retrain` and `imprint evaluate`: the truth, and how close scores come to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

import imprint
from imprint.commands.options import AsJson, CollateString, DataString, QueriesString, SourcesString, StoreTask
from imprint.commands.stores import over_store
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


def retrain(
    train: Annotated[
        str,
        typer.Argument(
            metavar="SETTING|FILE.py:NAME",
            help=f"One of {', '.join(SETTINGS)}; or a function `train(subset, seed)` of yours, which returns a model "
            "trained on the examples whose indices are in `subset`.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the truth, for `imprint evaluate`.")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="Train on random `halves` of the sources; or on all but each of the `sources`, all but each of the "
            "`examples`, or all but random `unions` of a fifth of the sources."
        ),
    ] = "halves",
    count: Annotated[
        int | None, typer.Option(min=1, help="How many halves or unions. Default: 100.", show_default=False)
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often each subset is trained; two or more tell the noise.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the subsets and of the trainings.")] = 0,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="The task, which says what is measured. Default: `task` beside `train`."
        ),
    ] = None,
    data: DataString = None,
    sources: SourcesString = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    device: Annotated[
        str | None, typer.Option(help="Such as `cuda`; for a function of yours, the device of the models it returns.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Retrain on subsets of the data, and keep what that does to every query: the truth that scores are held against.

    A ready-made setting has all that is needed. For a function of yours, `task`, `sources` and `queries` are looked for
    in its file, and `data` for its length; the task says what is measured of the queries, and its own model is not
    trained. Small models are trained many at once (the ready-made settings, or an
    `imprint.evaluation.retraining.Together` in your file); a function is called once for each model.

    Interrupted, it goes on where it stood when the same command is given again.

    For example:

    - `imprint retrain mnist-mlp --count 100 --runs 10 --device cuda --out truth/mnist`

    - `imprint retrain my_model.py:train --kind sources --runs 4 --out truth/news`
    """
    if count is not None and kind in ("sources", "examples"):
        raise ConfigurationError(f"--count is for halves and unions: --kind {kind} leaves out each of them.")
    named = Experiment(task=task, data=data, sources=sources, queries=queries, collate_fn=collate, device=device)
    with working(), _interruptible(out), progress(errors, "retraining") as advance:
        found = _setting(train, named) if train in SETTINGS else _own(train, named)
        truth = retrained(
            found.train,
            found.task,
            found.queries,
            _subsets(kind, found.sources, count or 100, seed),
            runs=runs,
            seed=seed,
            out=out,
            collate_fn=found.collate_fn,
            progress=advance,
        )
    if json:
        typer.echo(dumps({"path": str(out), **truth.about}))
    else:
        console.print(shown_truth(truth, out))


def _setting(name: str, named: Experiment) -> Ready:
    """A ready-made setting, which has objects of its own."""
    given = [f"--{option.removesuffix('_fn')}" for option in named.to_json()]
    if given:
        raise ConfigurationError(f"the setting {name} has all that is needed: leave {' and '.join(given)} out.")
    return ready(name, named.device or "cpu")


def _own(train: str, named: Experiment) -> Ready:
    """What a user's file has."""
    module, colon, _ = train.rpartition(":")
    if not colon:
        raise ConfigurationError(
            f"{train!r} is neither a ready-made setting ({', '.join(SETTINGS)}) nor an import string FILE.py:NAME."
        )
    objects = Objects(replace(named, task=named.task or f"{module}:task"))
    sources = objects.sources
    if sources.length is None or objects.has("data"):
        length = length_of(objects.data)
        sources.check(length)
        sources = replace(sources, length=length)
    return Ready(objects.named("train", train), objects.task, objects.queries, sources, objects.query_collate_fn)


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Say what becomes of a retraining that is interrupted."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and "RuntimeError: KeyboardInterrupt" not in str(error):
            raise
        if any(out.glob("values-*.safetensors")):
            text = f"stopped: finished models are kept in {escape(str(out))}, the same command again goes on from there"
        else:
            text = "stopped before a first part was finished: the same command again starts over"
        errors.print(text, soft_wrap=True)
        raise KeyboardInterrupt from error  # within its own code torch makes a RuntimeError of it


def _subsets(kind: Kind, sources: imprint.Sources, count: int, seed: int) -> Subsets:
    if kind == "halves":
        return Subsets.halves(sources, count, seed=seed)
    if kind == "unions":
        return Subsets.without_some(sources, count, seed=seed)
    if kind == "sources":
        return Subsets.without_each(sources)
    assert sources.length is not None
    return Subsets.without_each(sources.length)


def evaluate(
    store: Annotated[
        Path,
        typer.Argument(
            help="Folder of a store; or a `.safetensors` file of scores, by `imprint attribute --out` or `result.save`."
        ),
    ],
    truth: Annotated[Path, typer.Argument(help="Folder of a truth, made by `imprint retrain`.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    readout: Annotated[
        str | None, typer.Option(help="`jvp` (the default), `central`, `literal` or `gradient`.", show_default=False)
    ] = None,
    json: AsJson = False,
) -> None:
    """How close do scores come to the truth, and how close could they come?

    Halves give the linear datamodelling score, removals of sources their correlation, rank correlation and slope,
    removals of single examples the leave-one-out correlation; each with a 95% interval over queries and the ceiling
    that the noise of retraining sets.

    The queries of a store must be those of the truth, in the same order. To give effects the size that retraining
    shows, use `result.calibrate(truth)` in Python.

    For example:

    - `imprint evaluate runs/news truth/news`

    - `imprint evaluate scores.safetensors truth/news`
    """
    known = Truth.load(truth)
    if store.suffix == ".safetensors":
        given = {"--task": task, "--queries": queries, "--readout": readout}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise ConfigurationError(
                f"{store} holds scores, which are compared as they are: leave {' and '.join(unused)} out."
            )
        result = imprint.Attribution.load(store)
    else:
        result = _attributed(imprint.Store(store), Experiment(task=task, queries=queries), readout or "jvp")
    metrics = evaluated(result, known)
    if json:
        typer.echo(dumps({"truth": str(truth), "metrics": [metric.to_json() for metric in metrics]}))
    else:
        console.print(shown_metrics(metrics, known))


def _attributed(store: imprint.Store, given: Experiment, readout: Any) -> imprint.Attribution:
    given = over_store(given, store)
    with working(), progress(errors, "attributing") as advance:
        objects = Objects(given)
        return imprint.attribute(
            objects.task,
            store,
            objects.queries,
            readout=readout,
            collate_fn=objects.query_collate_fn,
            progress=advance,
        )
