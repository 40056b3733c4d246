"""Describes how retrained models are made: by a function of the user's, or many small ones as one computation."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from imprint.batches import leaves
from imprint.data import Data, as_tensors, is_columns
from imprint.errors import DataError, TaskError
from imprint.evaluation.recorded import record_training
from imprint.evaluation.subsets import ORDER, derive_seed, require_whole
from imprint.evaluation.training import Training, initialise, train_together
from imprint.recording.reading import Recording
from imprint.task import Batch, Parameters, Task

Train = Callable[[Tensor, int], nn.Module]
"""train(subset, seed) -> model, where `subset` holds the indices of the training examples."""


@dataclass(frozen=True)
class Together:
    """Trains many small models as one computation; called like a `Train`, it trains a single one.

    build: builds a freshly initialised model from torch's global random state.
    task_of: returns the task of a model, whose loss is minimised; weight decay comes from `training`, not from a
        regulariser.
    data: columns of tensors, on the device to train on, or a `Data`.
    at_once: how many models to train together; by default chosen for the device.
    """

    build: Callable[[], nn.Module]
    task_of: Callable[[nn.Module], Task]
    data: Data | Batch
    training: Training
    at_once: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.build, nn.Module) or not callable(self.build):
            raise TaskError(
                f"build must be a function that builds a model, got a {type(self.build).__name__}: give the class of "
                "the model, or lambda: Net(...)."
            )
        if not callable(self.task_of):
            raise TaskError(
                f"task_of must be a function that returns the task of a model, got a {type(self.task_of).__name__}: "
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
            require_whole("at_once", self.at_once, 1)

    @cached_property
    def examples(self) -> Data:
        """The training data, on the device to train on."""
        if isinstance(self.data, Data):
            return self.data
        columns = as_tensors(self.data)
        return Data(columns, device=leaves(columns)[0].device)

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        stack = self.train_stack([subset], [seed])
        model = initialise(self.build, seed).to(self.examples.device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stack[name][0])
        return model.eval()

    def train_stack(
        self, subsets: list[Tensor], seeds: list[int], on_epoch: Callable[[int], None] = lambda models: None
    ) -> Parameters:
        """Train one model for each subset and seed, and return their stacked parameters."""
        orders = [derive_seed(seed, ORDER) for seed in seeds]
        kept = train_together(
            self.build, self.task_of, self.examples, subsets, seeds, self.training, orders=orders, on_epoch=on_epoch
        )
        return kept[self.training.epochs]

    def record(self, seed: int, folder: str | os.PathLike[str], *, every: int | None = None) -> Recording:
        """Train one model on all data in a plain loop, and record the run in a folder; see `record_training`."""
        return record_training(self.build, self.task_of, self.examples, self.training, seed, folder, every=every)
