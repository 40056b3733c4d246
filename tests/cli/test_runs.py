"""A recorded run is repeated from the command line, and its store says so."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint import Recording, Store
from tests.cli.commands import Command, imprints
from tests.recording.runs import train
from tests.simulation.recordings import record
from tests.simulation.removals import removing_engine

MODEL = """
from imprint import Plan
from tests.simulation.removals import SOURCES, HandMadeRun, make_data, make_model, make_task

task, data, sources = make_task(), make_data(), SOURCES
queries = make_data()[0][:3], make_data()[1][:3]
plan = Plan(steps=3, lr=0.1)
checkpoints = [task.state()]
run = HandMadeRun.of(make_model())
"""


@pytest.fixture(autouse=True)
def _removing(empty: Path) -> Iterator[None]:
    (empty / "model.py").write_text(MODEL)
    with removing_engine():
        yield


RUN = ("model.py:task", "--run", "model.py:run", "-p", "engine=removing")


def test_a_run_is_checked_repeated_shown_and_read_out(command: Command) -> None:
    assert "removed" in command("check", *RUN).out
    values = command("simulate", *RUN, "-o", "store", "--json").values
    assert values["question"] == "this_run" and values["readouts"] == ["removed"]
    assert values["recording"] == Store("store").manifest.request.recording
    assert values["checkpoints"][0]["measured"]["chaos"] > 0
    shown = command("inspect", "store").out
    for text in (
        "this run: if this source had had weight 0",
        "chaos",
        "deviation from the recorded end",
        "removing of the",
    ):
        assert text in shown
    assert "damping" not in shown and "curvature" not in shown
    found = command("attribute", "store", "--task", "model.py:task")
    assert found.code == 0 and "this run" in found.out
    refused = command("attribute", "store", "--task", "model.py:task", "--readout", "jvp")
    assert refused.code == 1 and "along a finite removal a derivative is 55 to 130% off" in refused.err


def test_parts_of_a_run_that_is_not_repeated_use_its_checkpoints(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.simulation.auto.engine_for", lambda question: "removing")
    monkeypatch.setattr("imprint.simulation.repeatable.CHAOTIC", 0.0)
    given = ("simulate", "model.py:task", "--run", "model.py:run", "-p", "auto", "--out", "store", "--part")
    for part in ("1/2", "2/2"):
        made = command(*given, part)
        assert made.code == 0, made.err
    assert command("merge", "store").code == 0
    assert Store("store").question == "expected"


def test_a_recording_is_shown_whether_it_is_finished_or_not(command: Command, tmp_path: Path) -> None:
    train(tmp_path / "run")[1].finish()
    shown = command("inspect", str(tmp_path / "run")).out
    recording = Recording(tmp_path / "run")
    for text in (
        "finished, 8 steps",
        recording.sha256[:12],
        "24 training examples",
        "AdamW",
        "after 0, 8 steps",
        "--run",
    ):
        assert text in shown
    values = command("inspect", str(tmp_path / "run"), "--json").values
    assert (values["steps"], values["checkpoints"], values["recording"]) == (8, [0, 8], recording.sha256)
    assert values["losses"] == [recording.steps[0].batches[0].loss, recording.steps[-1].batches[0].loss]
    train(tmp_path / "part", stop=3)
    assert "unfinished: resume the training" in command("inspect", str(tmp_path / "part")).out
    refused = command("attribute", str(tmp_path / "run"), "--task", "model.py:task")
    assert refused.code == 1 and "is the recording of a training run, not a store" in " ".join(refused.err.split())


def test_a_store_names_its_run_and_does_not_load_it(command: Command) -> None:
    assert command("simulate", *RUN, "-o", "store", "--no-check").code == 0
    again = command("simulate", "model.py:task", "--repeat", "store", "-o", "again", "--no-check")
    assert again.code == 1 and "--run model.py:run" in again.err
    given = ("--run", "model.py:run")
    assert command("simulate", "model.py:task", *given, "--repeat", "store", "-o", "again", "--no-check").code == 0


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_what_is_no_recording_is_refused(name: str, command: Command) -> None:
    refused = command("check", "model.py:task", "--run", name)
    assert refused.code == 1 and "recording.json" in refused.err


def test_a_configuration_names_a_run_relative_to_its_folder(command: Command, empty: Path) -> None:
    (empty / "inner").mkdir()
    (empty / "inner" / "news.toml").write_text('task = "../model.py:task"\nrun = "train"\nout = "store"\n')
    refused = command("simulate", "--config", "inner/news.toml")
    assert refused.code == 1 and "inner/train" in refused.err


@pytest.mark.wide
def test_the_folder_of_a_recording_is_repeated_without_a_plan(command: Command, empty: Path) -> None:
    record(empty / "train").finish()
    values = command("simulate", "model.py:task", "--run", "train", "-o", "store", "--json").values
    assert values["question"] == "this_run" and values["recording"] == Recording(empty / "train").sha256
    shown = command("check", "model.py:task", "--run", "train").out
    assert "of the recorded run" in shown and "needs a recorded run" in shown  # the second is an engine of these tests
    again = command("simulate", "model.py:task", "--run", "train", "--repeat", "store", "-o", "again", "--no-check")
    assert again.code == 0 and imprints("again") == imprints("store")
    chosen = command("simulate", "model.py:task", "--run", "train", "-p", "auto", "-o", "auto", "--no-check", "--json")
    assert chosen.values["question"] == "this_run"
