"""What a second thread does to a small model: the demo's simulation, as the machine is and with all cores kept busy.

    python benchmarks/threads.py

Simulates the demo's imprints with one thread, with the number the command line chooses, and with one thread for each
core. They take turns, so that other load reaches all of them alike. Prints medians and their ratios to one thread under
the same load.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median

import torch

from imprint import simulate
from imprint.benchmarking.settings.catalogue import load_setting
from imprint.runtime.threads import threads_for

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Keep so many cores busy for a while."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of the simulation, at each checkpoint; the demo has 300")
    given = parser.parse_args()
    digits = load_setting("digits")
    size = sum(parameter.numel() for parameter in digits.task.model.parameters())
    settings = {"one thread": 1, "the command line's choice": threads_for(size, CORES), f"{CORES} threads": CORES}
    torch.set_num_threads(1)
    checkpoints, plan = digits.checkpoints, replace(digits.plan, steps=given.steps)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        simulate(digits.task, digits.data, digits.sources, plan, checkpoints=checkpoints, progress=False)
        return time.perf_counter() - start

    seconds(1)  # warms up
    for name, processes in (("as it is", 0), (f"beside {CORES} busy processes", CORES)):
        found: dict[str, list[float]] = {setting: [] for setting in settings}
        with busy(processes):
            for _ in range(given.repeats):
                for setting, threads in settings.items():
                    found[setting].append(seconds(threads))
        load, one = os.getloadavg()[0], median(found["one thread"])
        for setting, times in found.items():
            took = f"{median(times):.1f} s, {median(times) / one:.2f} times as long as one thread"
            print(f"{CORES} cores, load {load:.1f}, {name}, {setting}: {took}", flush=True)


if __name__ == "__main__":
    main()
