"""What a second thread does to a small model: the demo's simulation, alone and beside processes that keep cores busy.

    python benchmarks/threads.py

Each job trains the demo's model and simulates its imprints, in a process of its own: with one thread, with the number
the command line chooses, and with one thread for each core. They take turns, so that other load reaches all of them
alike. Prints medians and their ratios to one thread under the same load.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SETTINGS = {"one thread": "1", "as the command line chooses": None, f"{CORES} threads": str(CORES)}
VARIABLE = "OMP_NUM_THREADS"
JOB = """
import time
from dataclasses import replace
from imprint import simulate
from imprint.benchmarking.settings.catalogue import ready
from imprint.runtime.threads import set_threads

digits = ready("digits")
set_threads(digits.task.model)
start = time.perf_counter()
plan = replace(digits.plan, steps={steps})
simulate(digits.task, digits.data, digits.sources, plan, checkpoints=digits.checkpoints, progress=False)
print(time.perf_counter() - start)
"""


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


def seconds(threads: str | None, steps: int, longest: float | None = None) -> float:
    """Time the job; it is stopped after the longest time that is of interest."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if threads is not None:
        environment[VARIABLE] = threads
    command = [sys.executable, "-c", JOB.format(steps=steps)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=longest)
    except subprocess.TimeoutExpired:
        return float("inf")
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="of the simulation, at each checkpoint; the demo has 300")
    parser.add_argument("--longest", type=float, default=120, help="seconds after which a job is stopped")
    given = parser.parse_args()
    print(f"{CORES} cores, load average {os.getloadavg()[0]:.1f} beforehand, medians of {given.repeats}")
    for name, processes in (("alone", 0), (f"beside {CORES} busy processes", CORES)):
        found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        with busy(processes):
            for _ in range(given.repeats):
                for setting, threads in SETTINGS.items():
                    found[setting].append(seconds(threads, given.steps, given.longest))
        for setting, times in found.items():
            took, more = min(median(times), given.longest), "more than " * (median(times) > given.longest)
            ratio = took / median(found["one thread"])
            print(f"{name}, {setting}: {more}{took:.1f} s, {more}{ratio:.2f} times as long as one thread", flush=True)


if __name__ == "__main__":
    main()
