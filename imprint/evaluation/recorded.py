"""Records one training run in a plain loop, the same training that `Together` does for many models at once."""

import os
from collections.abc import Callable

import torch
from torch import nn

from imprint.data import Data
from imprint.evaluation.subsets import ORDER, derive_seed
from imprint.evaluation.training import Training, initialise
from imprint.recording.reading import Recording
from imprint.recording.writing import RunRecorder
from imprint.task import Task


def record_training(
    build: Callable[[], nn.Module],
    task_of: Callable[[nn.Module], Task],
    data: Data,
    training: Training,
    seed: int,
    folder: str | os.PathLike[str],
    *,
    every: int | None = None,
) -> Recording:
    """Train a model on all data from a seed with torch's optimiser, and record the run in a folder.

    Initialisation and order are those of `Together` with this seed, and so is the model, up to rounding; only dropout
    draws other numbers, because a recording seeds every step by itself.

    every: after how many steps a checkpoint is kept; see `imprint.RunRecorder`.
    """
    model = initialise(build, seed).to(data.device)
    task, optimiser = task_of(model), _make_optimiser(model, training)
    run = RunRecorder(folder, model, optimiser, data=data.stacked, n=len(data), seed=seed, every=every)
    each, order = training.steps(len(data)), torch.Generator().manual_seed(derive_seed(seed, ORDER))
    whole = torch.tensor(training.epochs * each, dtype=torch.float64)
    step = 0
    for _ in range(training.epochs):
        shuffled = torch.randperm(len(data), generator=order) if training.shuffle else torch.arange(len(data))
        for indices in shuffled.split(training.batch_size)[:each]:
            for group in optimiser.param_groups:
                group["lr"] = float(training.rate(torch.tensor(step, dtype=torch.float64), whole))
            with run.step(indices) as now:
                optimiser.zero_grad()
                now.backward(task.loss(model, data.gather(indices)).mean())
                optimiser.step()
            step += 1
    return run.finish()


def _make_optimiser(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    lr, decay = training.lr, training.weight_decay
    if training.optimiser == "sgd":
        return torch.optim.SGD(trained, lr=lr, momentum=training.momentum, weight_decay=decay)
    kind = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
    return kind(trained, lr=lr, betas=training.betas, weight_decay=decay)
