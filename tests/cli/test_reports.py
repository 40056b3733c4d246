"""`imprint evaluate --report` writes the page of the comparison, with the queries that the task's file shows."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imprint import Attribution, ImprintError
from imprint.benchmarking.settings import load_setting
from imprint.cli.app import app
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects
from tests.evaluation.reports.pages import Page

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

import imprint

torch.manual_seed(0)
x, y = torch.randn(24, 9), torch.randint(0, 2, (24,))
data, queries = (x, y), (x[:5], y[:5])
sources = imprint.Sources.groups({"a": range(0, 9), "<b>": range(9, 16), "c": range(16, 24)})


def train(subset, seed):
    torch.manual_seed(seed)
    model = nn.Linear(9, 2)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(model(x[subset]), y[subset]).backward()
        optimiser.step()
    return model


def task():
    return imprint.Task.classifier(train(torch.arange(24), 0))
"""
SHOWN = """
query_pictures = queries[0]  # nine numbers are a square of three
query_labels = [f"class {label}" for label in queries[1].tolist()]


def query_texts():
    return ["what does query %d say?" % number for number in range(5)]


def example_texts():
    return ["query words" if number < 9 else "other words" for number in range(24)]
"""
TASK = ("--task", "model.py:task")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a store of it, its scores and a ground truth; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    (folder / "shown.py").write_text(MODEL + SHOWN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run("simulate", "model.py:task", "--out", "store", "-p", "steps=3", "-p", "lr=0.3", "--no-check")
        run("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "truth")
        run("attribute", "store", *TASK, "--out", "scores.safetensors")
    return folder


@pytest.fixture(autouse=True)
def copied(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")


def run(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160"})
    if result.exception is not None:
        raise result.exception
    return str(result.stdout)


def page(path: str = "out.html") -> Page:
    return Page(Path(path).read_text(encoding="utf-8"))


def test_the_page_is_written_beside_the_table() -> None:
    shown = run("evaluate", "store", "truth", *TASK, "--report", "out.html")
    assert "Report: out.html" in shown and "95% interval" in shown
    assert sorted(page().table("source")) == ["<b>", "a", "c"]
    assert "store store, engine tangent" in page().text
    assert "evaluate store truth --task model.py:task --report out.html" in page().text


def test_its_numbers_are_those_of_the_command() -> None:
    found = json.loads(run("evaluate", "store", "truth", *TASK, "--report", "out.html", "--json"))
    assert found["report"] == "out.html"
    rows = page().table("")
    for metric in found["metrics"]:
        low, high = metric["low"], metric["high"]
        assert rows[metric["name"]][0] == f"{metric['value']:.3f} [{low:.3f}, {high:.3f}]"


def test_without_the_option_nothing_is_written() -> None:
    before = sorted(Path().rglob("*"))
    assert "report" not in json.loads(run("evaluate", "store", "truth", *TASK, "--json"))
    assert [path for path in sorted(Path().rglob("*")) if "__pycache__" not in str(path)] == before


def test_what_the_file_says_about_its_queries_is_shown() -> None:
    run("evaluate", "store", "truth", *TASK, "--report", "plain.html")
    assert not page("plain.html").named("img") and "label 1" in page("plain.html").text  # from the queries themselves
    run("evaluate", "store", "truth", "--task", "shown.py:task", "--report", "out.html")
    assert len(page().named("img")) == 5
    for words in ("label class 1", "what does query 3 say?", "common words (TF-IDF)"):
        assert words in page().text


def test_scores_from_a_file_have_a_report_and_may_show_the_queries_of_a_task() -> None:
    run("evaluate", "scores.safetensors", "truth", "--report", "out.html")
    assert sorted(page().table("source")) == ["<b>", "a", "c"] and "Query 0" in page().text
    run("evaluate", "scores.safetensors", "truth", "--task", "shown.py:task", "--report", "out.html")
    assert len(page().named("img")) == 5


def test_a_report_of_scores_and_of_their_store_say_the_same() -> None:
    run("evaluate", "store", "truth", *TASK, "--report", "one.html")
    run("evaluate", "scores.safetensors", "truth", *TASK, "--report", "two.html")
    assert page("one.html").tables == page("two.html").tables


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere", "truth", "--report", "out.pdf"), "a report is a page of HTML, got 'out.pdf'"),
        (("store", "truth", *TASK, "--report", "folder.html"), "is a folder: give the name of a file for the report"),
        (("scores.safetensors", "truth", *TASK), "holds finished scores, which need no --task"),
        (
            ("scores.safetensors", "truth", *TASK, "--readout", "jvp", "--report", "out.html"),
            "holds finished scores, which need no --readout",
        ),
        (
            ("scores.safetensors", "truth", "--queries", "queries", "--report", "out.html"),
            "--queries shows the queries of a task: name it with --task",
        ),
    ],
)
def test_what_cannot_be_done_is_told(words: tuple[str, ...], says: str) -> None:
    Path("folder.html").mkdir()
    with pytest.raises(ImprintError, match=says):
        run("evaluate", *words)
    assert not Path("out.html").exists()


def test_other_queries_are_not_shown_as_if_they_were_those_of_the_scores() -> None:
    Path("other.py").write_text(MODEL.replace("(x[:5], y[:5])", "(x[5:10], y[5:10])") + SHOWN)
    with pytest.raises(ImprintError, match="the queries to show are not those of the scores"):
        run("evaluate", "scores.safetensors", "truth", "--task", "other.py:task", "--report", "out.html")


def test_the_digits_show_their_pictures() -> None:
    digits = Objects(Experiment(task="digits"))
    assert tuple(digits.illustrations.pictures.shape) == (837, 8, 8)
    assert digits.illustrations.texts is None
    assert load_setting("digits").query_pictures is not None


def test_scores_say_in_their_report_that_they_were_saved() -> None:
    result = Attribution.load("scores.safetensors")
    run("evaluate", "scores.safetensors", "truth", "--report", "out.html")
    assert result.labels.fingerprints["store"][:16] in page().text
