"""Measures what training takes, from a few of its steps and their number: what `check` compares a simulation with."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch

from imprint.batches import own_containers
from imprint.data import Data
from imprint.display import count_of
from imprint.evaluation.together import Together
from imprint.evaluation.training import initialise, models_at_once, train_together
from imprint.model.replica import make_private
from imprint.recording.seeding import keep_random_state
from imprint.runtime.memory import Peak
from imprint.task import Task

_STEPS = 6  # measured, of which the first two, which warm up, do not count
_WARM = 2


@dataclass(frozen=True)
class TrainingCost:
    """What it takes to train a model on all data, and several of them.

    seconds: for one model, trained by itself.
    at_once: how many models are trained as one computation, in `seconds_at_once`.
    peak_bytes: the most memory in use at once, of the process on a CPU; None where that is unknown.
    origin: how long it is, as in "each of 300 steps".
    """

    seconds: float
    origin: str
    peak_bytes: int | None = None
    at_once: int = 1
    seconds_at_once: float | None = None

    def seconds_for(self, models: int) -> float:
        """Return how long so many models take, as many at once as are trained together."""
        if self.seconds_at_once is None:
            return models * self.seconds
        return models / min(self.at_once, models) * self.seconds_at_once


def measure_training(task: Task, data: Data, steps: int, batch_size: int) -> TrainingCost:
    """Time a few steps of plain gradient descent on mini-batches, and take `steps` of them for a training.

    The steps are those of a private copy of the model in training mode; the user's model is left alone.
    """
    peak = Peak(data.device)
    seconds = steps * _time_steps(task, data, min(batch_size, len(data)))
    origin = f"of {count_of(steps, 'step')} of {count_of(batch_size, 'example')}"
    return TrainingCost(seconds, origin, peak.bytes)


def measure_together(train: Together, models: int) -> TrainingCost:
    """Time a few steps of models that are trained together, and of one alone.

    models: how many there will be with the same seed.
    """
    how, data, peak = train.training, train.examples, Peak(train.examples.device)
    steps, size = how.epochs * how.steps(len(data)), min(how.batch_size, len(data))
    fit = train.at_once or models_at_once(train.build, train.task_of, data, how)
    at_once = min(fit, models)
    moments: list[float] = []
    train_together(
        train.build,
        train.task_of,
        data,
        [torch.arange(size)] * at_once,  # an epoch of one batch is a step
        [0] * at_once,
        replace(how, epochs=_STEPS, batch_size=size),
        on_epoch=lambda _: moments.append(_now(data.device)),
    )
    each = median([after - before for before, after in pairwise(moments)][_WARM - 1 :])
    alone = _time_steps(train.task_of(initialise(train.build, 0).to(data.device)), data, size)
    origin = f"of {count_of(how.epochs, 'epoch')} in batches of {how.batch_size}"
    return TrainingCost(steps * alone, origin, peak.bytes, at_once, steps * each)


def _time_steps(task: Task, data: Data, batch_size: int) -> float:
    """Measure a step: forward, backward, and the update of plain gradient descent."""
    model = make_private(task.model)
    for module in model.modules():  # not model.train(), which may unmerge weights
        module.training = True
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    taken = []
    with keep_random_state(), torch.enable_grad(), torch.inference_mode(False):
        for number in range(_STEPS):
            begin = _now(data.device)
            batch = data.gather(torch.arange(number * batch_size, (number + 1) * batch_size) % len(data))
            optimiser.zero_grad()
            task.loss(model, own_containers(batch)).mean().backward()
            optimiser.step()
            taken.append(_now(data.device) - begin)
    return median(taken[_WARM:])


def _now(device: torch.device, clock: Callable[[], float] = time.monotonic) -> float:
    """Read the clock once the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()
