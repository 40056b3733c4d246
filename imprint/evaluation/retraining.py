"""Retraining for the truth: a model on every subset of the data, several times over, measured and kept as it comes."""

import contextlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint.batches import leaves
from imprint.data import Collate, Data, as_tensors, is_columns, query_batches
from imprint.display import placeless
from imprint.errors import DataError, ImprintError, StoreError, TaskError, first_line
from imprint.evaluation.subsets import ORDER, Subsets, derived, whole
from imprint.evaluation.training import Training, initialised, measured, models_at_once, train_together
from imprint.evaluation.trials import (
    FEW,
    SAME,
    SMALL,
    Trial,
    called,
    distance,
    heard,
    misfit,
    shapes,
    size,
    spread,
)
from imprint.evaluation.truth import SCHEMA, Truth, TruthFolder, circumstances, of_subsets, together
from imprint.runtime.progress import Advance, Progress
from imprint.store.fingerprint import (
    of_batches,
    of_data,
    of_tensors,
    probe_measures,
    recognise_data,
    without_adapter,
)
from imprint.store.probe_examples import choose_class_examples
from imprint.store.probing import evaluate_losses
from imprint.store.request import describe
from imprint.task import Batch, Parameters, Task, own_containers, require_task

logger = logging.getLogger(__name__)
Train = Callable[[Tensor, int], nn.Module]
"""train(subset, seed) -> model: subset holds the indices of the training examples."""


@dataclass(frozen=True)
class Together:
    """Trains many small models as one computation; called like a `Train`, it trains one of them.

    build: makes a freshly initialised model from torch's global random state.
    task_of: the task of a model, whose loss is trained on; weight decay is that of `training`, not of a regulariser.
    data: columns of tensors, which are trained on where they are, or a `Data`.
    at_once: how many models; by default what suits the device.
    """

    build: Callable[[], nn.Module]
    task_of: Callable[[nn.Module], Task]
    data: Data | Batch
    training: Training
    at_once: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.build, nn.Module) or not callable(self.build):
            raise TaskError(
                f"build must be a function that makes a model, got a {type(self.build).__name__}: give its class, or "
                "lambda: Net(...)."
            )
        if not callable(self.task_of):
            raise TaskError(
                f"task_of must be a function that gives the task of a model, got a {type(self.task_of).__name__}: "
                "imprint.Task.classifier is one, or lambda model: imprint.Task(model, loss=...)."
            )
        if not isinstance(self.training, Training):
            raise TaskError(f"training must be a Training, got a {type(self.training).__name__}.")
        if not isinstance(self.data, Data) and not is_columns(as_tensors(self.data)):
            raise DataError(
                f"data must be columns of tensors such as (x, y), or a Data, got a {type(self.data).__name__}: "
                "imprint.data.Data(dataset, device=torch.device(...)) makes one."
            )
        if self.at_once is not None:
            whole("at_once", self.at_once, 1)

    @cached_property
    def examples(self) -> Data:
        """The training data, on the device that models are trained on."""
        if isinstance(self.data, Data):
            return self.data
        columns = as_tensors(self.data)
        return Data(columns, device=leaves(columns)[0].device)

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        stack = self.stack([subset], [seed])
        model = initialised(self.build, seed).to(self.examples.device)
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
            self.build, self.task_of, self.examples, subsets, seeds, self.training, orders=orders, on_epoch=on_epoch
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
    data: Any = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    progress: bool | Advance = True,
) -> Truth:
    """Train a model on every subset, `runs` times over, and measure F of the queries under each.

    train: a function of (subset, seed) that returns a trained model, or `Together`, which trains many at once.
    task: measures F; its own model is not trained. Of a task with "lora:R" the model without that adapter is meant.
    out: folder to keep the values in; a call that was killed goes on when it is made again, and more runs add to it.
        One model that is kept is trained again first, even if none is missing, to see that `train` is the same.
    data: what `train` is trained on, where you want the truth to know it: scores of other data are then refused.
    """
    runs = _checked(train, task, subsets, runs)
    task = without_adapter(task)
    known = _known_data(train, task, data, batch_size, collate_fn)
    if known is not None and len(known) != subsets.n:
        raise DataError(f"the subsets are of {subsets.n} training examples, the data has {len(known)}.")
    batches = query_batches(queries, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    request = _request(train, task, subsets, batches, known, runs, seed)
    seeds = [each for run in range(runs) for each in subsets.seeds(run, seed)]
    work = _Work(train, task, batches, subsets, seeds)
    folder = None if out is None else TruthFolder(Path(out))
    bar = Progress("retraining", len(seeds) * work.units, work.unit, progress)
    with folder.opened(request, subsets) if folder else contextlib.nullcontext() as found, contextlib.closing(bar):
        rows = folder.kept(found) if folder and found else {}
        about = found or {**request, **circumstances(work.at_once(), task.device)}
        about = {**about, "runs": max(about["runs"], runs)}
        tried: dict[int, Tensor] = {}
        if folder and rows:
            bar.skip(sum(model < len(seeds) for model in rows) * work.units)
            work.refuse_another(folder.path, rows, about["noise"], bar)
        if not rows:
            tried, about["noise"] = work.tried(bar)
        elif runs > 1 and max(rows) < len(subsets):  # so far there was one run, of which the seed does not matter
            tried, _ = work.tried(bar, rows)
        parts = {range(model, model + 1): values for model, values in tried.items() if model not in rows}
        missing = (model for model in range(len(seeds)) if model not in rows and model not in tried)
        for models in [*parts, *together(subsets.kind, missing, len(subsets), about["at_once"])]:
            values = parts[models] if models in parts else work.values(models, bar.advance)
            rows |= dict(zip(models, values, strict=True))
            if folder:
                folder.begin(about, subsets)
                folder.keep(models, values, about)
    values = torch.stack([rows[model] for model in range(len(seeds))]).reshape(runs, len(subsets), work.count)
    return Truth(subsets, values, task.measure_name, {**about, "runs": runs})


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
        return how.at_once or models_at_once(how.build, how.task_of, how.examples, how.training)

    def values(self, models: range, advance: Callable[[int], None]) -> Tensor:
        """Train some models and measure F of the queries under them, shape (models, queries)."""
        if isinstance(self.train, Together):
            chosen, seeds = [self._examples(model) for model in models], [self.seeds[model] for model in models]
            with self._noted(models):
                stack = self.train.stack(chosen, seeds, advance)
            parts = [measured(self.task, stack, batch, size) for size, batch in self.batches]
            return self._finite(torch.cat(parts, dim=1).double().cpu(), models)
        values = []
        for model in models:
            values.append(self._made(self.train, model, self.seeds[model]).values)
            advance(1)
        return torch.cat(values)

    def tried(self, bar: Progress, kept: Collection[int] = ()) -> tuple[dict[int, Tensor], float]:
        """Refuse a `train` that ignores its subset, or its seed where there are several runs.

        kept: models that are there already, and trained once more for it.
        Gives F under those of the models trained for it that are needed anyway, shape (1, queries) each, and by how
        much F differs between two models of one subset and seed.
        """
        if isinstance(self.train, Together):
            return {}, 0.0
        train, count, seed = self.train, len(self.subsets), self.seeds[0]
        others = self._others()
        bar.total += 1 + (0 in kept) + bool(others and (self.seeds[others[0]] != seed or others[0] in kept))

        def made(model: int, seed: int) -> Trial:
            trial = self._made(train, model, seed)
            bar.advance()
            return trial

        first, again = made(0, seed), made(0, seed)
        rows = {0: first.values}
        for attempt, other in enumerate(others):
            bar.total += attempt > 0 and (self.seeds[other] != seed or other in kept)
            trial = made(other, seed)
            if self.seeds[other] == seed:
                rows[other] = trial.values
            if heard(first, again, trial):
                break
        else:
            if others:
                raise DataError(
                    "train(subset, seed) gives the same model for two different subsets: it ignores its subset."
                )
        if len(self.seeds) > count:
            trial = made(count, self.seeds[count])
            rows[count] = trial.values
            if not heard(first, again, trial):
                raise DataError(
                    "train(subset, seed) gives the same model for two seeds: it ignores its seed, and several runs "
                    "would be copies of one. Seed the initialisation and the order of the data with it, or ask for one "
                    "run."
                )
        if (apart := distance(first.state, again.state)) > SAME:
            more = ", or models will differ by more than what they lack" if self.subsets.kind == "removal" else ""
            logger.warning(
                "train(subset, seed) gives two models for one subset and seed, which are %.2g of their length apart: "
                "seed everything with `seed`%s",
                apart,
                more,
            )
        return rows, size(again.values - first.values)

    def _others(self) -> list[int]:
        """Subsets to hold against the first: one that differs from it, and the one that differs most."""
        first = torch.zeros(self.subsets.n, dtype=torch.bool).index_fill(0, self._examples(0), True)
        apart = []
        for index in range(len(self.subsets)):
            shared = first[self._examples(index)]
            apart.append(int(first.sum()) + len(shared) - 2 * int(shared.sum()))
        near, far = next((i for i, more in enumerate(apart) if more), 0), apart.index(max(apart))
        return [index for index in dict.fromkeys((near, far)) if apart[index]]

    def refuse_another(self, path: Path, kept: dict[int, Tensor], noise: float, bar: Progress) -> None:
        """Refuse a `train` that no longer gives the models that are kept: the first of them is trained once more."""
        if isinstance(self.train, Together):
            return
        model = next((model for model in kept if model < len(self.seeds)), None)
        if model is None:
            return
        bar.total += 1
        moved = size(self.values(range(model, model + 1), bar.advance) - kept[model])
        among = spread(kept, len(self.subsets))
        most = SMALL * among if among is not None else SAME * size(kept[model])
        against = f"subsets differ by {among:.2g}" if among is not None else f"it is {size(kept[model]):.2g}"
        if moved > max(most, FEW * noise):
            raise StoreError(
                f"{path} holds models of another train(subset, seed): trained again, model {model} has an F that is "
                f"{moved:.2g} away, where {against}. Give the function that began it, or a new folder."
            )
        if among is not None and moved > SAME * among:
            logger.warning(
                "train(subset, seed) does not quite give the models in %s again: F of model %d is %.2g away, where "
                "subsets differ by %.2g",
                path,
                model,
                moved,
                among,
            )

    def _examples(self, model: int) -> Tensor:
        """Its own copy, for a `train` that shuffles in place."""
        return self.subsets.examples(model % len(self.subsets))

    def _made(self, train: Train, model: int, seed: int) -> Trial:
        """The model on the subset of this number, with F of the queries under it."""
        with self._noted(range(model, model + 1), seed):
            trained = train(self._examples(model), seed)
        if not isinstance(trained, nn.Module):
            raise DataError(f"train(subset, seed) must return the trained model, got a {type(trained).__name__}.")
        if difference := misfit(trained, self.task.model):
            raise DataError(f"train(subset, seed) returns another model than the task measures: {difference}.")
        trained.eval()
        with torch.no_grad():
            values = [self.task.measure(trained, own_containers(batch)).double().cpu() for _, batch in self.batches]
        for (count, _), value in zip(self.batches, values, strict=True):
            if tuple(value.shape) != (count,):
                raise TaskError(f"measure must return one value per query, shape ({count},); got {tuple(value.shape)}.")
        return Trial.of(trained, self._finite(torch.cat(values)[None], range(model, model + 1), seed))

    def _finite(self, values: Tensor, models: range, seed: int | None = None) -> Tensor:
        if not bool(values.isfinite().all()):
            row, query = (~values.isfinite()).nonzero()[0].tolist()
            raise DataError(
                f"query {query} is {float(values[row, query])} under the model retrained on "
                f"{self._shown(models[row], seed)}: the training diverged."
            )
        return values

    @contextlib.contextmanager
    def _noted(self, models: range, seed: int | None = None) -> Iterator[None]:
        """Whatever a training raises says which it was."""
        try:
            yield
        except Exception as error:
            more = f" and {len(models) - 1} more" if len(models) > 1 else ""
            error.add_note(f"while retraining on {self._shown(models[0], seed)}{more}")
            raise

    def _shown(self, model: int, seed: int | None = None) -> str:
        """What a model is trained on, and how."""
        run, index = divmod(model, len(self.subsets))
        used = self.seeds[model] if seed is None else seed
        return f"subset {index} ({self.subsets.shown(index)}) in run {run} with seed {used}"


def _checked(train: Train | Together, task: Task, subsets: Subsets, runs: int) -> int:
    """The number of runs, once what can be known to be wrong before anything is trained is refused."""
    require_task(task)
    if not isinstance(subsets, Subsets):
        raise DataError(
            f"subsets must be made by Subsets, got a {type(subsets).__name__}: Subsets.halves(sources), or "
            "Subsets.without_each(sources)."
        )
    if not isinstance(train, Together):
        _check_signature(train)
    elif train.examples.device.type != task.device.type:
        raise DataError(
            f"models are trained on {train.examples.device} and measured on {task.device}: move the task's model."
        )
    return whole("runs", runs, 1)


def _check_signature(train: object) -> None:
    if isinstance(train, nn.Module):
        raise DataError(
            f"train is a model, a {type(train).__name__}: give the function that trains one, of (subset, seed)."
        )
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


def _known_data(
    train: Train | Together, task: Task, data: Any, batch_size: int, collate_fn: Collate | None
) -> Data | None:
    """The training data, where it is known."""
    given: Data | None = data
    if data is not None and not isinstance(data, Data):
        given = Data(data, device=task.device, batch_size=batch_size, collate_fn=collate_fn)
    if given is not None and (example := given.changing_example()) is not None:
        raise DataError(
            f"training example {example} is another one each time it is read, as with random augmentation: give the "
            "data without it, or leave data out."
        )
    if not isinstance(train, Together):
        return given
    if given is not None and not recognise_data(of_data(train.examples), given).same:
        raise DataError("data is not what the Together trains on: leave it out, a Together has its own.")
    return train.examples


def _request(
    train: Train | Together,
    task: Task,
    subsets: Subsets,
    batches: list[tuple[int, Batch]],
    data: Data | None,
    runs: int,
    seed: int,
) -> dict[str, Any]:
    """What a truth is of, as far as it can be known, in plain JSON values."""
    fingerprints = {**of_subsets(subsets), "queries": of_batches(batches), "parameters": describe(task)}
    fingerprints |= {"data": of_data(data)} if data is not None else {}
    model, losses = None, []
    if isinstance(train, Together):
        initial = train.task_of(initialised(train.build, 0).to(train.examples.device))
        if shapes(initial.model) != shapes(task.model):
            raise DataError("the task measures another model than those that are trained: give it one made by `build`.")
        functional, theta = initial.at(initial.state())
        with initial.evaluating():
            probes = choose_class_examples(train.examples)
            losses = evaluate_losses(functional, theta, train.examples.gather(torch.tensor(probes)), len(probes))
        model = placeless(repr(initial.model)).splitlines()
        fingerprints |= {"initial model": of_tensors(initial.state())}
    request = {
        "schema": SCHEMA,
        **{"kind": subsets.kind, "n": subsets.n, "runs": runs, "seed": whole("seed", seed, 0), "subsets": len(subsets)},
        **{"queries": sum(size for size, _ in batches), "measure": task.measure_name, "better": task.better},
        "training": asdict(train.training) if isinstance(train, Together) else called(train),
        "model": model,
        "fingerprints": fingerprints,
        "probes": {"losses": losses, "measures": _probed(task, batches)},
    }
    plain: dict[str, Any] = json.loads(json.dumps(request))
    return plain


def _probed(task: Task, batches: list[tuple[int, Batch]]) -> list[float]:
    """F of some queries at random parameters."""
    try:
        return probe_measures(task, batches)
    except ImprintError:
        raise
    except Exception as error:
        raise TaskError(f"the measurement failed on the queries: {first_line(error)}.") from error
