"""Benchmarks that take seconds: softmax regression in float64, and the digits cut down; and truths that are planted."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from imprint.batches import map_tensors
from imprint.benchmarking.bench import Bench, Protocol
from imprint.benchmarking.settings import digits
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth
from imprint.task import Task


def toy(examples: int = 40, queries: int = 10, halves: int = 12) -> Protocol:
    """Three overlapping classes of points, trained to near the optimum of softmax regression, in float64."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(examples + queries) % 3
    x = torch.randn(examples + queries, 4, generator=generator, dtype=torch.float64)
    x = x + torch.nn.functional.one_hot(y, 4)
    training = Training(epochs=30, lr=0.5, batch_size=20, weight_decay=0.05)
    train = Together(_linear, _decayed, (x[:examples], y[:examples]), training)
    return Protocol("toy", train, (x[examples:], y[examples:]), (3,), draws=(1, 2), halves=halves, runs=2)


def _linear() -> nn.Module:
    return nn.Linear(4, 3).double()


def _decayed(model: nn.Module) -> Task:
    return Task.classifier(model, regulariser=lambda model: 0.025 * sum((p**2).sum() for p in model.parameters()))


def little_digits(examples: int = 60, queries: int = 10, halves: int = 8) -> Protocol:
    """The first of the digits, and a perceptron 64-8-10."""
    found = digits.load(0)
    train = map_tensors(lambda t: t[:examples], found.train)
    asked = map_tensors(lambda t: t[:queries], found.queries)
    training = replace(digits.TRAINING, epochs=6, batch_size=10)
    together = Together(_small, Task.classifier, train, training)
    return Protocol("digits", together, asked, (3,), draws=(1, 2), halves=halves, runs=2)


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))


def planted(scores: Tensor, noise: float, out: Path, protocol: Protocol) -> Bench:
    """A benchmark whose truths are summed scores, (queries, examples), and noise of each retraining."""
    generator = torch.Generator().manual_seed(1)
    bench = Bench(protocol, out, progress=False)
    truths = []
    for draw in protocol.draws:
        subsets = Subsets.halves(scores.shape[1], protocol.halves, seed=draw)
        values = (subsets.membership().double() @ scores.double().T).expand(protocol.runs, -1, -1)
        away = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        truths.append(Truth(subsets, values + noise * values.std(1, keepdim=True) * away, "margin"))
    bench.__dict__["truths"] = truths
    return bench
