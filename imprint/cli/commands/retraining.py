"""Implements `imprint retrain`: ground truth, by training on subsets of the data or by replaying recorded runs."""

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
from imprint.cli.commands.merging import show_part
from imprint.cli.commands.options import AsJson, CollateString, DataString, PartText, QueriesString, SourcesString
from imprint.cli.effects import render_effects
from imprint.cli.experiment import Experiment
from imprint.cli.ground_truth import render_truth
from imprint.cli.loading import Objects
from imprint.cli.terminal import console, errors, escape_markup, redirect_prints, show_progress
from imprint.data import length_of
from imprint.display import count_of
from imprint.errors import ConfigurationError
from imprint.evaluation.effects import list_effects
from imprint.evaluation.replaying import Record, replay_run, replay_seeds
from imprint.evaluation.retraining import retrain as retrain_subsets
from imprint.evaluation.retraining import retrain_part
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together
from imprint.evaluation.truth import Truth, TruthFolder
from imprint.runtime.progress import Advance
from imprint.store.parts import PartsFolder, Share

Removal = Literal["halves", "sources", "examples", "unions"]
How = Literal["retrain", "replays", "run"]
_COUNT, _SHARE = 100, 0.2  # defaults, for halves and unions


def retrain(
    train: Annotated[
        str,
        typer.Argument(
            metavar="SETTING|FILE.py:NAME",
            help=f"A built-in setting: {', '.join(SETTINGS)}; or your own function `train(subset, seed)`, which "
            "returns a model trained on the examples whose indices are in `subset`; with `--run`, your task.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write the ground truth to.")],
    kind: Annotated[
        Removal | None,
        typer.Option(
            help="What to train on: random `halves` of the sources; all but each of the `sources`; all but each of the "
            "`examples`; or all but random `unions` of sources. Default: `halves`, and `sources` for replays, which "
            "start from a run on all data.",
            show_default=False,
        ),
    ] = None,
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
    replay: Annotated[
        bool,
        typer.Option(
            "--replay",
            help="Record `--runs` training runs on all data and replay each of them without the sources, in place of "
            "training on what is left: the same expectation with far less noise. Your file needs a function "
            "`record(seed, folder)`, unless it trains by a `Together`.",
        ),
    ] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            help="The folder of a recorded run, to replay this very run without the sources.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
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
    part: PartText = None,
    json: AsJson = False,
) -> None:
    """Retrain on subsets of the data and measure every query: the ground truth that `imprint evaluate` compares with.

    A built-in setting needs nothing else. For your own function, `task`, `sources` and `queries` are looked up in its
    file, and `data` too, if it is there, so that scores of other data can be refused. The task defines what is
    measured; its own model is not trained. Small models are trained many at once (the built-in settings, or an
    `imprint.evaluation.Together` in your file); a function is called once for each model.

    Retraining and `--replay` tell what a removal does to models trained like this, on average over seeds (`expected`);
    `--run` tells what it would have done to the model of one recorded run (`this_run`).

    Prints what each source does if it was left out by itself (`--kind sources`): the mean effect over queries, with its
    standard error over runs. Writes the measurements to the folder. An interrupted command resumes when you run it
    again; a larger `--runs` adds runs to the same folder.

    For example:

    - `imprint retrain digits --runs 4 --out truth/digits`, to compare with scores of `imprint simulate digits`

    - `imprint retrain my_model.py:train --kind sources --runs 4 --out truth/news`

    - `imprint retrain my_model.py:task --run runs/train --kind unions --out truth/this-run`

    - `imprint retrain my_model.py:train --runs 4 --out truth/news --part 3/8`, to train the third of eight parts of the
      models
    """
    how: How = "run" if run is not None else "replays" if replay else "retrain"
    if part is not None and how != "retrain":
        raise ConfigurationError(
            "--part divides models that are trained anew; replays are divided by `imprint simulate --run --part`, "
            "which repeats a run without each source."
        )
    kind = _choose_kind(how, kind, count, share, runs, both=replay and run is not None)
    named = Experiment(task=task, data=data, sources=sources, queries=queries, collate_fn=collate, device=device)
    own = out if part is None else PartsFolder(out).of(Share.parse(part))  # where this command writes
    with redirect_prints(), _explain_interruption(own), show_progress(errors, "retraining") as advance:
        objects, function = _load_training(train, named, how)
        subsets = _make_subsets(kind, _load_sources(objects), count, _SHARE if share is None else share, seed)
        done, models = _count_finished(own, subsets, seed), runs * len(subsets)
        if done:
            errors.print(_describe_resuming(done, models, how, part), soft_wrap=True)
        options: dict[str, Any] = {"runs": runs, "seed": seed, "out": out, "part": part, "progress": advance}
        truth = _make_truth(objects, run or function, how, subsets, **options)
    if isinstance(truth, imprint.Part):
        show_part(truth, out, json=json)
        return
    if json:
        effects = [effect.to_json() for effect in list_effects(truth)]
        typer.echo(dumps({"path": str(out), **truth.about, "question": truth.question, "effects": effects}))
    else:
        console.print(render_truth(truth, out))
        console.print(render_effects(truth))


def _choose_kind(
    how: How, kind: Removal | None, count: int | None, share: float | None, runs: int, both: bool
) -> Removal:
    """Return what to train on; refuse options that do not go together."""
    if both:
        raise ConfigurationError(
            "--replay records runs of its own, --run replays a given one: use one of them, for the question you ask."
        )
    if how == "run" and runs > 1:
        raise ConfigurationError("--run replays one run: omit --runs, or use --replay to record several.")
    if how != "retrain" and kind == "halves":
        raise ConfigurationError(
            "a replay leaves sources out of a run on all data, which is no training on halves: use --kind sources or "
            "--kind unions."
        )
    kind = kind or ("halves" if how == "retrain" else "sources")
    if count is not None and kind in ("sources", "examples"):
        raise ConfigurationError(f"--count applies to halves and unions: --kind {kind} leaves out each one in turn.")
    if share is not None and kind != "unions":
        raise ConfigurationError(f"--share applies to unions, not to {kind}.")
    return kind


def _make_truth(
    objects: Objects,
    train: Any,
    how: How,
    subsets: Subsets,
    *,
    runs: int,
    seed: int,
    out: Path,
    part: str | None,
    progress: bool | Advance,
) -> Truth | imprint.Part:
    """Retrain or replay; `train` is the function that trains or records, or the folder of a recorded run."""
    if how == "retrain":
        given: tuple[Any, ...] = (train, objects.task, objects.queries, subsets)
        options: dict[str, Any] = {"runs": runs, "seed": seed, "out": out, "progress": progress}
        options["data"] = objects.examples if objects.has("data") and not isinstance(train, Together) else None
        options["collate_fn"] = objects.query_collate_fn
        return retrain_subsets(*given, **options) if part is None else retrain_part(part, *given, **options)
    known = (objects.task, objects.data, objects.queries, subsets)
    collate = objects.examples_collate_fn
    if how == "run":
        return replay_run(train, *known, out=out, collate_fn=collate, progress=progress)
    return replay_seeds(train, *known, runs=runs, seed=seed, out=out, collate_fn=collate, progress=progress)


def _load_training(train: str, named: Experiment, how: How) -> tuple[Objects, Any]:
    """Load the objects of a built-in setting or of the user's file, and the function that trains or records."""
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
    if how == "run":
        return Objects(replace(named, task=named.task or train)), None
    objects = Objects(replace(named, task=named.task or f"{module}:task"))
    function = objects.find("train", train)
    if how == "replays" and not isinstance(function, Together):
        return objects, find_record(objects, module)
    if not callable(function):
        raise ConfigurationError(
            f"{train} must be a function train(subset, seed), or a Together; it is a {type(function).__name__}."
        )
    return objects, function


def find_record(objects: Objects, module: str) -> Record:
    """Find the function of the user's file that records a training run."""
    try:
        function: Record = objects.find("record", f"{module}:record")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{module} has no function record(seed, folder), which replays over seeds need: it trains on "
            "all data from a seed with an imprint.RunRecorder of that folder."
        ) from error
    if not callable(function):
        raise ConfigurationError(
            f"{module}:record must be a function record(seed, folder); it is a {type(function).__name__}."
        )
    return function


def is_truth(path: Path) -> bool:
    """Tell whether a folder holds ground truth."""
    return (path / "truth.json").is_file()


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
    if not is_truth(out):
        return 0
    about = folder.read_request()
    same = about["kind"] == subsets.kind and about["n"] == subsets.n and about["seed"] == seed
    return len(folder.read_values(about)) if same and about["subsets"] == len(subsets) else 0


def _describe_resuming(done: int, models: int, how: How, part: str | None) -> str:
    if part is not None:  # how many it has follows from how many are trained together
        return f"{count_of(done, 'model')} of part {part} {'is' if done == 1 else 'are'} finished"
    if done < models:
        return f"resuming: {done:,} of {models:,} models are finished"
    again = "; your own function trains one again, to check that it still matches" if how == "retrain" else ""
    return f"all {models:,} models are finished{again}"


@contextmanager
def _explain_interruption(out: Path) -> Iterator[None]:
    """Say whether an interrupted retraining will resume."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt) and "RuntimeError: KeyboardInterrupt" not in str(error):
            raise
        if any(out.rglob("values-*.safetensors")):
            text = f"stopped: finished models are in {escape_markup(out)}, the same command will resume from there"
        else:
            text = "stopped before the first models were finished: the same command will start over"
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
