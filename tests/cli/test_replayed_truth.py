"""Ground truth by replays from a terminal, and scores of one question against ground truth of the other."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from imprint import ImprintError
from imprint.cli.app import app
from imprint.evaluation.truth import Truth

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

import imprint

torch.manual_seed(0)
x, y = torch.randn(24, 3), torch.randint(0, 2, (24,))
data, queries = (x, y), (x[:5], y[:5])
sources = imprint.Sources.groups({"a": range(0, 9), "b": range(9, 16), "c": range(16, 24)})


def record(seed, folder):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    with imprint.RunRecorder(folder, model, optimiser, data=data, seed=seed) as run:
        for indices in run.batches(24, 8, epochs=3):
            with run.step(indices) as step:
                run.optimiser.zero_grad()
                step.backward(F.cross_entropy(model(x[indices]), y[indices]))
                optimiser.step()


def train(subset, seed):
    return nn.Linear(3, 2)


def task():
    return imprint.Task.classifier(nn.Linear(3, 2))
"""
TASK = ("--task", "model.py:task")


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a model, a recorded run of it, and ground truth of both questions."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        space: dict[str, Any] = {}
        exec(compile(MODEL, "model.py", "exec"), space)
        space["record"](7, "recorded")
        run("simulate", "model.py:task", "-p", "steps=5", "-p", "lr=0.3", "--no-check", "--out", "path")
        run("retrain", "model.py:task", "--run", "recorded", "--out", "this-run")
        run("retrain", "model.py:train", "--replay", "--runs", "2", "--out", "expected")
        yield folder


def run(*words: str) -> str:
    for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
        del sys.modules[name]
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_a_recorded_run_is_replayed_without_each_source() -> None:
    truth = Truth.load("this-run")
    assert (truth.question, truth.replayed) == ("this_run", True)
    assert sorted(truth.subsets.removed) == [(), (0,), (1,), (2,)]
    shown = run("retrain", "model.py:task", "--run", "recorded", "--out", "this-run")
    assert "this run: if this source had had weight 0" in shown and "replayed from recorded runs once each" in shown
    assert "--runs 2" not in shown
    assert "this_run: the effect on the model of this very run" in shown and "±" not in shown


def test_seeds_are_recorded_by_the_function_beside_the_one_that_trains() -> None:
    truth = Truth.load("expected")
    assert (truth.question, truth.replayed, truth.runs) == ("expected", True, 2)
    assert not torch.equal(truth.values[0], truth.values[1])
    assert "expected: mean over trainings" in run(
        "retrain", "model.py:record", "--replay", "--runs", "2", "-o", "expected"
    )


@pytest.mark.wide
def test_a_built_in_setting_is_recorded_by_itself() -> None:
    shown = run("retrain", "digits", "--replay", "--kind", "unions", "--count", "2", "--json", "--out", "digits")
    assert json.loads(shown)["question"] == "expected" and Truth.load("digits").replayed


def test_replayed_removals_are_exact_for_their_own_run() -> None:
    run("simulate", "model.py:task", "--run", "recorded", "--no-check", "--out", "replayed")
    found = json.loads(run("evaluate", "replayed", "this-run", "--json", *TASK))
    assert [metric["value"] for metric in found["metrics"]] == pytest.approx([1, 1, 1], abs=1e-3)
    with pytest.raises(ImprintError, match="the scores answer the question 'this_run'"):
        run("evaluate", "replayed", "expected", *TASK)


def test_scores_are_compared_across_questions_only_on_request() -> None:
    assert "removals: expected" in run("evaluate", "path", "expected", *TASK)
    with pytest.raises(ImprintError, match=r"the scores answer the question 'expected' .* \(--across\)"):
        run("evaluate", "path", "this-run", *TASK)
    shown = run("evaluate", "path", "this-run", "--across", *TASK)
    assert "The scores answer expected: mean over" in shown and "the ground truth this run: if this" in shown
    assert "There is no ceiling" in shown
    found = json.loads(run("evaluate", "path", "this-run", "--across", "--json", *TASK))
    assert found["question"] == "this_run"
    assert {metric["scores_question"] for metric in found["metrics"]} == {"expected"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--replay", "--run", "recorded"), "use one of them, for the question you ask"),
        (("--run", "recorded", "--runs", "2"), "--run replays one run: omit --runs"),
        (("--replay", "--kind", "halves"), "no training on halves: use --kind sources or"),
        (("--replay", "--count", "3"), "--count applies to halves and unions: --kind sources leaves"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ImprintError, match=says):
        run("retrain", "model.py:task", *words, "--out", "x")
    assert not Path("x").exists()


def test_a_file_without_a_function_that_records_is_told_what_to_write() -> None:
    Path("plain.py").write_text(MODEL.replace("def record(", "def note("))
    with pytest.raises(ImprintError, match=r"has no function record\(seed, folder\), which replays over seeds need"):
        run("retrain", "plain.py:train", "--replay", "--out", "x")
    Path("plain.py").write_text(MODEL + "\nrecord = 3\n")
    with pytest.raises(ImprintError, match=r"record must be a function record\(seed, folder\); it is a int"):
        run("retrain", "plain.py:train", "--replay", "--out", "x")
