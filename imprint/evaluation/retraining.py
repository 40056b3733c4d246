"""Retrains for ground truth: trains models on every subset of the data, and keeps the measurements as they come."""

import contextlib
import inspect
import logging
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from imprint.data import Collate, Data, query_batches
from imprint.errors import DataError
from imprint.evaluation.models import Models, group_models
from imprint.evaluation.parts import TruthPart, merge_truth, name_models
from imprint.evaluation.requests import describe_request
from imprint.evaluation.subsets import Subsets, require_whole
from imprint.evaluation.together import Together, Train
from imprint.evaluation.truth import TRUTH, Truth, TruthFolder, describe_circumstances
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.executors import Executor, Place, Recipe, run_parts
from imprint.simulation.sharing import open_folder
from imprint.store.fingerprint import of_data, recognise_data, without_adapter
from imprint.store.parts import Part, PartsFolder, Share
from imprint.task import Task, require_task

logger = logging.getLogger(__name__)


def retrain(
    train: Train | Together,
    task: Task,
    queries: Any,
    subsets: Subsets,
    *,
    runs: int = 1,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    data: Any = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    progress: bool | Advance = True,
    executor: Executor | None = None,
) -> Truth:
    """Train a model on every subset, `runs` times, and measure F of the queries under each.

    train: a function of (subset, seed) that returns a trained model, or `Together`, which trains many at once.
    task: measures F; its own model is not trained. For a task with "lora:R", `train` returns models without that
        adapter.
    out: the folder for the values. An interrupted call resumes when it is made again, and more runs add to the folder.
        One finished model is trained again first, to check that `train` is still the same.
    data: the training data, if scores of other data should be refused later.
    executor: where the models are trained in parts, such as `imprint.RayExecutor()` for a Ray cluster; by default they
        are trained here. Needs `out`, a folder that all workers see. `train` says on which device it trains.
    """
    request, work = _prepare(train, task, queries, subsets, runs, seed, data, batch_size, collate_fn)
    runs, seeds = request["runs"], work.seeds
    if executor is not None:
        given = {"train": train, "task": task, "queries": queries, "subsets": subsets, "runs": runs, "seed": seed}
        given |= {"data": data, "batch_size": batch_size, "collate_fn": collate_fn}
        if not (parts := open_folder(out)).holds(TRUTH):
            return _retrain_on(executor, parts, given, work, progress)
        TruthPart(work, request, Share(1, 1), parts.out).make(progress)  # refuses what was begun without parts
    folder = None if out is None else TruthFolder(out)
    bar = Progress("retraining", len(seeds) * work.units, work.unit, progress)
    with folder.opened(request, subsets) if folder else contextlib.nullcontext() as found, contextlib.closing(bar):
        rows = folder.read_values(found) if folder and found else {}
        about = found or {**request, **describe_circumstances(work.at_once(), task.device)}
        about = {**about, "runs": max(about["runs"], runs)}
        tried: dict[int, Tensor] = {}
        if folder and rows:
            bar.skip(sum(model < len(seeds) for model in rows) * work.units)
            work.refuse_changed_training(folder.path, rows, about["noise"], bar)
        if not rows:
            tried, about["noise"] = work.try_training(bar)
        elif runs > 1 and max(rows) < len(subsets):  # with one run so far, the seed was not checked
            tried, _ = work.try_training(bar, rows)
        made = {range(model, model + 1): values for model, values in tried.items() if model not in rows}
        missing = (model for model in range(len(seeds)) if model not in rows and model not in tried)
        for models in [*made, *group_models(subsets.kind, missing, len(subsets), about["at_once"])]:
            values = made[models] if models in made else work.values(models, bar.advance)
            rows |= dict(zip(models, values, strict=True))
            if folder:
                folder.write_request(about, subsets)
                folder.write_values(models, values, about)
    values = torch.stack([rows[model] for model in range(len(seeds))]).reshape(runs, len(subsets), work.count)
    return Truth(subsets, values, work.task.measure_name, {**about, "runs": runs})


def _retrain_on(
    executor: Executor, folder: PartsFolder, given: dict[str, Any], work: Models, progress: bool | Advance
) -> Truth:
    """Train in parts on an executor, and merge them."""
    folder.refuse_other_use("the ground truth")
    count = len(work.seeds)
    how = ("retraining", work.unit, work.task.device.type, partial(name_models, folder, count))
    recipe = Recipe(_make_part, {**given, "out": str(folder.out)}, folder, count, *how)
    run_parts(executor, recipe, progress)
    return merge_truth(folder.out)


def _make_part(part: str, place: Place, *, train: Train | Together, task: Task, **given: Any) -> Part:
    """Train the models of a part wherever an executor runs it."""
    if place.device is not None and not isinstance(train, Together):  # which trains and measures where its data is
        task.model.to(place.device)
    return _retrain_part(part, train, task, same=True, **given)


def retrain_part(
    part: str,
    train: Train | Together,
    task: Task,
    queries: Any,
    subsets: Subsets,
    *,
    out: str | os.PathLike[str],
    runs: int = 1,
    seed: int = 0,
    data: Any = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    progress: bool | Advance = True,
) -> Part:
    """Train one of several parts of the models of `retrain`; `merge_truth(out)` joins all of them.

    part: such as "3/8", the third of eight. Each may be made by another process, on another machine, at any time, and
        gets a folder of its own in `out`.
    out: the folder that the ground truth will be in; the same for all parts, as are all other arguments.

    The first part tries `train`, and how many models are trained together is decided by it for all. Every other part
    trains one of the models that were tried, and refuses a `train` that does not reproduce it. The same call again
    resumes an interrupted part, and returns a finished one.
    """
    given = (queries, subsets, runs, seed, data, batch_size, collate_fn)
    return _retrain_part(part, train, task, *given, out=out, progress=progress)


def _retrain_part(
    part: str,
    train: Train | Together,
    task: Task,
    *given: Any,
    out: str | os.PathLike[str],
    progress: bool | Advance = True,
    same: bool = False,
    **named: Any,
) -> Part:
    """Train a part.

    given, named: the other arguments of `_prepare`.
    same: whether the other parts are known to train by the same function.
    """
    share = Share.parse(part)
    request, work = _prepare(train, task, *given, **named)
    return TruthPart(work, request, share, out, same).make(progress)


def _prepare(
    train: Train | Together,
    task: Task,
    queries: Any,
    subsets: Subsets,
    runs: int,
    seed: int,
    data: Any,
    batch_size: int,
    collate_fn: Collate | None,
) -> tuple[dict[str, Any], Models]:
    """Check the arguments of a retraining; describe it, and return its models."""
    runs = _check_arguments(train, task, subsets, runs)
    task = without_adapter(task)
    known = _load_data(train, task, data, batch_size, collate_fn)
    if known is not None and len(known) != subsets.n:
        raise DataError(f"the subsets are made for {subsets.n} training examples, the data has {len(known)}.")
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    request = describe_request(train, task, subsets, batches, known, runs=runs, seed=seed)
    seeds = [each for run in range(runs) for each in subsets.seeds(run, seed)]
    return request, Models(train, task, batches, subsets, seeds)


def _check_arguments(train: Train | Together, task: Task, subsets: Subsets, runs: int) -> int:
    """Refuse wrong arguments before anything is trained, and return the number of runs."""
    require_task(task)
    if not isinstance(subsets, Subsets):
        raise DataError(
            f"subsets must be a Subsets, got a {type(subsets).__name__}: use Subsets.halves(sources), or "
            "Subsets.without_each(sources)."
        )
    if not isinstance(train, Together):
        _check_signature(train)
    elif train.examples.device.type != task.device.type:
        raise DataError(
            f"models are trained on {train.examples.device} and measured on {task.device}: move the task's model."
        )
    return require_whole("runs", runs, 1)


def _check_signature(train: object) -> None:
    if isinstance(train, nn.Module):
        raise DataError(
            f"train is a model, a {type(train).__name__}: give a function train(subset, seed) that trains one."
        )
    if not callable(train):
        raise DataError(f"train must be a function of (subset, seed) or a Together, got a {type(train).__name__}.")
    try:
        signature = inspect.signature(train)
    except ValueError:  # some callables have no signature
        return
    try:
        signature.bind(torch.arange(1), 0)
    except TypeError as error:
        raise DataError(f"train is called as train(subset, seed), but takes {signature}: {error}.") from error


def _load_data(
    train: Train | Together, task: Task, data: Any, batch_size: int, collate_fn: Collate | None
) -> Data | None:
    """Load the training data, if it is known."""
    given: Data | None = data
    if data is not None and not isinstance(data, Data):
        given = Data(data, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    if given is not None and (example := given.changing_example()) is not None:
        raise DataError(
            f"training example {example} changes each time it is read, as with random augmentation: give the data "
            "without augmentation, or omit data=."
        )
    if not isinstance(train, Together):
        return given
    if given is not None and not recognise_data(of_data(train.examples), given).same:
        raise DataError("data= differs from the data that the Together trains on: omit data=.")
    return train.examples
