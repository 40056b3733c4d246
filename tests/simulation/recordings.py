"""A small training with batch norm that is really recorded."""

from pathlib import Path

import torch
from torch import nn

from imprint import RunRecorder
from tests.simulation.removals import N, make_data, make_model


def record(folder: Path, *, seed: int = 0, epochs: int = 2, every: int | None = 3) -> RunRecorder:
    """Train by mini-batches of eight and leave the recording to be finished."""
    model, (x, y) = make_model(), make_data()
    run = RunRecorder(folder, model, torch.optim.SGD(model.parameters(), lr=0.2), data=(x, y), seed=seed, every=every)
    model.train()
    for indices in run.batches(N, 8, epochs=epochs):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(nn.functional.cross_entropy(model(x[indices]), y[indices]))
            run.optimiser.step()
    return run
