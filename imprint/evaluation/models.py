"""Trains the models of a ground truth, measures the queries under them, and tries whether `train` can be trusted."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from imprint.batches import own_containers
from imprint.errors import DataError, StoreError, TaskError
from imprint.evaluation.subsets import Design, Subsets
from imprint.evaluation.together import Together, Train
from imprint.evaluation.training import measure_stack, models_at_once
from imprint.evaluation.trials import (
    FEW,
    SAME,
    SMALL,
    Trial,
    compare_parameters,
    differs,
    distance,
    spread,
)
from imprint.runtime.progress import Progress
from imprint.task import Batch, Task
from imprint.tensors.vectors import root_mean_square

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Models:
    """The models of a ground truth; number run · subsets + i is trained on subset i."""

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
        """How many units of progress one model is."""
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
            with self._name_failures(models):
                stack = self.train.train_stack(chosen, seeds, advance)
            parts = [measure_stack(self.task, stack, batch, size) for size, batch in self.batches]
            return self._require_finite(torch.cat(parts, dim=1).double().cpu(), models)
        values = []
        for model in models:
            values.append(self._train_one(self.train, model, self.seeds[model]).values)
            advance(1)
        return torch.cat(values)

    def try_training(self, bar: Progress, kept: Collection[int] = ()) -> tuple[dict[int, Tensor], float]:
        """Refuse a `train` that ignores its subset, or its seed where there are several runs.

        Return F, (1, queries), under the models trained for this check that are needed anyway, and how much F differs
        between two models of one subset and seed.

        kept: finished models, which are trained again for this check.
        """
        if isinstance(self.train, Together):
            return {}, 0.0
        train, count, seed = self.train, len(self.subsets), self.seeds[0]
        others = self._choose_others()
        bar.total += 1 + (0 in kept) + bool(others and (self.seeds[others[0]] != seed or others[0] in kept))

        def attempt(model: int, seed: int) -> Trial:
            trial = self._train_one(train, model, seed)
            bar.advance()
            return trial

        first, again = attempt(0, seed), attempt(0, seed)
        rows = {0: first.values}
        for position, other in enumerate(others):
            bar.total += position > 0 and (self.seeds[other] != seed or other in kept)
            trial = attempt(other, seed)
            if self.seeds[other] == seed:
                rows[other] = trial.values
            if differs(first, again, trial):
                break
        else:
            if others:
                raise DataError(
                    "train(subset, seed) returns the same model for two different subsets: use `subset` to select the "
                    "training examples."
                )
        if len(self.seeds) > count:
            trial = attempt(count, self.seeds[count])
            rows[count] = trial.values
            if not differs(first, again, trial):
                raise DataError(
                    "train(subset, seed) returns the same model for two seeds, so several runs would be copies of one: "
                    "seed the initialisation and the order of the data with `seed`, or use runs=1."
                )
        if (apart := distance(first.state, again.state)) > SAME:
            more = ", or models will differ by more than what was removed" if self.subsets.kind == "removal" else ""
            logger.warning(
                "train(subset, seed) returns different models for the same subset and seed (%.2g of their norm apart): "
                "seed everything with `seed`%s",
                apart,
                more,
            )
        return rows, root_mean_square(again.values - first.values)

    def _choose_others(self) -> list[int]:
        """Choose subsets to compare with the first: one that differs from it, and the one that differs most."""
        first = torch.zeros(self.subsets.n, dtype=torch.bool).index_fill(0, self._examples(0), True)
        apart = []
        for index in range(len(self.subsets)):
            shared = first[self._examples(index)]
            apart.append(int(first.sum()) + len(shared) - 2 * int(shared.sum()))
        near, far = next((i for i, more in enumerate(apart) if more), 0), apart.index(max(apart))
        return [index for index in dict.fromkeys((near, far)) if apart[index]]

    def refuse_changed_training(
        self, path: Path, kept: dict[int, Tensor], noise: float, bar: Progress
    ) -> dict[int, Tensor]:
        """Train the first finished model again, and refuse a `train` that no longer reproduces it.

        Return F, (1, queries), under the model that was trained.
        """
        model = next((model for model in kept if model < len(self.seeds)), None)
        if model is None or isinstance(self.train, Together):
            return {}
        bar.total += 1
        values = self.values(range(model, model + 1), bar.advance)
        self.compare_training(path, model, values, kept, noise)
        return {model: values}

    def compare_training(self, path: Path, model: int, values: Tensor, kept: dict[int, Tensor], noise: float) -> None:
        """Refuse a `train` under whose model F differs by more than repeating it explains."""
        moved = root_mean_square(values - kept[model])
        among = spread(kept, len(self.subsets))
        most = SMALL * among if among is not None else SAME * root_mean_square(kept[model])
        against = (
            f"subsets differ by {among:.2g}" if among is not None else f"it is {root_mean_square(kept[model]):.2g}"
        )
        if moved > max(most, FEW * noise):
            raise StoreError(
                f"{path} holds models of another train(subset, seed): F of model {model}, trained again, differs by "
                f"{moved:.2g}, where {against}. Give the function that the folder was started with, or a new folder."
            )
        if among is not None and moved > SAME * among:
            logger.warning(
                "train(subset, seed) does not exactly reproduce the models in %s: F of model %d differs by %.2g, where "
                "subsets differ by %.2g",
                path,
                model,
                moved,
                among,
            )

    def _examples(self, model: int) -> Tensor:
        """Return a new copy of the indices, for a `train` that shuffles in place."""
        return self.subsets.examples(model % len(self.subsets))

    def _train_one(self, train: Train, model: int, seed: int) -> Trial:
        """Train the model of this number, and measure F of the queries under it."""
        with self._name_failures(range(model, model + 1), seed):
            trained = train(self._examples(model), seed)
        if not isinstance(trained, nn.Module):
            raise DataError(f"train(subset, seed) must return the trained model, got a {type(trained).__name__}.")
        if difference := compare_parameters(trained, self.task.model):
            raise DataError(f"train(subset, seed) returns another model than the task's: {difference}.")
        trained.eval()
        with torch.no_grad():
            values = [self.task.measure(trained, own_containers(batch)).double().cpu() for _, batch in self.batches]
        for (count, _), value in zip(self.batches, values, strict=True):
            if tuple(value.shape) != (count,):
                raise TaskError(f"measure must return one value per query, shape ({count},); got {tuple(value.shape)}.")
        return Trial.of(trained, self._require_finite(torch.cat(values)[None], range(model, model + 1), seed))

    def _require_finite(self, values: Tensor, models: range, seed: int | None = None) -> Tensor:
        if not bool(values.isfinite().all()):
            row, query = (~values.isfinite()).nonzero()[0].tolist()
            raise DataError(
                f"query {query} is {float(values[row, query])} under the model retrained on "
                f"{self._describe(models[row], seed)}: the training diverged."
            )
        return values

    @contextlib.contextmanager
    def _name_failures(self, models: range, seed: int | None = None) -> Iterator[None]:
        """Add to an error which training run raised it."""
        try:
            yield
        except Exception as error:
            more = f" and {len(models) - 1} more" if len(models) > 1 else ""
            error.add_note(f"while retraining on {self._describe(models[0], seed)}{more}")
            raise

    def _describe(self, model: int, seed: int | None = None) -> str:
        """Describe what a model is trained on, and how."""
        run, index = divmod(model, len(self.subsets))
        used = self.seeds[model] if seed is None else seed
        return f"subset {index} ({self.subsets.describe(index)}) in run {run} with seed {used}"


def group_models(kind: Design, missing: Iterable[int], subsets: int, at_once: int) -> list[range]:
    """Group the missing models to train together: neighbours, at most `at_once`.

    The models of one run of removals share their seed, and so their dropout; those of different runs stay separate.
    """
    spans: list[range] = []
    for model in missing:
        last = spans[-1] if spans else range(0)
        apart = kind == "removal" and model % subsets == 0
        if model == last.stop and 0 < len(last) < at_once and not apart:
            spans[-1] = range(last.start, model + 1)
        else:
            spans.append(range(model, model + 1))
    return spans
