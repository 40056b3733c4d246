"""Errors of the user are told in one line; no others are hidden."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

import imprint
from imprint import simulate
from imprint.cli.app import main
from tests.cli.commands import MODEL, Command, loaded


def test_a_store_made_by_python_asks_for_the_task(command: Command, here: Path, tmp_path: Path) -> None:
    model = loaded(here / "model.py")
    simulate(model.task, model.data, model.sources, model.plan, out=tmp_path / "store", progress=False)
    for arguments in (
        ("attribute", tmp_path / "store"),
        ("simulate", "--repeat", tmp_path / "store", "-o", tmp_path / "b"),
    ):
        refused = command(*arguments)
        flag = "--task " if arguments[0] == "attribute" else ""
        assert refused.code == 1
        assert f"store was made from Python and names no task: give {flag}FILE.py:task." in refused.err
    assert command("attribute", tmp_path / "store", "--task", "model.py:task").code == 0


ERRORS = {
    "a store that is not there": ("inspect nowhere", "there is no folder nowhere"),
    "a manifest that is not there": ("simulate model.py:task --repeat nowhere -o x", "there is no folder nowhere"),
    "no task": ("check", "no task is named"),
    "no folder": ("simulate model.py:task", "--out runs/NAME"),
    "no colon": ("check model.py", "'model.py' is neither an import string"),
    "no file": ("check nothing.py:task", "there is no file nothing.py"),
    "no module": ("check nothing.at.all:task", "there is no module nothing.at.all"),
    "no such name": ("check model.py:tsk", "there is no 'tsk'; did you mean task?"),
    "another type": ("check model.py:plan", "model.py:plan is a Plan, not an imprint.Task"),
    "no sources": ("check model.py:task --sources queries", "queries is a tuple, not an imprint.Sources"),
    "no plan field": ("check model.py:task -p step=3", "a plan has no field 'step'"),
    "no value": ("check model.py:task -p steps", "expected NAME=VALUE"),
    "a bad value": ("check model.py:task -p steps=many", "steps must be a whole number of at least 1, got 'many'"),
    "values for other checkpoints": ("check model.py:task -p steps=1,2", "steps has 2 values, but there are 1"),
    "no such device": ("check model.py:task --device gpu", "the model cannot be moved to 'gpu'"),
    "no such dtype": ("check model.py:task --dtype int8", "dtype must be one of float32, bfloat16, float64"),
    "no configuration": ("check --config nothing.toml", "nothing.toml cannot be read"),
    "a checkpoint that is none": ("check model.py:task -c model.py -c b.pt", "cannot be read as safetensors"),
    "no checkpoint": ("check model.py:task -c nothing.safetensors", "nothing.safetensors does not exist"),
    "no such readout": ("attribute runs/news --task model.py:task --readout guess", "readout 'guess' is unknown"),
    "no such order": ("attribute runs/news --task model.py:task --by size", "sources can be ordered by"),
    "no end points": ("attribute runs/news --task model.py:task --readout literal", "a literal readout needs"),
    "another kind of file": ("attribute runs/news --out scores.xlsx", "must end in .csv or .safetensors"),
    "no folder for the scores": ("attribute runs/news --out nowhere/a.csv", "there is no folder nowhere"),
    "not so much memory": (
        "attribute runs/news --task model.py:task --memory lots",
        "memory must be a number of bytes",
    ),
}


@pytest.mark.parametrize(("line", "words"), ERRORS.values(), ids=ERRORS)
def test_errors_are_one_line_on_standard_error(line: str, words: str, command: Command, here: Path) -> None:
    failed = command(*shlex.split(line))
    assert failed.code == 1 and not failed.out
    told, newline, error = failed.err.removesuffix("\n").rpartition("\n")
    assert error.startswith("error: ") and words in error
    assert told == ("the task is model.py:task, by which the store was made" if newline else "")


def test_an_error_of_several_lines_is_told_in_one(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL + "def task():\n    raise imprint.TaskError('first\\n  second [red]')\n")
    assert command("check", "model.py:task") == (1, "", "error: first second [red]\n")


BROKEN = """
def queries():
    return Lazy()


class Lazy:
    def __len__(self):
        return 2

    def __getitem__(self, index):
        raise OSError(f"no picture {index} [red]")
"""


def test_a_sample_that_cannot_be_read_is_told_in_one_line(command: Command, here: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(MODEL + BROKEN)
    failed = command("attribute", "runs/news", "--task", "model.py:task", "--queries", f"{file}:queries")
    assert failed.code == 1 and failed.out == ""
    assert failed.err.startswith("error: sample 0 of 2 could not be read (OSError: no picture 0 [red])")
    assert failed.err.count("\n") == 1


def test_a_training_that_fails_says_which(command: Command, here: Path, tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text(MODEL + "\n\ndef train(subset, seed):\n    raise OSError('no disk')\n")
    failed = command("retrain", f"{file}:train", "--kind", "sources", "--out", str(tmp_path / "truth"))
    assert failed.code == 1
    assert "error: OSError: no disk" in failed.err
    assert re.search(r"run 0.*seed \d+", failed.err.replace("\n", " ")), failed.err


def test_an_error_of_the_library_has_a_traceback_if_one_is_asked_for(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("inspect", "nowhere").code == 1
    monkeypatch.setenv("IMPRINT_TRACEBACK", "1")
    with pytest.raises(imprint.StoreError):
        main()


def test_an_error_that_is_not_the_users_hides_nothing(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.cli.commands.stores.inspect_store", lambda store: dict[str, int]()["missing"])
    monkeypatch.setattr("imprint.cli.app.user_frames", lambda error: [])  # the line above is in a test, no user's file
    monkeypatch.setattr(sys, "argv", ["imprint", "inspect", "runs/news"])
    with pytest.raises(KeyError):
        main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_an_error_of_ours(command: Command, here: Path) -> None:
    failed = command("simulate", "model.py:task", "-o", "nowhere", "--device", "cuda")
    assert failed.code == 1
    assert failed.err.startswith("error: the model cannot be moved to 'cuda': ") and failed.err.count("\n") == 1


def test_scores_of_another_kind_are_refused_before_work_begins(command: Command, here: Path) -> None:
    failed = command("attribute", "nowhere", "--out", "scores.xlsx")  # the store is not even looked for
    assert failed.code == 1 and "scores.xlsx" in failed.err


@pytest.mark.parametrize("line", ["guess", "check --guess", "attribute", "attribute runs/news --top 0", "check a b"])
def test_a_wrong_command_line_leaves_with_2(line: str, command: Command, here: Path) -> None:
    failed = command(*shlex.split(line))
    assert failed.code == 2 and not failed.out
    assert "Usage: imprint" in failed.err and "Traceback" not in failed.err
