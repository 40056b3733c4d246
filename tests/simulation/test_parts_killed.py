"""Processes that make parts at the same time, and merges that are killed anywhere."""

import multiprocessing
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imprint import Store, StoreError, merge
from tests.simulation.killing import PLANS, contents, kill_before_change, run, run_part

ROOT = Path(__file__).parents[2]
MAKES = """
import sys, torch
from pathlib import Path
from tests.simulation.killing import PLANS, run_part
torch.set_num_threads(1)
print("ready", flush=True)
sys.stdin.readline()
run_part(Path(sys.argv[1]), sys.argv[3], PLANS[sys.argv[2]])
"""


def start(code: str, *arguments: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


@pytest.mark.system
@pytest.mark.curvature  # as in the other processes
@pytest.mark.parametrize("plan", ["tangent", "spectral"])
def test_processes_that_begin_together_make_the_store_of_one(plan: str, tmp_path: Path) -> None:
    processes = [start(MAKES, tmp_path / "store", plan, f"{number}/3") for number in (1, 2, 3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("\n")
    assert [process.returncode for process in processes] == [0, 0, 0]
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert contents(merge(tmp_path / "store", progress=False).path) == expected


@pytest.mark.system
@pytest.mark.curvature  # as in the other process
def test_a_part_that_is_killed_is_gone_on_with(tmp_path: Path) -> None:
    for wait in (0.1, 0.3):
        process = start(MAKES, tmp_path / "store", "tangent", "1/2")
        assert process.stdin is not None and process.stdout is not None and process.stdout.readline() == "ready\n"
        process.stdin.write("\n")
        process.stdin.flush()
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    for text in ("1/2", "2/2"):
        process = start(MAKES, tmp_path / "store", "tangent", text)
        process.communicate("\n")
        assert process.returncode == 0
    expected = contents(run(tmp_path / "whole", PLANS["tangent"]).path)
    assert contents(merge(tmp_path / "store", progress=False).path) == expected


def merge_until(folder: Path, changes: int) -> None:
    """Merge, and be killed before the change of the file system after so many."""
    kill_before_change(changes)
    merge(folder, progress=False)


@pytest.mark.system
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_merge_killed_anywhere_leaves_the_parts_or_the_store(tmp_path: Path) -> None:
    whole = contents(run(tmp_path / "whole", PLANS["spectral"]).path)
    for number in (1, 2):
        run_part(tmp_path / "parts", f"{number}/2", PLANS["spectral"])
    before = {path.relative_to(tmp_path / "parts") for path in (tmp_path / "parts").rglob("*")}
    outcomes: list[str] = []
    while True:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(tmp_path / "parts", tmp_path / "store")
        process = multiprocessing.get_context("fork").Process(
            target=merge_until, args=(tmp_path / "store", len(outcomes))
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        if (tmp_path / "store" / "manifest.json").exists():
            outcomes.append("store")
            Store(tmp_path / "store").verify()
        else:
            outcomes.append("parts")
            with pytest.raises(StoreError, match="holds parts of a store that are not merged"):
                Store(tmp_path / "store")
            assert before <= {path.relative_to(tmp_path / "store") for path in (tmp_path / "store").rglob("*")}
        assert contents(merge(tmp_path / "store", progress=False).path) == whole
    assert outcomes == sorted(outcomes) and outcomes.count("parts") > 50 and outcomes.count("store") > 5
