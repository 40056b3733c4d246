"""Checkpoints of several training runs from a terminal, and the errors that they give."""

import csv
from pathlib import Path
from shutil import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from imprint import attribute
from imprint.cli.experiment import Experiment
from tests.cli.commands import TASK, Command, imprints, loaded


@pytest.fixture
def files(here: Path, tmp_path: Path) -> list[str]:
    """Three checkpoints: two of one run, and one of another."""
    state = loaded(here / "model.py").task.state()
    for number, name in enumerate(("a1", "a2", "b1")):
        save_file({key: (1 + 0.5 * number) * tensor for key, tensor in state.items()}, tmp_path / f"{name}.safetensors")
    return [str(tmp_path / f"{name}.safetensors") for name in ("a1", "a2", "b1")]


def test_commas_join_the_checkpoints_of_a_run(command: Command, files: list[str], tmp_path: Path) -> None:
    a1, a2, b1 = files
    given: dict[str, tuple[tuple[str, ...], list[int]]] = {
        "nested": ((f"{a1},{a2}", b1), [0, 0, 1]),
        "singles": ((f"{a1},", f"{b1},"), [0, 1]),
        "flat": ((a1, a2, b1), [0, 0, 0]),
        "one run": ((f"{a1},{a2}",), [0, 0]),
    }
    for name, (options, runs) in given.items():
        words = [word for option in options for word in ("-c", option)]
        values = command("simulate", "model.py:task", "-o", tmp_path / name, "--no-check", *words, "--json").values
        assert [checkpoint["run"] for checkpoint in values["checkpoints"]] == runs, name
    shown = command("inspect", tmp_path / "nested").out
    assert [line.split() for line in shown.splitlines() if line.startswith("│ run ")] == [
        ["│", "run", "│", "0", "│", "0", "│", "1", "│"]
    ]
    assert "│ run " not in command("inspect", tmp_path / "flat").out


def test_the_command_shows_and_writes_errors(command: Command, here: Path, files: list[str], tmp_path: Path) -> None:
    a1, a2, b1 = files
    made = command("simulate", "model.py:task", "-o", tmp_path / "store", "--no-check", "-c", f"{a1},{a2}", "-c", b1)
    assert made.code == 0, made.err
    model = loaded(here / "model.py")
    result = attribute(model.task, tmp_path / "store", model.queries, progress=False)
    assert result.standard_error is not None and result.distinguishable is not None
    shown = command("attribute", tmp_path / "store", *TASK, "--out", tmp_path / "scores.csv")
    assert "\nstandard errors over 2 runs\n" in shown.out and shown.out.count("± standard error") == 2
    assert result.mean().top(1)[0][0].format_error() in shown.out.split("Change of loss")[0]
    assert "~ not distinguishable from 0: its 95% interval contains 0" in shown.out
    for row in csv.DictReader((tmp_path / "scores.csv").open(newline="")):
        place = int(row["query"]), result.labels.source_ids.index(row["source"])
        assert float(row["standard_error"]) == float(result.standard_error[place])
        assert row["distinguishable"] == str(bool(result.distinguishable[place]))
    values = command("attribute", tmp_path / "store", *TASK, "--json").values
    assert values["details"]["error"] == "standard errors over 2 runs"
    assert values["queries"][0][0]["standard_error"] == pytest.approx(result.top(1)[0][0].standard_error)


def test_a_file_of_settings_has_a_list_for_each_run(tmp_path: Path) -> None:
    (tmp_path / "news.toml").write_text('checkpoints = [["a1.safetensors", "a2.safetensors"], ["b1.safetensors"]]')
    found = Experiment.from_toml(tmp_path / "news.toml").checkpoints
    a, b = f"{tmp_path}/a1.safetensors,{tmp_path}/a2.safetensors", f"{tmp_path}/b1.safetensors,"
    assert found == (a, b)
    (tmp_path / "same.toml").write_text('checkpoints = ["a1.safetensors,a2.safetensors", "b1.safetensors,"]')
    assert Experiment.from_toml(tmp_path / "same.toml").checkpoints == found


def test_folders_and_files_of_torch_save_are_checkpoints_too(
    command: Command, here: Path, files: list[str], tmp_path: Path
) -> None:
    for number in (1, 2):
        folder = tmp_path / "train" / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        copy(files[number - 1], folder / "model.safetensors")
        torch.save(load_file(files[number - 1]), tmp_path / f"epoch-{number}.pt")
    (here / "early").mkdir(exist_ok=True)  # without weights: the name is an import string
    with (here / "model.py").open("a") as file:
        file.write("early = [task.state()]\n")
    first, second = tmp_path / "train" / "checkpoint-1", tmp_path / "train" / "checkpoint-2"
    given: dict[str, tuple[tuple[object, ...], list[int]]] = {
        "one": ((first,), [0]),
        "two": ((first, second), [0, 0]),
        "runs": ((f"{first},", f"{second},"), [0, 1]),
        "pickled": ((tmp_path / "epoch-1.pt", tmp_path / "epoch-2.pt"), [0, 0]),
        "named": (("early",), [0]),
    }
    for name, (options, runs) in given.items():
        words = [word for option in options for word in ("-c", option)]
        values = command("simulate", "model.py:task", "-o", tmp_path / name, "--no-check", *words, "--json").values
        assert [checkpoint["run"] for checkpoint in values["checkpoints"]] == runs, name
    assert imprints(tmp_path / "two") == imprints(tmp_path / "pickled")
    (tmp_path / "train.toml").write_text('checkpoints = [["train/checkpoint-1"], ["epoch-2.pt"]]')
    assert Experiment.from_toml(tmp_path / "train.toml").checkpoints == (f"{first},", f"{tmp_path}/epoch-2.pt,")
