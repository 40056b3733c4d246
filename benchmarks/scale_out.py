"""What a Ray cluster adds to parts, and what a second worker saves: ratios, on one machine.

    python benchmarks/scale_out.py

Simulates the same sources in parts of about five seconds: one after another in this process, on a cluster of one worker
and on one of two, in turns. One thread each. A worker is warm: it has made a small simulation before, and how long that
took is shown apart. What is beside the simulations is the time of a call less what its parts took by themselves, which
load on the machine changes little; the speed-up is of whole calls, and load on the machine changes it much.
"""

import argparse
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import ray
import ray.cloudpickle
import torch
from torch import nn

from imprint import Plan, RayExecutor, Sources, Task, simulate
from imprint.simulation.executors import Executor, InProcess
from imprint.simulation.executors.pickling import to_bytes

SOURCES, EXAMPLES, FEATURES, WIDTH = 32, 4096, 64, 128


class Run(NamedTuple):
    """One call: how long it took, and its parts by themselves."""

    seconds: float
    inside: float
    bytes: int

    def beside(self, parts: int, workers: int = 1) -> float:
        """Return what a part took beside its simulation."""
        return (self.seconds * workers - self.inside) / parts


def make_inputs() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 10))
    data = (torch.randn(EXAMPLES, FEATURES), torch.randint(0, 10, (EXAMPLES,)))
    sources = Sources.by_label([i % SOURCES for i in range(EXAMPLES)])
    return {"task": Task.classifier(model), "data": data, "sources": sources, "memory": "1GiB", "progress": False}


def measure(inputs: dict[str, Any], steps: int, executor: Executor | None) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = simulate(**inputs, plan=Plan(steps=steps, lr=0.05), out=Path(folder) / "store", executor=executor)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file())
        return Run(seconds, store.manifest.cost.seconds, size)


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """Start a cluster on this machine alone, whose workers have the priority of this process."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (Ray reads it so)
    ray.init(num_cpus=workers, include_dashboard=False, object_store_memory=200 << 20, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def choose_steps(inputs: dict[str, Any], parts: int, seconds: float) -> int:
    """Return how many steps make a part last so long here."""
    few, many = 2, 12
    difference = measure(inputs, many, InProcess(parts)).inside - measure(inputs, few, InProcess(parts)).inside
    return max(1, round(seconds * parts * (many - few) / max(difference, 1e-3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0, help="that a part takes by itself")
    parser.add_argument("--steps", type=int, help="of the simulation, instead")
    given = parser.parse_args()
    torch.set_num_threads(1)
    inputs, parts = make_inputs(), given.parts
    measure(inputs, 1, None)  # warms up
    steps = given.steps or choose_steps(inputs, parts, given.seconds)
    here: list[Run] = []
    on_ray: dict[int, list[Run]] = {1: [], 2: []}
    starts: list[float] = []
    for _ in range(given.repeats):
        here.append(measure(inputs, steps, InProcess(parts)))
        for workers, runs in on_ray.items():
            start = time.perf_counter()
            with cluster(workers):
                measure(inputs, 1, RayExecutor(parts=2))
                starts.append(time.perf_counter() - start)
                runs.append(measure(inputs, steps, RayExecutor(parts=parts)))
    report(parts, steps, here, on_ray, starts)
    moved = len(to_bytes(print, inputs, ray.cloudpickle))
    print(f"bytes moved: {moved:,} of inputs to each node, once; {here[0].bytes:,} of the store, through its folder")


def report(parts: int, steps: int, here: list[Run], on_ray: dict[int, list[Run]], starts: list[float]) -> None:
    print(f"{parts} parts of {SOURCES} sources, {steps} steps; medians of {len(here)}")
    print(f"a part by itself, in this process: {median(run.inside for run in here) / parts:.2f} s")
    beside = {"in this process": [run.beside(parts) for run in here]}
    for workers, runs in on_ray.items():
        beside[f"on Ray, {workers} worker{'s' * (workers > 1)}"] = [run.beside(parts, workers) for run in runs]
    for name, values in beside.items():
        print(f"beside it, for each part, {name}: {median(values):.3f} s ({min(values):.3f} to {max(values):.3f})")
    added = [ray_run.beside(parts) - run.beside(parts) for run, ray_run in zip(here, on_ray[1], strict=True)]
    share = [extra * parts / run.inside for extra, run in zip(added, here, strict=True)]
    print(f"Ray adds {median(added):.3f} s to each part: {100 * median(share):.1f}% of it")
    for name, pairs in {
        "one worker to this process": zip(here, on_ray[1], strict=True),
        "two workers to one": zip(on_ray[1], on_ray[2], strict=True),
    }.items():
        ratios = [before.seconds / after.seconds for before, after in pairs]
        print(f"speed-up of {name}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"a cluster's start, with the first imports of its workers: {median(starts):.1f} s")


if __name__ == "__main__":
    main()
