"""Lists the built-in settings by name: what is trained and measured, the sources, and the plan."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from imprint.batches import map_tensors
from imprint.benchmarking.bench import Protocol
from imprint.benchmarking.settings import digits, mnist
from imprint.data import Data
from imprint.errors import ConfigurationError, first_line
from imprint.evaluation.together import Together
from imprint.evaluation.training import train_together
from imprint.plan import Plan
from imprint.runtime.progress import Progress
from imprint.sources import Sources
from imprint.task import Batch, Parameters, Task

_DIGITS_QUERIES = 200


@dataclass(frozen=True)
class BuiltIn:
    """A built-in setting, with the same names as a user's file for the command line.

    train: trains many models at once, for `retrain`.
    task: the loss and the measurement F; its model is not trained.
    epochs: when checkpoints are kept.
    query_pictures: the queries as images, for reports.
    """

    train: Together
    task: Task
    data: Batch
    queries: Batch
    sources: Sources
    plan: Plan
    epochs: tuple[int, ...]
    query_pictures: Tensor | None = None

    @cached_property
    def checkpoints(self) -> list[Parameters]:
        """The checkpoints, at `epochs`, of a model trained on all data from seed 0, for `simulate`."""
        how, everyone = self.train, torch.arange(len(self.train.examples))
        training = replace(how.training, epochs=max(self.epochs))
        with contextlib.closing(Progress("training", training.epochs, "epochs")) as bar:
            kept = train_together(
                how.build,
                how.task_of,
                how.examples,
                [everyone],
                [0],
                training,
                record=self.epochs,
                on_epoch=bar.advance,
            )
        return [{name: tensor[0] for name, tensor in kept[epoch].items()} for epoch in self.epochs]


def load_setting(name: str, device: str | torch.device = "cpu") -> BuiltIn:
    """Load a setting by its name, on a device."""
    if name not in SETTINGS:
        raise ConfigurationError(f"setting {name!r} is unknown: use one of {', '.join(SETTINGS)}.")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch asserts if it is built without CUDA
        raise ConfigurationError(f"device {str(device)!r} cannot be used here: {first_line(error)}.") from error
    found = SETTINGS[name](place)
    found.task.model.to(place)
    return replace(found, queries=map_tensors(lambda t: t.to(place), found.queries))


def load_protocol(name: str, device: str | torch.device = "cpu") -> Protocol:
    """Load the benchmark of a setting, where every training example is a source."""
    found = load_setting(name, device)
    if name == "digits":
        few = map_tensors(lambda t: t[:_DIGITS_QUERIES], found.queries)
        return Protocol(name, found.train, few, digits.CHECKPOINTS)
    setting = mnist.RECIPES[name.removeprefix("mnist-")]
    return Protocol(name, found.train, found.queries, setting.checkpoints, path=setting.path)


def _load_digits(device: torch.device) -> BuiltIn:
    setting = digits.load(0)
    train = Together(digits.model, digits.task, Data(setting.train, device=device), digits.TRAINING)
    task = digits.task(digits.model())
    pictures = -setting.queries[0].reshape(-1, 8, 8)  # ink on paper
    known = (setting.train, setting.queries, setting.sources)
    return BuiltIn(train, task, *known, digits.PLAN, digits.CHECKPOINTS, pictures)


def _mnist_loader(name: str) -> Callable[[torch.device], BuiltIn]:
    def load(device: torch.device) -> BuiltIn:
        train, queries = mnist.load()
        setting = mnist.RECIPES[name]
        return BuiltIn(
            setting.together(train, device),
            Task.classifier(setting.build()),
            train,
            queries,
            Sources.per_example(len(train[1])),
            mnist.PLAN,
            setting.checkpoints,
            -queries[0].reshape(-1, 28, 28),  # ink on paper
        )

    return load


SETTINGS: dict[str, Callable[[torch.device], BuiltIn]] = {
    "digits": _load_digits,
    "mnist-mlp": _mnist_loader("mlp"),
    "mnist-lr": _mnist_loader("lr"),
}
