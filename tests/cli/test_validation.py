"""Validation from a terminal: the command, and every other command that shows what it found."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from imprint import ImprintError
from imprint.cli.app import app

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

import imprint

torch.manual_seed(0)
centres = torch.randn(2, 3)
y = torch.randint(0, 2, (60,))
x = centres[y] + torch.randn(60, 3)
data = (x, y)
asked = torch.randint(0, 2, (25,))
queries = (centres[asked] + torch.randn(25, 3), asked)
sources = imprint.Sources.by_label([index % 5 for index in range(60)], names={0: "[bold]times"})
plan = imprint.Plan(steps=10, lr=0.3)


def record(seed, folder):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    with imprint.RunRecorder(folder, model, optimiser, data=data, seed=seed) as run:
        for indices in run.batches(60, 10, epochs=3):
            with run.step(indices) as step:
                optimiser.zero_grad()
                step.backward(F.cross_entropy(model(x[indices]), y[indices]))
                optimiser.step()


def task():
    return imprint.Task.classifier(nn.Linear(3, 2))
"""
TASK = ("--task", "model.py:task")


def run(*arguments: str) -> str:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(found.exception, ImprintError):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a model, a recorded run, and a store of either question."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        space: dict[str, Any] = {}
        exec(compile(MODEL, "model.py", "exec"), space)
        space["record"](7, "recorded")
        run("simulate", "model.py:task", "--run", "recorded", "--no-check", "--out", "replayed")
        run("simulate", "model.py:task", "--no-check", "--out", "path")
        yield folder


def test_a_replayed_store_is_validated_by_its_own_run_and_every_command_shows_it() -> None:
    assert "not validated" in run("inspect", "replayed")
    assert "not validated" in run("attribute", "replayed", *TASK)
    shown = run("validate", "replayed", *TASK, "--run", "recorded")
    assert "[bold]times + " in shown and "predicted" in shown and "real removals" in " ".join(shown.split())
    found = json.loads(run("inspect", "replayed", "--json"))["validation"]
    assert found["question"] == "this_run" and found["removals"] == 8 and found["queries"] == 25
    assert found["outcome"] in " ".join(run("inspect", "replayed").split())
    attributed = json.loads(run("attribute", "replayed", *TASK, "--json"))["validation"]
    assert attributed["own"] and attributed["outcome"] == found["outcome"]
    assert "real removals" in " ".join(run("attribute", "replayed", *TASK).split())
    assert "all files match" in run("verify", "replayed")


def test_a_store_of_the_expectation_is_validated_by_runs_of_other_seeds() -> None:
    found = json.loads(run("validate", "path", *TASK, "--removals", "5", "--json"))
    assert (found["question"], found["runs"], found["removals"]) == ("expected", 3, 5)
    assert [len(each["sources"]) for each in found["removed"]] == [1] * 5
    assert all(each["error"] >= 0 for each in found["removed"])


def test_damaged_witnesses_are_found_by_verify(made: Path) -> None:
    run("validate", "replayed", *TASK, "--run", "recorded")
    shard = next((made / "replayed/witnesses/000/checkpoint-000").glob("imprints-*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ImprintError, match=r"witnesses/000/.* is damaged"):
        run("verify", "replayed")
    shard.write_bytes(whole)


def test_a_file_without_record_is_told_what_it_needs(made: Path) -> None:
    (made / "plain.py").write_text(MODEL.replace("def record(", "def other("))
    with pytest.raises(ImprintError, match=r"plain\.py has no function record\(seed, folder\)"):
        run("validate", "path", "--task", "plain.py:task")


def test_a_replayed_store_asks_for_its_run() -> None:
    with pytest.raises(ImprintError, match=r"give that run \(run=, --run FOLDER\)"):
        run("validate", "replayed", *TASK)
