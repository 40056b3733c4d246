"""Retraining for the truth: a model on every subset of the data, several times over, measured and kept as it comes."""

import contextlib
import inspect
import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint.data import Collate, Data, query_batches
from imprint.errors import DataError, StoreError, TaskError
from imprint.evaluation.subsets import ORDER, Subsets, derived
from imprint.evaluation.training import Training, initialised, measured, models_at_once, train_together
from imprint.evaluation.truth import SCHEMA, Folder, Truth, circumstances, of_subsets, together
from imprint.fingerprint import of_batches, of_data, of_tensors, probe_losses, probe_measures
from imprint.progress import Advance, Progress
from imprint.store import describe
from imprint.task import Batch, Parameters, Task

logger = logging.getLogger(__name__)
Train = Callable[[Tensor, int], nn.Module]
"""train(subset, seed) -> model: subset holds the indices of the training examples."""
_SAME = 1e-3  # of the length of the parameters, or of the spread over subsets: what counts as the same model
_SMALL = 0.1  # of the spread over subsets: a deviation that changes no truth


@dataclass(frozen=True)
class Together:
    """Trains many small models as one computation; called like a `Train`, it trains one of them.

    build: makes a freshly initialised model from torch's global random state.
    task_of: the task of a model, whose loss is trained on; weight decay is that of `training`, not of a regulariser.
    at_once: how many models; by default what suits the device.
    """

    build: Callable[[], nn.Module]
    task_of: Callable[[nn.Module], Task]
    data: Data
    training: Training
    at_once: int | None = None

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        stack = self.stack([subset], [seed])
        model = initialised(self.build, seed).to(self.data.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stack[name][0])
        return model.eval()

    def stack(
        self, subsets: list[Tensor], seeds: list[int], on_epoch: Callable[[int], None] = lambda models: None
    ) -> Parameters:
        """The stacked parameters of one model for each subset and seed."""
        orders = [derived(seed, ORDER) for seed in seeds]
        kept = train_together(
            self.build, self.task_of, self.data, subsets, seeds, self.training, orders=orders, on_epoch=on_epoch
        )
        return kept[self.training.epochs]


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
    _check(train, task, subsets, runs)
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    request = _request(train, task, subsets, batches, runs, seed)
    seeds = [each for run in range(runs) for each in subsets.seeds(run, seed)]
    work = _Work(train, task, batches, subsets, seeds)
    folder = None if out is None else Folder(Path(out))
    bar = Progress("retraining", len(seeds) * work.units, work.unit, progress)
    with folder.opened(request, subsets) if folder else contextlib.nullcontext() as found, contextlib.closing(bar):
        about = found or {**request, **circumstances(work.at_once(), task.device)}
        spans = together(subsets.kind, runs, len(subsets), about["at_once"])
        rows = folder.kept(spans, work.count) if folder and found else {}

        def keep(models: range, values: Tensor) -> None:
            rows[models.start] = values
            if folder:
                folder.begin(about, subsets)
                folder.keep(models, values)

        if folder and rows:
            bar.skip(sum(map(len, rows.values())) * work.units)
            if len(rows) < len(spans):
                work.refuse_another(folder.path, rows, about["noise"], bar)
        else:
            tried, about["noise"] = work.tried(bar)
            for model, values in tried.items():
                keep(range(model, model + 1), values)
        for models in spans:
            if models.start not in rows:
                keep(models, work.values(models, bar.advance))
    values = torch.cat([rows[models.start] for models in spans]).reshape(runs, len(subsets), work.count)
    return Truth(subsets, values, task.measure_name, about)


@dataclass(frozen=True)
class _Work:
    """The models of a truth, of which number run · subsets + i is trained on subset i."""

    train: Train | Together
    task: Task
    batches: list[tuple[int, Batch]]
    subsets: Subsets
    seeds: list[int]

    @property
    def count(self) -> int:
        return sum(size for size, _ in self.batches)

    @property
    def unit(self) -> str:
        return "model-epochs" if isinstance(self.train, Together) else "models"

    @property
    def units(self) -> int:
        """How many units a model is."""
        return self.train.training.epochs if isinstance(self.train, Together) else 1

    def at_once(self) -> int:
        if not isinstance(self.train, Together):
            return 1
        how = self.train
        return min(len(self.seeds), how.at_once or models_at_once(how.build, how.task_of, how.data, how.training))

    def values(self, models: range, advance: Callable[[int], None]) -> Tensor:
        """Train some models and measure F of the queries under them, shape (models, queries)."""
        chosen, seeds = [self._examples(model) for model in models], [self.seeds[model] for model in models]
        if isinstance(self.train, Together):
            stack = self.train.stack(chosen, seeds, advance)
            parts = [measured(self.task, stack, batch, size) for size, batch in self.batches]
            return _finite(torch.cat(parts, dim=1).double().cpu(), seeds)
        values = []
        for subset, seed in zip(chosen, seeds, strict=True):
            values.append(self._under(self.train(subset, seed), seed))
            advance(1)
        return torch.cat(values)

    def tried(self, bar: Progress) -> tuple[dict[int, Tensor], float]:
        """Refuse a `train` that ignores its subset, or its seed where there are several runs.

        Gives F under those of the models trained for it that are needed anyway, shape (1, queries) each, and by how
        much F differs between two models of one subset and seed.
        """
        if isinstance(self.train, Together):
            return {}, 0.0
        count, seed, train = len(self.subsets), self.seeds[0], self.train
        first = self._examples(0)
        other = next((i for i in range(1, count) if not torch.equal(self._examples(i), first)), None)
        bar.total += 1 + (other is not None and self.seeds[other] != seed)
        rows: dict[int, Tensor] = {}

        def made(subset: Tensor, seed: int) -> tuple[Parameters, Tensor]:
            model = train(subset, seed)
            values = self._under(model, seed)
            bar.advance()
            return {name: t.detach().clone() for name, t in model.state_dict().items() if isinstance(t, Tensor)}, values

        state, rows[0] = made(first, seed)
        if other is not None:
            another, values = made(self._examples(other), seed)
            if _equal(state, another):
                raise DataError(
                    "train(subset, seed) gives the same model for two different subsets: it ignores its subset."
                )
            if self.seeds[other] == seed:
                rows[other] = values
        if len(self.seeds) > count:
            another, rows[count] = made(first, self.seeds[count])
            if _equal(state, another):
                raise DataError(
                    "train(subset, seed) gives the same model for two seeds: it ignores its seed, and several runs "
                    "would be copies of one. Seed the initialisation and the order of the data with it, or ask for one "
                    "run."
                )
        again, values = made(first, seed)
        if (apart := _distance(state, again)) > _SAME:
            more = ", or models will differ by more than what they lack" if self.subsets.kind == "removal" else ""
            logger.warning(
                "train(subset, seed) gives two models for one subset and seed, which are %.2g of their length apart: "
                "seed everything with `seed`%s",
                apart,
                more,
            )
        return rows, _size(values - rows[0])

    def refuse_another(self, path: Path, kept: dict[int, Tensor], noise: float, bar: Progress) -> None:
        """Refuse a `train` that no longer gives the models that are kept: the first of them is trained once more."""
        if isinstance(self.train, Together):
            return
        bar.total += 1
        model, values = next(iter(kept.items()))
        moved = _size(self.values(range(model, model + 1), bar.advance) - values)
        spread = _size(torch.cat(list(kept.values())).std(0)) if len(kept) > 1 else _size(values)
        if moved > max(_SMALL * spread, 3 * noise):
            raise StoreError(
                f"{path} holds models of another train(subset, seed): trained again, model {model} has an F that is "
                f"{moved:.2g} away, where subsets differ by {spread:.2g}. Give the function that began it, or a new "
                "folder."
            )
        if moved > _SAME * spread:
            logger.warning(
                "train(subset, seed) does not quite give the models in %s again: F of model %d is %.2g away, where "
                "subsets differ by %.2g",
                path,
                model,
                moved,
                spread,
            )

    def _examples(self, model: int) -> Tensor:
        return self.subsets.examples(model % len(self.subsets))

    def _under(self, model: object, seed: int) -> Tensor:
        """F of the queries under one model, shape (1, queries)."""
        if not isinstance(model, nn.Module):
            raise DataError(f"train(subset, seed) must return the trained model, got a {type(model).__name__}.")
        model.eval()
        with torch.no_grad():
            values = [self.task.measure(model, batch).double().cpu() for _, batch in self.batches]
        for (size, _), value in zip(self.batches, values, strict=True):
            if tuple(value.shape) != (size,):
                raise TaskError(f"measure must return one value per query, shape ({size},); got {tuple(value.shape)}.")
        return _finite(torch.cat(values)[None], [seed])


def _finite(values: Tensor, seeds: list[int]) -> Tensor:
    if not bool(values.isfinite().all()):
        model, query = (~values.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"query {query} is {float(values[model, query])} under the model retrained with seed {seeds[model]}: "
            "the training diverged."
        )
    return values


def _equal(first: Parameters, second: Parameters) -> bool:
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


def _distance(first: Parameters, second: Parameters) -> float:
    """Between two models, relative to the length of the first."""
    pairs = [(t.double(), second[name].double()) for name, t in first.items()]
    length = sum(float(a.square().sum()) for a, _ in pairs)
    return float((sum(float((a - b).square().sum()) for a, b in pairs) / length) ** 0.5) if length else 0.0


def _size(values: Tensor) -> float:
    """The root of the mean square."""
    return float(values.square().mean().sqrt())


def _check(train: Train | Together, task: Task, subsets: Subsets, runs: int) -> None:
    """Refuse what can be known to be wrong before anything is trained."""
    if not isinstance(task, Task):
        raise TaskError(f"task must be an imprint.Task, got a {type(task).__name__}: imprint.Task(model, loss=...).")
    if not isinstance(subsets, Subsets):
        raise DataError(
            f"subsets must be made by Subsets, got a {type(subsets).__name__}: Subsets.halves(sources), or "
            "Subsets.without_each(sources)."
        )
    if runs < 1:
        raise DataError(f"runs must be at least 1, got {runs}.")
    if not isinstance(train, Together):
        _check_signature(train)
        return
    if len(train.data) != subsets.n:
        raise DataError(f"the subsets are of {subsets.n} training examples, the data has {len(train.data)}.")
    if train.data.device.type != task.device.type:
        raise DataError(
            f"models are trained on {train.data.device} and measured on {task.device}: move the task's model."
        )


def _check_signature(train: object) -> None:
    if not callable(train):
        raise DataError(f"train must be a function of (subset, seed) or a Together, got a {type(train).__name__}.")
    try:
        signature = inspect.signature(train)
    except ValueError:  # some callables do not tell
        return
    try:
        signature.bind(torch.arange(1), 0)
    except TypeError as error:
        raise DataError(f"train is called as train(subset, seed), this one takes {signature}: {error}.") from error


def _request(
    train: Train | Together, task: Task, subsets: Subsets, batches: list[tuple[int, Batch]], runs: int, seed: int
) -> dict[str, Any]:
    """What a truth is of, as far as it can be known, in plain JSON values."""
    fingerprints = {**of_subsets(subsets), "queries": of_batches(batches), "parameters": describe(task)}
    model, losses = None, []
    if isinstance(train, Together):
        initial = train.task_of(initialised(train.build, 0).to(train.data.device))
        if _shapes(initial) != _shapes(task):
            raise DataError("the task measures another model than those that are trained: give it one made by `build`.")
        functional, theta = initial.at(initial.state())
        with initial.evaluating():
            losses = probe_losses(functional, theta, train.data)
        model = re.sub(r" at 0x[0-9a-f]+", "", repr(initial.model)).splitlines()
        fingerprints |= {"data": of_data(train.data), "initial model": of_tensors(initial.state())}
    request = {
        "schema": SCHEMA,
        **{"kind": subsets.kind, "n": subsets.n, "runs": runs, "seed": seed, "subsets": len(subsets)},
        **{"queries": sum(size for size, _ in batches), "measure": task.measure_name, "better": task.better},
        "training": asdict(train.training) if isinstance(train, Together) else getattr(train, "__qualname__", "train"),
        "model": model,
        "fingerprints": fingerprints,
        "probes": {"losses": losses, "measures": probe_measures(task, batches)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(request))
    return plain


def _shapes(task: Task) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in task.model.named_parameters()}
