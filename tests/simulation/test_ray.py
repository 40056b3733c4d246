"""Parts on a Ray cluster of two workers: the same bytes, whoever dies meanwhile, and what the user hears of it."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import ConfigurationError, PartsError, Plan, RayExecutor, Task
from imprint.errors import ReliabilityWarning
from imprint.simulation.executors import InProcess, on_ray
from tests.clusters import cluster  # noqa: F401  (a fixture)
from tests.evaluation.truths import ask, train
from tests.simulation.killing import PLANS, contents, dies_after, run, task

pytestmark = [
    pytest.mark.system,
    pytest.mark.curvature,  # as in the workers
    pytest.mark.usefixtures("cluster"),
]
ROOT = Path(__file__).parents[2]
TANGENT = PLANS["tangent"]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def files_of(out: Path) -> dict[str, int]:
    """When each file of imprints was written, by checkpoint and name."""
    return {f"{path.parent.name}/{path.name}": path.stat().st_mtime_ns for path in out.rglob("imprints-*.safetensors")}


@pytest.mark.parametrize("plan", ["tangent", "spectral"])
def test_parts_on_a_cluster_are_local_parts_to_the_last_byte(plan: str, tmp_path: Path) -> None:
    local = run(tmp_path / "local", PLANS[plan], executor=InProcess(parts=3))
    told: list[tuple[int, int]] = []
    store = run(
        tmp_path / "store",
        PLANS[plan],
        executor=RayExecutor(parts=3),
        progress=lambda done, total: told.append((done, total)),
    )
    assert contents(store.path) == contents(local.path)
    assert store.manifest.execution.threads == 1
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_a_part_has_as_many_threads_as_cpus(tmp_path: Path) -> None:
    store = run(tmp_path / "store", Plan(steps=1, lr=0.2), executor=RayExecutor(parts=1, cpus=2))
    assert store.manifest.execution.threads == 2 and not store.manifest.warnings


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_made_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, note = tmp_path / "store", tmp_path / "killed.json"

    def loss(model: nn.Module, batch: Any) -> Tensor:
        made = files_of(out / "parts" / "2-of-2")
        if made and not note.exists():
            note.write_text(json.dumps(made))
            os.kill(os.getpid(), signal.SIGKILL)
        return cross_entropy(model, batch)

    store = run(out, TANGENT, task=Task(task().model, loss), executor=RayExecutor(parts=2))
    before = json.loads(note.read_text())
    after = files_of(out)
    assert before and {name: after[name] for name in before} == before
    # either part may see the files of the second first, and die
    assert re.search(r"part [12]/2 is tried again, and resumes: its worker died", caplog.text)
    whole = run(tmp_path / "whole", TANGENT, task=Task(task().model, cross_entropy))
    assert contents(store.path) == contents(whole.path)


DRIVER = """
import sys, time, ray, torch
from pathlib import Path
from imprint import RayExecutor, Task
from tests.simulation.killing import PLANS, run, task
from tests.simulation.test_ray import cross_entropy

def slow(model, batch):
    time.sleep(0.003)
    return cross_entropy(model, batch)

run(Path(sys.argv[2]), PLANS["tangent"], task=Task(task().model, slow), executor=RayExecutor(sys.argv[1], parts=2))
"""


def test_a_driver_that_is_killed_is_resumed(cluster: str, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "store"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, cluster, str(out)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(before := files_of(out)) < 2 and time.monotonic() < deadline:
        assert driver.poll() is None
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    store = run(out, TANGENT, task=Task(task().model, cross_entropy), executor=RayExecutor())
    after = files_of(out)
    assert before and {name: after[name] for name in before} == before
    whole = run(tmp_path / "whole", TANGENT, task=Task(task().model, cross_entropy))
    assert contents(store.path) == contents(whole.path)


def test_an_interrupted_call_stops_its_workers_and_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = tmp_path / "store"

    def slow(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(0.003)
        return cross_entropy(model, batch)

    with pytest.raises(KeyboardInterrupt):
        run(
            out,
            TANGENT,
            task=Task(task().model, slow),
            executor=RayExecutor(parts=2),
            progress=dies_after(2, KeyboardInterrupt),
        )
    assert f"stopped: the same call again resumes the parts in {out}" in caplog.text
    store = run(out, TANGENT, task=Task(task().model, cross_entropy), executor=RayExecutor(retries=0))
    whole = run(tmp_path / "whole", TANGENT, task=Task(task().model, cross_entropy))
    assert contents(store.path) == contents(whole.path)


def test_a_part_that_always_fails_is_reported_once_and_the_others_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = tmp_path / "store" / "parts" / "2-of-3" / "part.json"
    bad.mkdir(parents=True)  # a folder in the place of a file
    with pytest.raises(PartsError, match=r"1 of 3 parts could not be made \(2/3: .*\)\. The other 2 are finished"):
        run(tmp_path / "store", TANGENT, executor=RayExecutor(parts=3, retries=1))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].startswith("part 2/3 (sources 2, 3) failed, after 2 attempts: ")
    assert "Traceback" in errors[0] and "workspace.py" in errors[0]
    bad.rmdir()
    store = run(tmp_path / "store", TANGENT, executor=RayExecutor())
    assert contents(store.path) == contents(run(tmp_path / "whole", TANGENT).path)


def test_what_workers_say_reaches_the_user_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        warnings.warn("doubtful", ReliabilityWarning, stacklevel=1)
        logging.getLogger("mine").warning("slow")
        return cross_entropy(model, batch)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(tmp_path / "store", TANGENT, task=Task(task().model, loss), executor=RayExecutor(parts=3))
    assert [str(each.message) for each in seen].count("doubtful") == 1
    assert [record.getMessage() for record in caplog.records if record.name == "mine"] == ["slow"]


def test_a_folder_that_workers_do_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "_VISIBLE", 0.0)
    monkeypatch.setattr(on_ray, "temporary_folder", lambda parent: _Elsewhere(parent))
    with pytest.raises(PartsError, match=r"node \S+ does not see \S+/store/parts: give a folder that all nodes"):
        run(tmp_path / "store", TANGENT, executor=RayExecutor(parts=2))
    assert not (tmp_path / "store").exists()


class _Elsewhere:
    """A folder that is made on another machine."""

    def __init__(self, parent: Path) -> None:
        self.place = parent / "elsewhere"

    def __enter__(self) -> Path:
        return self.place

    def __exit__(self, *error: object) -> None:
        pass


def test_ground_truth_is_made_on_a_cluster(tmp_path: Path) -> None:
    truth = ask(tmp_path / "truth", train, executor=RayExecutor(parts=2))
    assert torch.equal(truth.values, ask(how=train).values)


def test_a_cluster_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(
        ConfigurationError, match=r"no Ray cluster could be reached at '127.0.0.1:7' .*Connection refus"
    ):
        run(tmp_path / "store", TANGENT, executor=RayExecutor("127.0.0.1:7", parts=2))
    assert not (tmp_path / "store").exists()
