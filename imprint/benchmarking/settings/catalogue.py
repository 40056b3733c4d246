"""The ready-made settings by name: what is trained, what is measured, on which sources, and simulated by which plan."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from imprint.batches import map_tensors
from imprint.benchmarking.bench import Protocol
from imprint.benchmarking.settings import digits, mnist
from imprint.data import Data
from imprint.errors import ConfigurationError, first_line
from imprint.evaluation.retraining import Together
from imprint.evaluation.training import train_together
from imprint.plan import Plan
from imprint.runtime.progress import Progress
from imprint.sources import Sources
from imprint.task import Batch, Parameters, Task

_DIGITS_QUERIES = 200


@dataclass(frozen=True)
class Ready:
    """A setting put together, with what a file for the command line has, under the same names.

    train: trains many models at once, for `retrain`.
    task: has the loss and the measurement F; its model is not trained.
    epochs: after which the model is worth keeping.
    """

    train: Together
    task: Task
    data: Batch
    queries: Batch
    sources: Sources
    plan: Plan
    epochs: tuple[int, ...]

    @cached_property
    def checkpoints(self) -> list[Parameters]:
        """One model trained from seed 0 on everything, as it is after each of `epochs`: what `simulate` takes."""
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


def ready(name: str, device: str | torch.device = "cpu") -> Ready:
    """A setting by its name, on a device."""
    if name not in SETTINGS:
        raise ConfigurationError(f"there is no setting {name!r}: use one of {', '.join(SETTINGS)}.")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it is built without CUDA
        raise ConfigurationError(f"device {str(device)!r} cannot be used here: {first_line(error)}.") from error
    found = SETTINGS[name](place)
    found.task.model.to(place)
    return replace(found, queries=map_tensors(lambda t: t.to(place), found.queries))


def protocol(name: str, device: str | torch.device = "cpu") -> Protocol:
    """The benchmark of a setting: every training example is attributed."""
    found = ready(name, device)
    if name == "digits":
        few = map_tensors(lambda t: t[:_DIGITS_QUERIES], found.queries)
        return Protocol(name, found.train, few, digits.CHECKPOINTS)
    setting = mnist.SETTINGS[name.removeprefix("mnist-")]
    return Protocol(name, found.train, found.queries, setting.checkpoints, path=setting.path)


def _digits(device: torch.device) -> Ready:
    setting = digits.load(0)
    train = Together(digits.model, digits.task, Data(setting.train, device=device), digits.TRAINING)
    task = digits.task(digits.model())
    return Ready(train, task, setting.train, setting.queries, setting.sources, digits.PLAN, digits.CHECKPOINTS)


def _mnist(name: str) -> Callable[[torch.device], Ready]:
    def made(device: torch.device) -> Ready:
        train, queries = mnist.load()
        setting = mnist.SETTINGS[name]
        return Ready(
            setting.together(train, device),
            Task.classifier(setting.build()),
            train,
            queries,
            Sources.per_example(len(train[1])),
            mnist.PLAN,
            setting.checkpoints,
        )

    return made


SETTINGS: dict[str, Callable[[torch.device], Ready]] = {
    "digits": _digits,
    "mnist-mlp": _mnist("mlp"),
    "mnist-lr": _mnist("lr"),
}
