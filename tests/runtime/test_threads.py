"""Small models get one thread where the process is ours; elsewhere the caller's setting stays, with one warning."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from imprint import Plan, Sources, Store, Task, attribute, simulate
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from imprint.runtime import threads
from imprint.runtime.threads import set_threads, threads_for, warn_of_threads

SMALL = nn.Linear(3, 2)
LARGE = nn.Linear(20_000, 1_000, device="meta")  # has a size and no values


@pytest.fixture(autouse=True)
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine of four cores, at the start of a process."""
    for variable in threads._VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(threads, "_AT_START", 4)
    monkeypatch.setattr(threads, "_warned", False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_the_rule_grows_from_one_thread_to_all_cores() -> None:
    for cores in (1, 2, 16):
        found = [threads_for(10**digits, cores) for digits in range(12)]
        assert found == sorted(found) and found[0] == 1 and found[-1] == cores
    assert [threads_for(size, 2) for size in (0, 9_999_999, 10_000_000)] == [1, 1, 2]


def test_a_small_model_gets_one_thread() -> None:
    set_threads(SMALL)
    assert torch.get_num_threads() == 1


def test_a_large_model_gets_as_many_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_on_cpu", lambda model: True)
    set_threads(LARGE)
    assert torch.get_num_threads() == 4


def test_a_model_on_another_device_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2, device="meta")
    set_threads(model)
    warn_of_threads(model)
    assert torch.get_num_threads() == 4 and not caplog.records


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_stays(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "4")
    set_threads(SMALL)
    assert torch.get_num_threads() == 4


def test_what_the_users_file_sets_stays() -> None:
    torch.set_num_threads(3)
    set_threads(SMALL)
    assert torch.get_num_threads() == 3


def test_loading_a_task_for_a_command_sets_the_threads(tmp_path: Path) -> None:
    file = tmp_path / "small.py"
    file.write_text("import imprint, torch\ntask = imprint.Task.classifier(torch.nn.Linear(3, 2))\n")
    _ = Objects(Experiment(task=f"{file}:task")).task
    assert torch.get_num_threads() == 1


def test_library_calls_leave_the_setting_alone_and_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    task, data = Task.classifier(nn.Linear(3, 2)), (torch.randn(6, 3), torch.arange(6) % 2)
    with caplog.at_level(logging.WARNING, "imprint.runtime.threads"):
        store = simulate(task, data, Sources.per_example(6), Plan(steps=2, lr=0.1), progress=False)
        attribute(task, store, data, progress=False)
    assert [record.getMessage() for record in caplog.records] == [
        "computing a model of 8 parameters with 4 threads: on a busy machine one thread is several times faster; call "
        "torch.set_num_threads(1), or set OMP_NUM_THREADS=1"
    ]
    assert torch.get_num_threads() == store.manifest.execution.threads == 4


def test_one_thread_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(1)
    warn_of_threads(SMALL)
    assert not caplog.records


@pytest.mark.system
@pytest.mark.parametrize(("variable", "expected"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_a_command_records_the_threads_it_computed_with(
    variable: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "small.py").write_text(
        "import imprint, torch\ntask = imprint.Task.classifier(torch.nn.Linear(3, 2))\n"
        "data = (torch.ones(4, 3), torch.arange(4) % 2)\nplan = imprint.Plan(steps=1, lr=0.1)\n"
    )
    given = ["simulate", "small.py:task", "--sources", "per-example", "--no-check", "--out", "store"]
    command = [sys.executable, "-c", "from imprint.cli.app import main; main()", *given]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert Store(tmp_path / "store").manifest.execution.threads == expected
