"""Seconds to train many models on random halves of the data: together, and in a plain loop of torch's optimiser.

    python benchmarks/retraining_cost.py
    python benchmarks/retraining_cost.py --setting mnist-mlp --device cuda --alone 5

Both train the same models from the same seeds; where there is no dropout their queries' losses are compared. Times are
medians of interleaved repetitions in one process: their ratio is what counts. With --alone the loop trains only some of
the models, and its time for all of them is extrapolated.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint.benchmarking.settings import digits, mnist
from imprint.data import Data
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.training import Training, initialise, measure_stack, models_at_once, train_together
from imprint.task import Task

Pairs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is trained, with queries to compare the models by."""

    build: Callable[[], nn.Module]
    train: Pairs
    queries: Pairs
    training: Training


def setting_of(name: str) -> Setting:
    if name == "digits":
        split = digits.load(0)
        return Setting(digits.model, split.train, split.queries, digits.TRAINING)
    train, queries = mnist.load()
    return Setting(mnist.mlp, train, queries, mnist.RECIPES["mlp"].training)


def moved(pairs: Pairs, device: torch.device) -> Pairs:
    return pairs[0].to(device), pairs[1].to(device)


def together(
    setting: Setting, halves: list[Tensor], device: torch.device, at_once: int | None
) -> tuple[Tensor, int, float]:
    """Losses of the queries under every model, how many trained at once, and the seconds that training them took."""
    build, training = setting.build, setting.training
    data = Data(setting.train, device=device)
    start = time.perf_counter()
    most = min(len(halves), at_once or models_at_once(build, Task.classifier, data, training))
    stacks = []
    for first in range(0, len(halves), most):
        chosen = halves[first : first + most]
        seeds = range(first, first + len(chosen))
        stacks.append(train_together(build, Task.classifier, data, chosen, seeds, training)[training.epochs])
    _wait(device)
    seconds = time.perf_counter() - start
    task = Task.classifier(build().to(device))
    queries = moved(setting.queries, device)
    return torch.cat([measure_stack(task, stack, queries, len(queries[1])) for stack in stacks]), most, seconds


def alone(setting: Setting, halves: list[Tensor], device: torch.device) -> tuple[Tensor, float]:
    """The same in a plain loop: losses of the queries, and the seconds that training took."""
    training = setting.training
    x, y = moved(setting.train, device)
    start = time.perf_counter()
    models = []
    for seed, half in enumerate(halves):
        model = initialise(setting.build, seed).to(device)
        optimiser = torch.optim.SGD(
            model.parameters(), training.lr, training.momentum, weight_decay=training.weight_decay
        )
        order = torch.Generator().manual_seed(seed)
        for _ in range(training.epochs):
            shuffled = half[torch.randperm(len(half), generator=order)].to(device)
            for step in range(training.steps(len(half))):
                batch = shuffled[step * training.batch_size : (step + 1) * training.batch_size]
                optimiser.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimiser.step()
        models.append(model.eval())
    _wait(device)
    seconds = time.perf_counter() - start
    queries, answers = moved(setting.queries, device)
    with torch.no_grad():
        return torch.stack([F.cross_entropy(m(queries), answers, reduction="none") for m in models]), seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=["digits", "mnist-mlp"], default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--epochs", type=int, help="fewer than the setting has, for a shorter comparison")
    parser.add_argument("--alone", type=int, help="train only so many in the loop, and extrapolate")
    parser.add_argument("--at-once", type=int, help="how many train together; by default what suits the device")
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    setting = setting_of(arguments.setting)
    setting = replace(setting, training=replace(setting.training, epochs=arguments.epochs or setting.training.epochs))
    subsets = Subsets.halves(len(setting.train[1]), arguments.models)
    halves = [subsets.examples(index) for index in range(len(subsets))]
    few = halves[: arguments.alone or len(halves)]

    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{where}, torch {torch.__version__}, Python {platform.python_version()}, float32")
    print(f"{arguments.setting}: {len(halves)} models, {setting.training.epochs} epochs over {len(halves[0])} examples")
    short = replace(setting, training=replace(setting.training, epochs=1))
    together(short, halves[:2], device, None)  # what only the first call does is not measured
    alone(short, halves[:2], device)
    ours, theirs = [], []
    for _ in range(arguments.repetitions):
        losses, at_once, seconds = together(setting, halves, device, arguments.at_once)
        ours.append(seconds)
        expected, seconds = alone(setting, few, device)
        theirs.append(seconds * len(halves) / len(few))
    if not any(isinstance(module, nn.Dropout) for module in setting.build().modules()):
        difference = float((losses[: len(few)] - expected).abs().max())
        print(f"losses of {len(setting.queries[1])} queries differ by at most {difference:.1e}")
    part = f", extrapolated from {len(few)} models" if len(few) < len(halves) else ""
    print(f"together, {at_once} at once: {_seconds(ours)}")
    print(f"in a loop: {_seconds(theirs)}{part}")
    ratio = statistics.median(loop / one for one, loop in zip(ours, theirs, strict=True))
    print(f"the loop takes {ratio:.1f} times as long{part}")


def _seconds(times: list[float]) -> str:
    return f"{statistics.median(times):.2f} s (median of {', '.join(f'{each:.2f}' for each in times)})"


if __name__ == "__main__":
    main()
