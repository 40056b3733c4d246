"""A small ground truth to ask for, and functions that train its models well or badly."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Part, Sources, Task
from imprint.data import Data
from imprint.evaluation.retraining import retrain, retrain_part
from imprint.evaluation.subsets import ORDER, Subsets, derive_seed
from imprint.evaluation.together import Together, Train
from imprint.evaluation.training import Training
from imprint.evaluation.truth import Truth
from imprint.runtime.progress import Advance

N, QUERIES, RUNS = 24, 5, 2
TRIALS, EXTRA = 4, 2  # of halves: how many trainings see whether subset and seed are heard, and how many only that
TRAINING = Training(epochs=2, lr=0.2, batch_size=8, momentum=0.9)
HALVES = Subsets.halves(N, 5)
REMOVALS = Subsets.without_each(Sources.by_label([i % 4 for i in range(N)]))
every_kind = pytest.mark.parametrize("subsets", [HALVES, REMOVALS], ids=["halves", "removals"])


class Killed(BaseException):
    """Stands for whatever ends a process."""


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (count,), generator=generator)


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def task(**options: Any) -> Task:
    return Task.classifier(build(), **options)


def together(at_once: int | None = 2, **changes: Any) -> Together:
    """Two at a time: several files to die between."""
    given = {"data": points(N, 0), "training": TRAINING, "build": build, "task_of": Task.classifier, **changes}
    data = Data(given["data"], device=torch.device("cpu"))
    return Together(given["build"], given["task_of"], data, given["training"], at_once)


def train(subset: Tensor, seed: int) -> nn.Module:
    """What `together` does, as a plain loop."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    x, y = points(N, 0)
    optimiser = torch.optim.SGD(model.parameters(), TRAINING.lr, TRAINING.momentum)
    order = torch.Generator().manual_seed(derive_seed(seed, ORDER))
    for _ in range(TRAINING.epochs):
        for batch in subset[torch.randperm(len(subset), generator=order)].split(TRAINING.batch_size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


class Counting:
    """`train` that keeps count of the models it has made, and dies after so many."""

    def __init__(self, most: int = 10**6) -> None:
        self.most, self.made = most, 0

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        if self.made == self.most:
            raise Killed
        self.made += 1
        return train(subset, seed)


def dies_after(calls: int) -> Advance:
    """Progress that ends the run it is told of, at the call after so many."""
    left = iter(range(calls))

    def die(done: int, total: int, /) -> None:
        if next(left, None) is None:
            raise Killed

    return die


def ask(out: Path | None = None, how: Train | Together | None = None, **changes: Any) -> Truth:
    return retrain(how or together(), out=out, **_given(changes))


def ask_part(out: Path, part: str, how: Train | Together | None = None, **changes: Any) -> Part:
    return retrain_part(part, how or together(), out=out, **_given(changes))


def _given(changes: dict[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {"queries": points(QUERIES, 1), "subsets": HALVES, "runs": RUNS, "progress": False}
    return given | ({"task": task(), **changes} if "task" not in changes else changes)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


OTHER = points(QUERIES, 1)[0] + torch.eye(QUERIES, 4), points(QUERIES, 1)[1]


def stubborn(subset: Tensor, seed: int) -> nn.Module:
    return train(subset, 0)


def unseeded(subset: Tensor, seed: int) -> nn.Module:
    return train(subset, int(torch.randint(2**31, ())))


def named(how: Train, name: str = "mine") -> Train:
    how.__qualname__ = name
    return how


def nudged(size: float) -> Train:
    """`train`, with models that are so far away in one bias."""

    def how(subset: Tensor, seed: int) -> nn.Module:
        model = train(subset, seed)
        model.get_parameter("2.bias").data[0] += size
        return model

    return named(how)
