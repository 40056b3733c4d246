"""The truth, and how close scores come to it, from a terminal."""

import json
import shutil
import sys
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from imprint import Attribution, ImprintError, Store, attribute
from imprint.cli.app import app
from imprint.cli.experiment import Experiment
from imprint.cli.ground_truth import render_metrics
from imprint.cli.loading import Objects
from imprint.evaluation.metrics import evaluate
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


def train(subset, seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(5):
        for batch in subset[torch.randperm(len(subset))].split(8):
            optimiser.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


def task():
    return imprint.Task.classifier(train(torch.arange(24), 0))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a store of it and two truths; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("simulate", "model.py:task", "--out", "store", "-p", "steps=5", "-p", "lr=0.3", "--no-check")
        run("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "removal")
        run("retrain", "model.py:train", "--kind", "halves", "--count", "6", "--runs", "2", "--out", "halves")
    return folder


@pytest.fixture(autouse=True)
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


TASK = ("--task", "model.py:task")


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return str(result.stdout)


def told(*words: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(run(*words, "--json"))
    return values


def attributed() -> Attribution:
    objects = Objects(Experiment(task="model.py:task"))
    return attribute(objects.task, Store("store"), objects.queries, progress=False)


@pytest.mark.parametrize("truth", ["removal", "halves"])
def test_metrics_are_those_of_the_library(truth: str) -> None:
    result = attributed()
    expected = [metric.to_json() for metric in evaluate(result, Truth.load(truth))]
    assert told("evaluate", "store", truth, *TASK)["metrics"] == expected
    result.save("scores.safetensors")
    assert Attribution.load("scores.safetensors").labels.n == 24
    assert told("evaluate", "scores.safetensors", truth)["metrics"] == expected


def test_a_person_sees_value_interval_and_ceiling() -> None:
    shown = run("evaluate", "store", "removal", *TASK)
    for words in ("ground truth from removals", "95% interval", "Ceiling: about what", "slope of actual on predicted"):
        assert words in shown
    assert "LDS" in run("evaluate", "store", "halves", *TASK)


def test_metrics_fit_into_80_columns_whatever_their_signs() -> None:
    def backwards(low: float, high: float) -> Any:
        return SimpleNamespace(value=-0.5, low=low, high=high)

    names = [metric.name for metric in evaluate(attributed(), Truth.load("removal"))]
    limits = {
        "undefined": 0,
        "ceiling": 0.5,
        "single_run": -0.5,
        "scores_question": "this_run",
        "over": "runs and queries",
    }
    metrics: Any = [SimpleNamespace(name=name, estimate=backwards(-0.75, -0.25), **limits) for name in names]
    shown = StringIO()
    Console(file=shown, width=80).print(render_metrics(metrics, Truth.load("removal")))
    for label in ("correlation, mean over queries", "rank correlation, per query", "slope of actual on predicted"):
        row = next(line for line in shown.getvalue().splitlines() if line.startswith(f" {label} "))
        assert "-0.500" in row and "[-0.750, -0.250]" in row and "0.500" in row


def test_a_person_sees_what_was_trained() -> None:
    shown = run("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "removal")
    assert (
        "4 subsets (all data, and removals from it), trained 2 times each" in shown and "With a single run" not in shown
    )
    shown = run("retrain", "model.py:train", "--count", "2", "--out", "two")
    assert "2 subsets (random halves), trained once each" in shown
    assert "there is no ceiling. The same command with --runs 2 adds a second run to this folder" in shown


def test_retraining_ends_with_what_each_source_does() -> None:
    given = ("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "removal")
    shown = run(*given)
    assert "Change of loss if the source is removed, mean over 5 queries: + means the source helps" in shown
    assert shown.count(" ± ") == 4 and "expected: mean over 2 runs ± its standard error." in shown
    values, truth = told(*given), Truth.load("removal")
    assert values["question"] == "expected"
    effects = {each["source"]: (each["effect"], each["error"]) for each in values["effects"]}
    means = truth.effects.mean(1)
    assert effects == {
        name: (pytest.approx(float(means[:, i].mean())), pytest.approx(float(means[:, i].std()) / 2**0.5))
        for i, name in enumerate("abc")
    }
    assert told("retrain", "model.py:train", "--count", "2", "--out", "two")["effects"] == []


def test_retraining_says_what_is_there_and_more_runs_add_to_it() -> None:
    def said(*words: str) -> str:
        given = ["retrain", "model.py:train", "--kind", "sources", *words, "--out", "removal"]
        return str(CliRunner().invoke(app, given, env={"COLUMNS": "160"}).stderr)

    before = Truth.load("removal").values
    assert said("--runs", "2").startswith("all 8 models are finished; ")
    assert "resuming: 8 of 12 models are finished\n" in said("--runs", "3")
    assert Truth.load("removal").runs == 3 and torch.equal(Truth.load("removal").values[:2], before)
    assert "models are finished" not in said("--seed", "1", "--runs", "2")  # this is refused


def test_nobody_is_told_of_subsets_they_did_not_ask_for(caplog: pytest.LogCaptureFixture) -> None:
    assert told("retrain", "model.py:train", "--out", "all")["subsets"] == 3  # of three sources there are no more
    assert not caplog.records
    assert told("retrain", "model.py:train", "--count", "100", "--out", "hundred")["subsets"] == 3
    assert "100 subsets were requested" in caplog.text


def test_unions_have_the_share_that_is_asked_for() -> None:
    def made(*share: str) -> tuple[tuple[tuple[int, ...], ...], str]:
        given = ["retrain", "model.py:train", "--kind", "unions", *share, "--out", "-".join(("truth", *share))]
        stderr = CliRunner().invoke(app, given, env={"COLUMNS": "160"}).stderr
        return Truth.load(given[-1]).subsets.removed, stderr

    alone, said = made()
    assert sorted(alone) == [(), (0,), (1,), (2,)] and "each union is a single source (0.2 of 3): " in said
    pairs, said = made("--share", "0.7")
    assert sorted(pairs) == [(), (0, 1), (0, 2), (1, 2)] and "single source" not in said


def test_the_truth_of_a_function_knows_its_data_where_the_file_has_it() -> None:
    known = Truth.load("removal").about["fingerprints"]["data"]
    assert known == asdict(Store("store").manifest.request.data)
    Path("other.py").write_text(MODEL.replace("data, queries = (x, y), (", "data, queries = (x + 1, y), ("))
    with pytest.raises(ImprintError, match="data"):
        run("retrain", "other.py:train", "--kind", "sources", "--runs", "2", "--out", "removal")


def test_scores_of_a_ready_made_setting_are_evaluated_by_its_name() -> None:
    run("simulate", "digits", "-p", "steps=2", "-p", "lr=0.1", "--no-check", "--out", "digits")
    assert told("retrain", "digits", "--count", "6", "--out", "truth")["subsets"] == 6
    assert told("evaluate", "digits", "truth")["metrics"][0]["name"] == "LDS"


@pytest.mark.parametrize(("kind", "subsets"), [("examples", 25), ("unions", 4)])
def test_every_kind_of_truth_can_be_made(kind: str, subsets: int) -> None:
    count = ("--count", "3") if kind == "unions" else ()
    about = told("retrain", "model.py:train", "--kind", kind, *count, "--out", "truth")
    assert about["subsets"] == subsets
    if kind == "unions":
        assert "With a single run" in run("evaluate", "store", "truth", *TASK)


def test_the_same_command_again_trains_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in Path("removal").iterdir()}
    run("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "removal")
    assert {path: path.stat().st_mtime_ns for path in Path("removal").iterdir()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("retrain", "model.py", "--out", "x"), "neither a built-in setting .* nor an import string"),
        (("retrain", "model.py:trian", "--out", "x"), "there is no 'trian'"),
        (("retrain", "model.py:train", "--out", "removal"), "holds another ground truth: kind was removal, is halves"),
        (("retrain", "digits", "--device", "abacus", "--out", "x"), "'abacus' cannot be used here"),
        (("retrain", "model.py:train", "--device", "abacus", "--out", "x"), "the model cannot be moved to 'abacus'"),
        (
            ("retrain", "digits", "--task", "model.py:task", "--sources", "per-example", "--out", "x"),
            "the built-in setting digits needs no --task or --sources",
        ),
        (("retrain", "digits", "--collate", "model.py:train", "--out", "x"), "needs no --collate"),
        (
            ("retrain", "model.py:train", "--kind", "sources", "--count", "9", "--out", "x"),
            "--count applies to halves and unions: --kind sources leaves out each one",
        ),
        (
            ("retrain", "model.py:data", "--out", "x"),
            r"model.py:data must be a function train\(subset, seed\), .* it is a tuple",
        ),
        (
            ("retrain", "model.py:train", "--task", "model.py:train", "--out", "x"),
            "model.py:train is a function that needs subset and seed, .* give an imprint.Task",
        ),
        (("retrain", "model.py:train", "--share", "0.5", "--out", "x"), "--share applies to unions, not to halves"),
        (("retrain", "model.py:train", "--kind", "unions", "--share", "0", "--out", "x"), "share must be between"),
        (
            ("retrain", "model.py:train", "--sources", "x", "--out", "x"),
            "x is a Tensor, not an imprint.Sources",
        ),
        (("retrain", "model.py:train", "--data", "queries", "--out", "x"), "the training data has examples 0 to 4"),
        (
            ("evaluate", "scores.safetensors", "removal", "--queries", "queries", "--readout", "jvp"),
            "scores.safetensors holds finished scores, which need no --queries or --readout",
        ),
        (("evaluate", "store", "nowhere"), "holds no ground truth"),
        (("evaluate", "nowhere", "removal"), "there is no folder nowhere"),
        (
            ("evaluate", "store", "store"),
            "store is a store: the second argument must be a ground truth, from `imprint retrain`",
        ),
        (
            ("evaluate", "store", "scores.safetensors"),
            "holds scores: the second argument must be a ground truth",
        ),
        (
            ("evaluate", "removal", "store"),
            "removal is a ground truth and comes second: imprint evaluate store removal",
        ),
        (
            ("evaluate", "removal", "halves"),
            "removal is a ground truth: the first argument must be a store, or a file of scores",
        ),
        (("evaluate", "scores.csv", "removal"), "scores.csv is a table, .* --out scores.safetensors"),
    ],
)
def test_what_cannot_be_done_is_told(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ImprintError, match=says):
        run(*words)


def test_samples_are_collated_by_the_function_beside_the_task_or_by_the_one_that_is_named() -> None:
    ragged = """
queries = [{"x": x[i], "y": int(y[i]), "note": "x" * i} for i in range(5)]


def collate_fn(samples):
    return torch.stack([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


def lying(samples):
    return torch.stack([s["x"] for s in samples]), 1 - torch.tensor([s["y"] for s in samples])
"""
    Path("ragged.py").write_text(MODEL + ragged)
    given = ("retrain", "ragged.py:train", "--kind", "sources", "--runs", "2")
    run(*given, "--out", "usual")
    assert torch.equal(Truth.load("usual").values, Truth.load("removal").values)
    run(*given, "--collate", "lying", "--out", "named")
    assert not torch.equal(Truth.load("named").values, Truth.load("removal").values)


INTERRUPTED = MODEL.replace(
    "    torch.manual_seed(seed)\n",
    """    trained.append(seed)
    if len(trained) == int(pathlib.Path("patience").read_text()):
        raise KeyboardInterrupt
    torch.manual_seed(seed)
""",
).replace("import torch\n", "import pathlib\nimport torch\n\ntrained = []\n", 1)


def test_ctrl_c_tells_what_is_kept_and_the_same_command_goes_on() -> None:
    def stopped(patience: int) -> Result:
        for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
            del sys.modules[name]
        Path("patience").write_text(str(patience))
        Path("tired.py").write_text(INTERRUPTED)
        words = ["retrain", "tired.py:train", "--kind", "sources", "--runs", "2", "--out", "tired"]
        return CliRunner().invoke(app, words, env={"COLUMNS": "160"})

    early = stopped(1)
    assert early.exit_code == 130
    assert early.stderr == "stopped before the first models were finished: the same command will start over\n"
    late = stopped(8)
    assert late.exit_code == 130 and not late.stdout
    assert "stopped: finished models are in tired, the same command will resume from there\n" in late.stderr
    kept = {path: path.stat().st_mtime_ns for path in Path("tired").glob("values-*")}
    assert kept
    assert stopped(0).exit_code == 0
    assert torch.equal(Truth.load("tired").values, Truth.load("removal").values)
    assert all(path.stat().st_mtime_ns == when for path, when in kept.items())


@pytest.mark.parametrize("words", [("attribute", "store"), ("evaluate", "store", "removal")], ids=lambda w: w[0])
def test_the_task_that_a_store_names_is_shown_and_not_loaded(words: tuple[str, ...]) -> None:
    with pytest.raises(ImprintError, match=rf"run: \w+ {' '.join(words)} --task model\.py:task$"):
        run(*words)
    run(*words, *TASK)


def test_a_truth_of_other_sources_is_refused() -> None:
    Path("other.py").write_text(MODEL.replace('"c": range(16, 24)', '"d": range(16, 24)'))
    run("retrain", "other.py:train", "--kind", "sources", "--out", "other")
    with pytest.raises(ImprintError, match="other sources than the ground truth: number 2 is 'c', there 'd'"):
        run("evaluate", "store", "other", *TASK)
