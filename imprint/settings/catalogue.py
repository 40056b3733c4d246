"""The ready-made settings by name: what is trained, what is measured, on which sources."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from imprint.data import Collate, Data, map_tensors
from imprint.errors import ConfigurationError, first_line
from imprint.evaluation.retraining import Together
from imprint.settings import digits, mnist
from imprint.sources import Sources
from imprint.task import Batch, Task


@dataclass(frozen=True)
class Ready:
    """A setting put together: models trained at once, the task that measures F, its queries, and the sources."""

    train: Together
    task: Task
    queries: Batch
    sources: Sources
    collate_fn: Collate | None = None


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
    return Ready(found.train, found.task, map_tensors(lambda t: t.to(place), found.queries), found.sources)


def _digits(device: torch.device) -> Ready:
    setting = digits.load(0)
    train = Together(digits.model, digits.task, Data(setting.train, device=device), digits.TRAINING)
    return Ready(train, digits.task(digits.model()), setting.queries, setting.sources)


def _mnist(name: str) -> Callable[[torch.device], Ready]:
    def made(device: torch.device) -> Ready:
        train, queries = mnist.load()
        setting = mnist.SETTINGS[name]
        return Ready(
            setting.together(train, device),
            Task.classifier(setting.build()),
            queries,
            Sources.per_example(len(train[1])),
        )

    return made


SETTINGS: dict[str, Callable[[torch.device], Ready]] = {
    "digits": _digits,
    "mnist-mlp": _mnist("mlp"),
    "mnist-logistic": _mnist("logistic"),
}
