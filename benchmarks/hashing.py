"""What trust costs: how fast data is hashed, and the share of a simulation that recognising and trying inputs takes.

    OMP_NUM_THREADS=1 python benchmarks/hashing.py

Shares are of one and the same run: the time within the hash of the data, the choice and evaluation of the probes, the
second reading of some examples, and the checks of the task, over the time of the whole call, in seconds of the
processor. The machine's own
speed, and what else it does, cancel.
"""

import argparse
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.data import TensorDataset

import imprint.simulation.inputs as inputs
import imprint.simulation.runner as run
from imprint import Plan, Sources, Task, simulate
from imprint.benchmarking.settings import digits
from imprint.data import Data
from imprint.evaluation.training import train_together
from imprint.store.fingerprint import of_data

PARTS: dict[str, list[tuple[Any, str]]] = {
    "hash": [(inputs, "of_data")],
    "probes": [(inputs, "choose_probes"), (inputs, "see"), (run, "see")],
    "second reading": [(Data, "changing_example")],
    "checks of the task": [(inputs.Inputs, "examine")],
}


class Rows(TensorDataset):
    """Samples that are read one by one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


def speed(dataset: Any) -> float:
    """Bytes of data hashed in a second, once it is read."""
    data = Data(dataset, device="cpu")
    size = sum(column.nbytes for column in (dataset.tensors if isinstance(dataset, Rows) else dataset))
    begin = time.process_time()
    of_data(data)
    return size / (time.process_time() - begin)


@contextmanager
def measured() -> Iterator[dict[str, float]]:
    """Add up the seconds within each part, of all calls meanwhile."""
    seconds: dict[str, float] = defaultdict(float)

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapped(*given: Any, **options: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*given, **options)
            finally:
                seconds[part] += time.process_time() - begin

        return wrapped

    patches = [
        patch.object(place, name, timed(part, getattr(place, name))) for part, at in PARTS.items() for place, name in at
    ]
    for each in patches:
        each.start()
    try:
        yield seconds
    finally:
        for each in patches:
            each.stop()


def shares(what: str, call: Callable[[], object], repetitions: int) -> None:
    """Print the share of each part in the time of a simulation."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(repetitions):
        with measured() as seconds:
            begin = time.process_time()
            call()
            whole = time.process_time() - begin
        for part in PARTS:
            found[part].append(seconds[part] / whole)
        found["together"].append(sum(seconds.values()) / whole)
        found["seconds"].append(whole)
    parts = ", ".join(f"{part} {median(found[part]):.2%}" for part in (*PARTS, "together"))
    print(f"{what} ({median(found['seconds']):.1f} CPU seconds): {parts}", flush=True)


def demo() -> Callable[[], object]:
    """The simulation of `imprint demo`."""
    setting = digits.load(0)
    data = Data(setting.train, device="cpu")
    everyone = torch.arange(len(data))
    kept = train_together(digits.model, digits.task, data, [everyone], [0], digits.TRAINING, record=digits.CHECKPOINTS)
    states = [{name: t[0] for name, t in kept[epoch].items()} for epoch in digits.CHECKPOINTS]
    task = digits.task(digits.model())
    given = (task, setting.train, setting.sources, digits.PLAN)
    return lambda: simulate(*given, checkpoints=states, progress=False)


def large(count: int = 2000, sources: int = 4, steps: int = 6) -> Callable[[], object]:
    """A classifier of 50 million parameters on inputs of 3,072 values, with few sources and few small steps.

    That is far less than a simulation takes, so the shares are upper bounds.
    """
    torch.manual_seed(0)
    width = 5600
    model = nn.Sequential(nn.Linear(3072, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {count * 3072 * 4 / 1e6:.0f} MB of data")
    data = torch.randn(count, 3072), torch.randint(0, 10, (count,))
    groups = Sources.by_label([i % sources for i in range(count)])
    plan = Plan(steps=steps, lr=0.01, batch_size=64, source_sample=64)
    return lambda: simulate(Task.classifier(model), data, groups, plan, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--only", choices=["speed", "demo", "large"], help="One of the three parts.")
    given = parser.parse_args()
    if given.only in (None, "speed"):
        columns = torch.randn(400_000, 256), torch.randint(0, 10, (400_000,))
        print(f"columns: {speed(columns) / 1e9:.2f} GB/s; samples: {speed(Rows(*columns)) / 1e9:.2f} GB/s", flush=True)
    if given.only in (None, "demo"):
        shares("demo", demo(), given.repetitions)
    if given.only in (None, "large"):
        shares("50 million parameters", large(), 1)


if __name__ == "__main__":
    main()
