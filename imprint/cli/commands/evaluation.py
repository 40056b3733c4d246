"""`imprint retrain` and `imprint evaluate`: the truth, and how close scores come to it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

import imprint
from imprint.benchmarking.settings.catalogue import SETTINGS
from imprint.cli.commands.options import AsJson, CollateString, DataString, QueriesString, SourcesString, StoreTask
from imprint.cli.commands.repeating import over_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, marked, progress, shown_metrics, shown_truth, working
from imprint.data import length_of
from imprint.errors import ConfigurationError
from imprint.evaluation.metrics import evaluate as evaluated
from imprint.evaluation.retraining import Together
from imprint.evaluation.retraining import retrain as retrained
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth, TruthFolder
from imprint.store.manifest import MANIFEST

Kind = Literal["halves", "sources", "examples", "unions"]
_COUNT, _SHARE = 100, 0.2  # of halves and unions, where nothing else is asked for


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
            "`examples`, or all but random `unions` of sources."
        ),
    ] = "halves",
    count: Annotated[
        int | None,
        typer.Option(min=1, help="How many halves or unions. Default: 100, or all there are.", show_default=False),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="Of the sources that a union has. Default: 0.2.", show_default=False)
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
    in its file, and `data`, by which the folder is recognised; the task says what is measured of the queries, and its
    own model is not trained. Small models are trained many at once (the ready-made settings, or an
    `imprint.evaluation.Together` in your file); a function is called once for each model.

    Interrupted, it goes on where it stood when the same command is given again; with more `--runs` it adds to them.

    For example:

    - `imprint retrain digits --runs 4 --out truth/digits`, against scores of `imprint simulate digits`

    - `imprint retrain my_model.py:train --kind sources --runs 4 --out truth/news`
    """
    if count is not None and kind in ("sources", "examples"):
        raise ConfigurationError(f"--count is for halves and unions: --kind {kind} leaves out each of them.")
    if share is not None and kind != "unions":
        raise ConfigurationError(f"--share is for unions, not for {kind}.")
    named = Experiment(task=task, data=data, sources=sources, queries=queries, collate_fn=collate, device=device)
    with working(), _interruptible(out), progress(errors, "retraining") as advance:
        objects, function = _found(train, named)
        subsets = _subsets(kind, _counted(objects), count, _SHARE if share is None else share, seed)
        there, models = _there(out, subsets, seed), runs * len(subsets)
        if there:
            errors.print(_going_on(there, models), soft_wrap=True)
        truth = retrained(
            function,
            objects.task,
            objects.queries,
            subsets,
            runs=runs,
            seed=seed,
            out=out,
            data=objects.examples if objects.has("data") and not isinstance(function, Together) else None,
            collate_fn=objects.query_collate_fn,
            progress=advance,
        )
    if json:
        typer.echo(dumps({"path": str(out), **truth.about}))
    else:
        console.print(shown_truth(truth, out))


def _found(train: str, named: Experiment) -> tuple[Objects, Any]:
    """The objects of a ready-made setting or of the user's file, and what trains there."""
    module, colon, _ = train.rpartition(":")
    if train in SETTINGS:
        given = [f"--{option.removesuffix('_fn')}" for option in named.to_json()]
        if given:
            raise ConfigurationError(f"the setting {train} has all that is needed: leave {' and '.join(given)} out.")
        objects = Objects(replace(named, task=train))
        return objects, objects.named("train", "train")
    if not colon:
        raise ConfigurationError(
            f"{train!r} is neither a ready-made setting ({', '.join(SETTINGS)}) nor an import string FILE.py:NAME."
        )
    objects = Objects(replace(named, task=named.task or f"{module}:task"))
    function = objects.named("train", train)
    if not callable(function):
        raise ConfigurationError(
            f"{train} has type {type(function).__name__}, where a function train(subset, seed) is needed, or a "
            "Together."
        )
    return objects, function


def _counted(objects: Objects) -> imprint.Sources:
    """The sources, which know how many examples there are."""
    sources = objects.sources
    if sources.length is not None and not objects.has("data"):
        return sources
    length = length_of(objects.data)
    sources.check(length)
    return replace(sources, length=length)


def _there(out: Path, subsets: Subsets, seed: int) -> int:
    """How many models a folder holds of a truth like this one."""
    folder = TruthFolder(out)
    if not _is_truth(out):
        return 0
    about = folder.request()
    same = about["kind"] == subsets.kind and about["n"] == subsets.n and about["seed"] == seed
    return len(folder.kept(about)) if same and about["subsets"] == len(subsets) else 0


def _going_on(there: int, models: int) -> str:
    if there < models:
        return f"going on: {there:,} of {models:,} models are there"
    return f"all {models:,} models are there already; of a function's one is trained again, to see that it is the same"


@contextmanager
def _interruptible(out: Path) -> Iterator[None]:
    """Say what becomes of a retraining that is interrupted."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and "RuntimeError: KeyboardInterrupt" not in str(error):
            raise
        if any(out.glob("values-*.safetensors")):
            text = f"stopped: finished models are kept in {marked(out)}, the same command again goes on from there"
        else:
            text = "stopped before a first part was finished: the same command again starts over"
        errors.print(text, soft_wrap=True)
        raise KeyboardInterrupt from error  # within its own code torch makes a RuntimeError of it


def _subsets(kind: Kind, sources: imprint.Sources, count: int | None, share: float, seed: int) -> Subsets:
    if kind == "sources":
        return Subsets.without_each(sources)
    if kind == "examples":
        assert sources.length is not None
        return Subsets.without_each(sources.length)
    size = max(1, round((0.5 if kind == "halves" else share) * len(sources)))
    count = count or min(_COUNT, math.comb(len(sources), size))
    if kind == "halves":
        return Subsets.halves(sources, count, seed=seed)
    unions = Subsets.without_some(sources, count, share, seed=seed)
    if size == 1:
        errors.print(
            f"each union is a single source, {share:g} of {len(sources):,}: a larger --share removes several at once",
            soft_wrap=True,
        )
    return unions


def evaluate(
    context: typer.Context,
    store: Annotated[
        Path,
        typer.Argument(
            help="Folder of a store; or a `.safetensors` file of scores, by `imprint attribute --out` or `result.save`."
        ),
    ],
    truth: Annotated[Path, typer.Argument(help="Folder of a truth, made by `imprint retrain`.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    collate: CollateString = None,
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

    - `imprint evaluate runs/news truth/news --task my_model.py:task`

    - `imprint evaluate scores.safetensors truth/news`
    """
    _refuse_slips(store, truth)
    known = Truth.load(truth)
    if store.suffix == ".safetensors":
        given = {"--task": task, "--queries": queries, "--collate": collate, "--readout": readout}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise ConfigurationError(
                f"{store} holds scores, which are compared as they are: leave {' and '.join(unused)} out."
            )
        result = imprint.Attribution.load(store)
    else:
        named = Experiment(task=task, queries=queries, collate_fn=collate)
        result = _attributed(imprint.Store(store), named, readout or "jvp", context)
    metrics = evaluated(result, known)
    if json:
        typer.echo(dumps({"truth": str(truth), "metrics": [metric.to_json() for metric in metrics]}))
    else:
        console.print(shown_metrics(metrics, known))


def _refuse_slips(store: Path, truth: Path) -> None:
    """Say so where the two arguments of `evaluate` are something else, or each other."""
    if store.suffix == ".csv":
        raise ConfigurationError(
            f"{store} is a table, which does not say what its scores are of: give the store, or the file that "
            "`imprint attribute STORE --out scores.safetensors` writes."
        )
    is_scores = truth.suffix == ".safetensors"
    if _is_truth(store) and (is_scores or _is_store(truth)):
        raise ConfigurationError(f"{store} is a truth: it comes second, imprint evaluate {truth} {store}.")
    if _is_truth(store):
        raise ConfigurationError(f"{store} is a truth: the first argument is a store, or a file of scores.")
    if is_scores or _is_store(truth):
        raise ConfigurationError(
            f"{truth} {'holds scores' if is_scores else 'is a store'}: the second argument is a truth, which `imprint "
            "retrain` makes."
        )


def _is_truth(path: Path) -> bool:
    return (path / "truth.json").is_file()


def _is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _attributed(store: imprint.Store, given: Experiment, readout: Any, context: typer.Context) -> imprint.Attribution:
    if given.task is None:
        given = over_store(given, store, ("task", "queries", "collate_fn"), context)
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
