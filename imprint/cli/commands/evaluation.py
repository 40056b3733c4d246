"""Implements `imprint retrain` and `imprint evaluate`: ground truth, and how close scores come to it."""

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
from imprint.cli.commands.repeating import merge_with_store
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.cli.terminal import (
    console,
    errors,
    escape_markup,
    redirect_prints,
    render_metrics,
    render_truth,
    show_progress,
)
from imprint.data import length_of
from imprint.errors import ConfigurationError
from imprint.evaluation.metrics import evaluate as evaluate_scores
from imprint.evaluation.retraining import retrain as retrain_subsets
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together
from imprint.evaluation.truth import Truth, TruthFolder
from imprint.store.manifest import MANIFEST

Removal = Literal["halves", "sources", "examples", "unions"]
_COUNT, _SHARE = 100, 0.2  # defaults, for halves and unions


def retrain(
    train: Annotated[
        str,
        typer.Argument(
            metavar="SETTING|FILE.py:NAME",
            help=f"A built-in setting: {', '.join(SETTINGS)}; or your own function `train(subset, seed)`, which "
            "returns a model trained on the examples whose indices are in `subset`.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write the ground truth to.")],
    kind: Annotated[
        Removal,
        typer.Option(
            help="What to train on: random `halves` of the sources; all but each of the `sources`; all but each of the "
            "`examples`; or all but random `unions` of sources."
        ),
    ] = "halves",
    count: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many halves or unions. Default: 100, or all there are if fewer.", show_default=False
        ),
    ] = None,
    share: Annotated[
        float | None, typer.Option(help="The share of the sources in a union. Default: 0.2.", show_default=False)
    ] = None,
    runs: Annotated[
        int,
        typer.Option(min=1, help="How many models to train on each subset; two or more reveal the noise of training."),
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the subsets and of the training runs.")] = 0,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="The task, which defines the measurement. Default: `task` beside `train`."
        ),
    ] = None,
    data: DataString = None,
    sources: SourcesString = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="The device to use, such as `cuda`; for your own function, the device of the models it returns."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Retrain on subsets of the data and measure every query: the ground truth that `imprint evaluate` compares with.

    A built-in setting needs nothing else. For your own function, `task`, `sources` and `queries` are looked up in its
    file, and `data` too, if it is there, so that scores of other data can be refused. The task defines what is
    measured; its own model is not trained. Small models are trained many at once (the built-in settings, or an
    `imprint.evaluation.Together` in your file); a function is called once for each model.

    Writes the measurements to the folder. An interrupted command resumes when you run it again; a larger `--runs` adds
    runs to the same folder.

    For example:

    - `imprint retrain digits --runs 4 --out truth/digits`, to compare with scores of `imprint simulate digits`

    - `imprint retrain my_model.py:train --kind sources --runs 4 --out truth/news`
    """
    if count is not None and kind in ("sources", "examples"):
        raise ConfigurationError(f"--count applies to halves and unions: --kind {kind} leaves out each one in turn.")
    if share is not None and kind != "unions":
        raise ConfigurationError(f"--share applies to unions, not to {kind}.")
    named = Experiment(task=task, data=data, sources=sources, queries=queries, collate_fn=collate, device=device)
    with redirect_prints(), _explain_interruption(out), show_progress(errors, "retraining") as advance:
        objects, function = _load_training(train, named)
        subsets = _make_subsets(kind, _load_sources(objects), count, _SHARE if share is None else share, seed)
        done, models = _count_finished(out, subsets, seed), runs * len(subsets)
        if done:
            errors.print(_describe_resuming(done, models), soft_wrap=True)
        truth = retrain_subsets(
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
        console.print(render_truth(truth, out))


def _load_training(train: str, named: Experiment) -> tuple[Objects, Any]:
    """Load the objects of a built-in setting or of the user's file, and the function that trains."""
    module, colon, _ = train.rpartition(":")
    if train in SETTINGS:
        given = [f"--{option.removesuffix('_fn')}" for option in named.to_json()]
        if given:
            raise ConfigurationError(f"the built-in setting {train} needs no {' or '.join(given)}: omit it.")
        objects = Objects(replace(named, task=train))
        return objects, objects.find("train", "train")
    if not colon:
        raise ConfigurationError(
            f"{train!r} is neither a built-in setting ({', '.join(SETTINGS)}) nor an import string FILE.py:NAME."
        )
    objects = Objects(replace(named, task=named.task or f"{module}:task"))
    function = objects.find("train", train)
    if not callable(function):
        raise ConfigurationError(
            f"{train} must be a function train(subset, seed), or a Together; it is a {type(function).__name__}."
        )
    return objects, function


def _load_sources(objects: Objects) -> imprint.Sources:
    """Load the sources, with the number of training examples."""
    sources = objects.sources
    if sources.length is not None and not objects.has("data"):
        return sources
    length = length_of(objects.data)
    sources.check(length)
    return replace(sources, length=length)


def _count_finished(out: Path, subsets: Subsets, seed: int) -> int:
    """Count the models that a folder holds of the same ground truth."""
    folder = TruthFolder(out)
    if not _is_truth(out):
        return 0
    about = folder.read_request()
    same = about["kind"] == subsets.kind and about["n"] == subsets.n and about["seed"] == seed
    return len(folder.read_values(about)) if same and about["subsets"] == len(subsets) else 0


def _describe_resuming(done: int, models: int) -> str:
    if done < models:
        return f"resuming: {done:,} of {models:,} models are finished"
    return f"all {models:,} models are finished; your own function trains one again, to check that it still matches"


@contextmanager
def _explain_interruption(out: Path) -> Iterator[None]:
    """Say whether an interrupted retraining will resume."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and "RuntimeError: KeyboardInterrupt" not in str(error):
            raise
        if any(out.glob("values-*.safetensors")):
            text = f"stopped: finished models are in {escape_markup(out)}, the same command will resume from there"
        else:
            text = "stopped before the first part was finished: the same command will start over"
        errors.print(text, soft_wrap=True)
        raise KeyboardInterrupt from error  # torch turns it into a RuntimeError inside its own code


def _make_subsets(kind: Removal, sources: imprint.Sources, count: int | None, share: float, seed: int) -> Subsets:
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
            f"each union is a single source ({share:g} of {len(sources):,}): use a larger --share to remove several "
            "at once",
            soft_wrap=True,
        )
    return unions


def evaluate(
    context: typer.Context,
    store: Annotated[
        Path,
        typer.Argument(
            help="A store's folder, or a `.safetensors` file of scores from `imprint attribute --out` or `result.save`."
        ),
    ],
    truth: Annotated[Path, typer.Argument(help="A folder of ground truth, from `imprint retrain`.")],
    task: StoreTask = None,
    queries: QueriesString = None,
    collate: CollateString = None,
    readout: Annotated[
        str | None,
        typer.Option(
            help="How to read out scores: `jvp` (the default), `central`, `literal` or `gradient`.", show_default=False
        ),
    ] = None,
    across: Annotated[
        bool,
        typer.Option(
            "--across",
            help="Compare scores of one question with ground truth of the other, refused by default.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Compare scores with ground truth, and with the best that any scores could achieve.

    The metrics depend on what the models were retrained on. Random halves give the linear datamodelling score (LDS);
    removed sources give the correlation, rank correlation and slope; removed examples give the leave-one-out
    correlation. Each metric comes with a 95% interval over queries, and with the ceiling set by the noise of
    retraining. Writes nothing.

    Scores and ground truth answer one of two questions: what a removal does to the model of this very run
    (`this_run`), or to models trained like it on average (`expected`). Scores of one question are compared with ground
    truth of the other only with `--across`.

    The queries must be the same as those of the ground truth, in the same order. To scale effects to the sizes seen in
    retraining, use `result.calibrate(truth)` in Python.

    For example:

    - `imprint evaluate runs/news truth/news --task my_model.py:task`

    - `imprint evaluate scores.safetensors truth/news`
    """
    _refuse_wrong_paths(store, truth)
    known = Truth.load(truth)
    if store.suffix == ".safetensors":
        given = {"--task": task, "--queries": queries, "--collate": collate, "--readout": readout}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise ConfigurationError(f"{store} holds finished scores, which need no {' or '.join(unused)}: omit it.")
        result = imprint.Attribution.load(store)
    else:
        named = Experiment(task=task, queries=queries, collate_fn=collate)
        result = _attribute(imprint.Store(store), named, readout or "jvp", context)
    metrics = evaluate_scores(result, known, across=across)
    if json:
        found = [metric.to_json() for metric in metrics]
        typer.echo(dumps({"truth": str(truth), "question": known.question, "metrics": found}))
    else:
        console.print(render_metrics(metrics, known))


def _refuse_wrong_paths(store: Path, truth: Path) -> None:
    """Refuse arguments of `evaluate` that are swapped, or not a store and a ground truth."""
    if store.suffix == ".csv":
        raise ConfigurationError(
            f"{store} is a table, which does not record what its scores belong to: give the store, or the file written "
            "by `imprint attribute STORE --out scores.safetensors`."
        )
    is_scores = truth.suffix == ".safetensors"
    if _is_truth(store) and (is_scores or _is_store(truth)):
        raise ConfigurationError(f"{store} is a ground truth and comes second: imprint evaluate {truth} {store}.")
    if _is_truth(store):
        raise ConfigurationError(f"{store} is a ground truth: the first argument must be a store, or a file of scores.")
    if is_scores or _is_store(truth):
        raise ConfigurationError(
            f"{truth} {'holds scores' if is_scores else 'is a store'}: the second argument must be a ground truth, "
            "from `imprint retrain`."
        )


def _is_truth(path: Path) -> bool:
    return (path / "truth.json").is_file()


def _is_store(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _attribute(store: imprint.Store, given: Experiment, readout: Any, context: typer.Context) -> imprint.Attribution:
    if given.task is None:
        given = merge_with_store(given, store, ("task", "queries", "collate_fn"), context)
    with redirect_prints(), show_progress(errors, "attributing") as advance:
        objects = Objects(given)
        return imprint.attribute(
            objects.task,
            store,
            objects.queries,
            readout=readout,
            collate_fn=objects.query_collate_fn,
            progress=advance,
        )
