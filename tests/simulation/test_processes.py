"""Processes that want the same folder, and processes that are killed."""

import multiprocessing
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imprint import StoreError
from imprint.store.files import Lock
from tests.simulation.killing import PLANS, contents, run

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


def hammer(folder: Path, times: int) -> None:
    """Take the lock so many times; leave with 1 if another process holds it too."""
    while times:
        try:
            lock = Lock(folder)
        except StoreError:
            continue
        try:
            (folder / "alone").touch(exist_ok=False)
            (folder / "alone").unlink()
            times -= 1
        finally:
            lock.release()


@pytest.mark.skipif(sys.platform == "win32", reason="folders go unlocked there")
def test_only_one_of_many_processes_holds_a_lock_that_is_made_and_removed_all_the_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=hammer, args=(tmp_path, 100)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert not list(tmp_path.iterdir())


KILLABLE = """
import sys, torch
from pathlib import Path
from tests.simulation.killing import PLANS, run
from imprint.simulation import snapshot
torch.set_num_threads(1)
snapshot.SECONDS = 0.0
print("ready", flush=True)
run(Path(sys.argv[1]), PLANS[sys.argv[2]])
"""


def kill_and_resume(folder: Path, plan: str, kills: int, seed: int) -> dict[str, bytes]:
    """Run in processes of their own, killed after random times, until one comes through."""
    draw = random.Random(seed)
    for attempt in range(10 * kills + 10):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLABLE, str(folder), plan],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        process.stdout.readline()  # imports are done: what follows is the simulation
        if attempt < kills:
            time.sleep(draw.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return contents(folder)
    raise AssertionError("the run never came through")


@pytest.mark.system
@pytest.mark.curvature  # as in the other process
@pytest.mark.parametrize("plan", ["tangent", "one-sided mini-batches", "spectral"])
def test_a_process_killed_at_random_moments_ends_in_the_same_store(plan: str, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=2, seed=len(plan)) == expected


@pytest.mark.long
@pytest.mark.curvature  # as in the other process
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plan", PLANS.keys())
def test_processes_killed_a_hundred_times_end_in_the_same_store(plan: str, seed: int, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=5, seed=seed) == expected
