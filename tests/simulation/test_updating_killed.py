"""Changes of stores that are killed anywhere, by SIGKILL: either the old store is there or the new one."""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imprint import Store, StoreError, attribute, drop, merge
from tests.simulation.killing import data, kill_before_change, task
from tests.simulation.test_updating import assert_same, bring, make

pytestmark = [
    pytest.mark.system,
    pytest.mark.curvature,
    pytest.mark.skipif(sys.platform == "win32", reason="there is no fork"),
]
FORK = multiprocessing.get_context("fork") if sys.platform != "win32" else multiprocessing.get_context()
Change = Callable[[Path], object]


def split(folder: Path) -> object:
    """Add a source, drop one, and keep one."""
    return bring(folder, 2, 3, drop=True)


def lose(folder: Path) -> object:
    return drop(folder, "1", erase=True, progress=False)


def killed(change: Change, folder: Path, changes: int) -> None:
    kill_before_change(changes)
    change(folder)


def scores(store: Store) -> Tensor:
    x, y = data()
    found: Tensor = attribute(task(), store, (x[:2], y[:2]), progress=False).scores
    return found


@pytest.mark.parametrize("change", [lose, split])
def test_a_change_killed_before_any_of_its_steps_is_done_or_not(change: Change, tmp_path: Path) -> None:
    """The same call again completes it, whatever was left."""
    old = make(tmp_path / "old", 1, 2)
    expected = shutil.copytree(old.path, tmp_path / "new")
    change(expected)
    new, step, outcomes = Store(expected), 0, list[bool]()
    draw = random.Random(0)
    while True:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(old.path, tmp_path / "store")
        process = FORK.Process(target=killed, args=(change, tmp_path / "store", step))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        found = Store(tmp_path / "store")
        found.verify()
        outcomes.append(found.source_ids == new.source_ids)
        assert outcomes[-1] or found.sha256 == old.sha256
        if not outcomes[-1] or change is not lose:  # which has no source to drop any more
            change(tmp_path / "store")
        again = Store(tmp_path / "store")
        assert_same(again, new)
        assert len(again.manifest.history) == 1
        step += draw.randrange(1, 4 if change is lose else 16)
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}


def test_a_merge_of_stores_killed_anywhere_leaves_a_store_or_none(tmp_path: Path) -> None:
    stores = [make(tmp_path / "a", 1, 2).path, make(tmp_path / "b", 3).path]
    expected = merge(stores, tmp_path / "expected", progress=False)
    step, outcomes, draw = 0, list[bool](), random.Random(0)
    while True:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        process = FORK.Process(
            target=killed, args=(lambda out: merge(stores, out, progress=False), tmp_path / "store", step)
        )
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        outcomes.append((tmp_path / "store" / "manifest.json").exists())
        if outcomes[-1]:
            Store(tmp_path / "store").verify()
        assert_same(merge(stores, tmp_path / "store", progress=False), expected)
        step += draw.randrange(1, 6)
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}


def change_forever(folder: Path) -> None:
    while True:
        bring(folder, 1, 2, 6)
        drop(folder, "6", progress=False)


def test_processes_that_read_meanwhile_see_one_version_or_the_other(tmp_path: Path) -> None:
    """And one that is killed at random moments leaves nothing that the next one trips over."""
    store = make(tmp_path / "store", 1, 2)
    known = {store.source_ids: scores(store)}
    updated = bring(store, 1, 2, 6)
    known[updated.source_ids] = scores(updated)
    draw, seen = random.Random(0), set[tuple[str, ...]]()
    for _ in range(6):
        process = FORK.Process(target=change_forever, args=(store.path,))
        process.start()
        stop = time.monotonic() + draw.uniform(0.2, 1.5)
        while time.monotonic() < stop and process.is_alive():
            opened = Store(store.path)
            with contextlib.suppress(StoreError):  # changed twice since it was opened
                torch.testing.assert_close(scores(opened), known[opened.source_ids], rtol=1e-4, atol=1e-5)
                seen.add(opened.source_ids)
        assert process.is_alive(), "changes go on"
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        found = Store(store.path)
        found.verify()
        torch.testing.assert_close(scores(found), known[found.source_ids], rtol=1e-4, atol=1e-5)
    assert seen == set(known)
