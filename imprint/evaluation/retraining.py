"""Retraining for the truth: a model on every subset of the data, several times over, measured and kept as it comes."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint.data import Collate, Data, query_batches
from imprint.errors import DataError, TaskError
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.training import Training, initialised, measured, models_at_once, train_together
from imprint.evaluation.truth import SCHEMA, Folder, Truth, of_subsets, together
from imprint.fingerprint import of_batches, of_data
from imprint.progress import Advance, Progress
from imprint.store import describe
from imprint.task import Batch, Task

Train = Callable[[Tensor, int], nn.Module]
"""train(subset, seed) -> model: subset holds the indices of the training examples."""


@dataclass(frozen=True)
class Together:
    """Trains many small models as one computation; called like a `Train`, it trains one of them.

    build: makes a freshly initialised model from torch's global random state.
    task_of: the task of a model, whose loss is trained on.
    at_once: how many models; by default what suits the device.
    """

    build: Callable[[], nn.Module]
    task_of: Callable[[nn.Module], Task]
    data: Data
    training: Training
    at_once: int | None = None

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        stack = train_together(self.build, self.task_of, self.data, [subset], [seed], self.training)
        model = initialised(self.build, seed).to(self.data.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stack[self.training.epochs][name][0])
        return model.eval()


def retrain(
    train: Train | Together,
    task: Task,
    queries: Any,
    subsets: Subsets,
    *,
    runs: int = 1,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    progress: bool | Advance = True,
) -> Truth:
    """Train a model on every subset, `runs` times over, and measure F of the queries under each.

    train: a function of (subset, seed) that returns a trained model, or `Together`, which trains many at once.
    task: measures F; its own model is not trained.
    out: folder to keep the values in; a call that was killed goes on when it is made again, and a finished one returns.
    """
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    count = sum(size for size, _ in batches)
    _check(train, task, subsets, runs)
    request: dict[str, Any] = {
        "schema": SCHEMA,
        **{"kind": subsets.kind, "n": subsets.n, "runs": runs, "seed": seed, "subsets": len(subsets)},
        **{"queries": count, "measure": task.measure_name, "better": task.better},
        "training": asdict(train.training) if isinstance(train, Together) else getattr(train, "__qualname__", "train"),
        "fingerprints": _fingerprints(train, task, subsets, batches),
    }
    at_once = _at_once(train, runs * len(subsets))
    unit = "model-epochs" if isinstance(train, Together) else "models"
    bar = Progress("retraining", runs * len(subsets) * _units(train), unit, progress)
    folder = None if out is None else Folder(Path(out))
    seeds = [each for run in range(runs) for each in subsets.seeds(run, runs, seed)]
    with folder.opened(request, subsets, at_once) if folder else contextlib.nullcontext({"at_once": at_once}) as found:
        rows: list[Tensor] = []
        spans = together(subsets.kind, runs, len(subsets), found["at_once"])
        if not isinstance(train, Together) and (folder is None or folder.part(spans[0], count) is None):
            _refuse_deaf(train, task, subsets, batches, runs, seed)
        try:
            for models in spans:
                kept = folder.part(models, count) if folder else None
                if kept is None:
                    chosen = [subsets.examples(model % len(subsets)) for model in models]
                    kept = _measured(train, task, chosen, [seeds[model] for model in models], batches, bar.advance)
                    if folder:
                        folder.keep(models, kept)
                else:
                    bar.advance(len(models) * _units(train))
                rows.append(kept)
        finally:
            bar.close()
    values = torch.cat(rows).reshape(runs, len(subsets), count)
    return Truth(subsets, values, task.measure_name, request)


def _measured(
    train: Train | Together,
    task: Task,
    chosen: list[Tensor],
    seeds: list[int],
    batches: list[tuple[int, Batch]],
    advance: Callable[[int], None],
) -> Tensor:
    """Train some models and measure F of the queries under them, shape (models, queries)."""
    if isinstance(train, Together):
        stack = train_together(train.build, train.task_of, train.data, chosen, seeds, train.training, on_epoch=advance)[
            train.training.epochs
        ]
        parts = [measured(task, stack, batch, size) for size, batch in batches]
        values = torch.cat(parts, dim=1).double().cpu()
    else:
        values = torch.stack([_under(task, train(s, seed), batches) for s, seed in zip(chosen, seeds, strict=True)])
        advance(len(seeds))
    if not bool(values.isfinite().all()):
        model, query = (~values.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"query {query} is {float(values[model, query])} under the model retrained with seed {seeds[model]}: "
            "the training diverged."
        )
    return values


def _under(task: Task, model: object, batches: list[tuple[int, Batch]]) -> Tensor:
    """F of the queries under one model, shape (queries,)."""
    if not isinstance(model, nn.Module):
        raise DataError(f"train(subset, seed) must return the trained model, got a {type(model).__name__}.")
    model.eval()
    with torch.no_grad():
        values = [task.measure(model, batch).double().cpu() for _, batch in batches]
    for (size, _), value in zip(batches, values, strict=True):
        if tuple(value.shape) != (size,):
            raise TaskError(f"measure must return one value per query, shape ({size},); got {tuple(value.shape)}.")
    return torch.cat(values)


def _check(train: Train | Together, task: Task, subsets: Subsets, runs: int) -> None:
    """Refuse what can be known to be wrong before anything is trained."""
    if runs < 1:
        raise DataError(f"runs must be at least 1, got {runs}.")
    if not isinstance(train, Together):
        return
    if len(train.data) != subsets.n:
        raise DataError(f"the subsets are of {subsets.n} training examples, the data has {len(train.data)}.")
    if train.data.device.type != task.device.type:
        raise DataError(
            f"models are trained on {train.data.device} and measured on {task.device}: move the task's model."
        )


def _refuse_deaf(
    train: Train, task: Task, subsets: Subsets, batches: list[tuple[int, Batch]], runs: int, seed: int
) -> None:
    """Refuse a `train` that ignores its subset, or its seed where there are several runs."""
    first = subsets.examples(0)
    other = next((s for i in range(len(subsets)) if not torch.equal(s := subsets.examples(i), first)), None)
    value = _under(task, train(first, seed), batches)
    if other is not None and torch.equal(value, _under(task, train(other, seed), batches)):
        raise DataError("train(subset, seed) gives the same model for two different subsets: it ignores its subset.")
    if runs > 1 and torch.equal(value, _under(task, train(first, seed + 1), batches)):
        raise DataError(
            "train(subset, seed) gives the same model for two seeds: it ignores its seed, and several runs would be "
            "copies of one. Seed the initialisation and the order of the data with it, or ask for one run."
        )


def _fingerprints(
    train: Train | Together, task: Task, subsets: Subsets, batches: list[tuple[int, Batch]]
) -> dict[str, Any]:
    return {
        **of_subsets(subsets),
        "queries": of_batches(batches),
        "parameters": describe(task),
        "data": of_data(train.data) if isinstance(train, Together) else None,
    }


def _units(train: Train | Together) -> int:
    return train.training.epochs if isinstance(train, Together) else 1


def _at_once(train: Train | Together, count: int) -> int:
    if not isinstance(train, Together):
        return 1
    most = train.at_once or models_at_once(train.build, train.task_of, train.data, train.training)
    return min(count, most)
