"""`suspects`: examples that look mislabelled, by self-influence and by plain loss."""

import csv
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from imprint import DataError, self_influence
from imprint.cli.app import app
from imprint.evaluation import example_losses
from imprint.evaluation.mislabels import Suspects
from tests.cli.commands import Command, loaded

MODEL = """
import torch
from torch import nn
from imprint import Plan, Sources, Task

torch.manual_seed(0)
y = torch.arange(40) % 2
x = torch.randn(40, 3) + 3 * y[:, None]
mislabelled = torch.zeros(40, dtype=torch.bool)
mislabelled[[3, 17]] = True
data = (x, torch.where(mislabelled, 1 - y, y))
sources = Sources.per_example(40)
example_texts = [f"example {i}" for i in range(40)]
plan = Plan(engine="spectral", damping=0.1)
model = nn.Linear(3, 2)
optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
for _ in range(60):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(data[0]), data[1]).backward()
    optimiser.step()
task = Task.classifier(model)
silent = Task(model, loss=task.loss, measure=lambda model, batch: model(batch[0])[:, 0])
"""
TASK = ("--task", "model.py:task")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py, and its store of single examples, runs/each."""
    place = tmp_path_factory.mktemp("suspects")
    (place / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(sys, "path", [*sys.path])
        result = CliRunner().invoke(app, ["simulate", "model.py:task", "--out", "runs/each"])
    assert result.exit_code == 0, result.output
    return place


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_suspects_are_those_of_the_library_by_both_orders(command: Command, tmp_path: Path) -> None:
    model = loaded(Path("model.py"))
    own = self_influence(model.task, "runs/each", model.data, progress=False)
    losses = example_losses(model.task, model.data)
    found = command("suspects", "runs/each", *TASK, "--top", 5, "--out", tmp_path / "all.csv", "--json").values
    assert [row["example"] for row in found["suspects"]] == own.argsort()[:5].tolist()
    assert found["by_loss"] == losses.argsort(descending=True)[:5].tolist()
    assert set(found["by_loss"][:2]) == {3, 17} == {row["example"] for row in found["suspects"][:2]}
    assert found["mean_loss"] == pytest.approx(float(losses.mean()))
    assert found["auc"]["influence"]["value"] == 1.0
    for row in csv.DictReader((tmp_path / "all.csv").open(newline="")):
        assert float(row["self_influence"]) == pytest.approx(float(own[int(row["example"])]) / 40)
        assert float(row["loss"]) == pytest.approx(float(losses[int(row["example"])]))
        assert row["text"] == f"example {row['example']}"


def test_the_table_has_ranks_by_both_and_how_far_they_agree(command: Command) -> None:
    shown = command("suspects", "runs/each", *TASK, "--top", 3)
    assert "rank by loss" in shown.out and "By plain loss: " in shown.out
    assert "neither order proves a wrong label" in shown.out and "mislabel detection AUC, plain loss" in shown.out


def test_the_plain_loss_is_that_of_the_weights_which_are_named(command: Command) -> None:
    model = loaded(Path("model.py"))
    untrained = {name: torch.zeros_like(tensor) for name, tensor in model.model.state_dict().items()}
    save_file(untrained, "zero.safetensors")
    found = command("suspects", "runs/each", *TASK, "--checkpoint", "zero.safetensors", "--json").values
    assert found["mean_loss"] == pytest.approx(0.6931, rel=1e-3)


def test_what_cannot_be_suspected_is_refused(command: Command, made: Path) -> None:
    grouped = command("suspects", made / "runs/news", "--task", f"{made}/model.py:task")
    assert "has 3 sources for 12 training examples" in grouped.err and "--sources per-example" in grouped.err
    silent = command("suspects", "runs/each", "--task", "model.py:silent")
    assert silent.code == 1 and "unknown whether high or low values" in silent.err
    assert "--out must end in .csv" in command("suspects", "runs/each", *TASK, "--out", "x.txt").err
    assert "there is no folder" in command("suspects", "runs/each", *TASK, "--out", "no/x.csv").err


def test_flags_may_be_a_function_and_wrong_texts_are_refused(command: Command) -> None:
    text = Path("model.py").read_text()
    Path("lazy.py").write_text(text + "\nflags = mislabelled\ndef mislabelled():\n    return flags\n")
    found = command("suspects", "runs/each", "--task", "lazy.py:task", "--json").values
    assert found["auc"]["influence"]["value"] == 1.0
    Path("short.py").write_text(text + '\nexample_texts = ["one"]\n')
    failed = command("suspects", "runs/each", "--task", "short.py:task")
    assert failed.code == 1 and "there are 1 texts of examples, and 40 examples" in failed.err


def test_suspicions_that_are_not_numbers_are_refused() -> None:
    values = torch.tensor([1.0, float("nan")])
    with pytest.raises(DataError, match="must be finite"):
        Suspects.rank(values, torch.ones(2), "lower", 2)
    with pytest.raises(DataError, match="expected one self-influence and one loss per example"):
        Suspects.rank(torch.ones(2), torch.ones(3), "lower", 2)
