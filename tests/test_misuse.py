"""What users are likely to do by mistake is refused, or does what they meant."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import imprint
from imprint import DataError, Plan, Reader, ReadoutError, Sources, SourcesError, Task, TaskError, attribute, simulate
from imprint.cli import app, main
from imprint.data import Data
from imprint.evaluation.retraining import Training, train_together

SOURCES = Sources.by_label([i % 4 for i in range(16)])


def columns(n: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randint(0, 3, (n,))


def made(model: nn.Module | None = None, **options: Any) -> tuple[Task, imprint.Store]:
    task = Task.classifier(model or nn.Linear(3, 3))
    return task, simulate(task, columns(), SOURCES, Plan(steps=3, lr=0.1), progress=False, **options)


@pytest.mark.parametrize("n", [15, 17])
def test_labels_of_another_split_are_refused(n: int) -> None:
    task = Task.classifier(nn.Linear(3, 3))
    with pytest.raises(SourcesError, match=f"divide 16 examples, the training data has {n}"):
        simulate(task, columns(n), SOURCES, progress=False)


def test_masks_of_different_lengths_are_refused() -> None:
    with pytest.raises(SourcesError, match=r"equally long, got lengths \[3, 4\]"):
        Sources.groups({"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(4, dtype=torch.bool)})


def test_a_number_is_no_list_of_members() -> None:
    with pytest.raises(SourcesError, match="'a' must be a list of example indices"):
        Sources.groups({"a": 5})


def test_a_list_of_batches_is_not_taken_for_samples() -> None:
    task, store = made()
    with pytest.raises(DataError, match="a list of batches is no dataset"):
        attribute(task, store, [columns(4), columns(4)], progress=False)
    assert len(attribute(task, store, iter([columns(4), columns(4)]), progress=False)) == 8


def test_a_single_query_keeps_its_number() -> None:
    task, store = made()
    result = attribute(task, store, columns(6), progress=False)
    assert result[3].scores.shape == (1, 4)
    assert "query 3:" in repr(result[3])
    assert result[2:5].top(1)[0][0].query == 2
    assert torch.equal(result[[4, 1]].scores, result.scores[[4, 1]])
    assert result[-1].queries == (5,)


def test_a_store_can_be_given_by_its_folder(tmp_path: Path) -> None:
    task, store = made(out=tmp_path / "store")
    queries = columns(2)
    by_path = attribute(task, tmp_path / "store", queries, progress=False)
    assert torch.equal(by_path.scores, attribute(task, store, queries, progress=False).scores)


@pytest.mark.parametrize("readout", ["gradient", "literal"])
def test_a_diagonal_is_forward_only_and_exact(readout: Any) -> None:
    task = Task.classifier(nn.Linear(3, 3))
    plan = Plan(engine="trajectories", steps=3, lr=0.1, keep_pair=True)
    store = simulate(task, columns(), SOURCES, plan, progress=False)
    with pytest.raises(ReadoutError, match='read out by "jvp" or "central"'):
        Reader(task, store, readout=readout).diagonal(columns(4), 0, 4)


def test_a_layer_with_a_vector_for_a_weight_is_read_out_by_jvp() -> None:
    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    task = Task.regression(Vector())
    data = (torch.randn(16, 3), torch.randn(16))
    store = simulate(task, data, SOURCES, Plan(steps=3, lr=0.1), progress=False)
    assert attribute(task, store, (data[0][:1], data[1][:1]), progress=False).details["readout"] == "jvp"


def test_half_precision_is_warned_of() -> None:
    task = Task.classifier(nn.Linear(3, 3).bfloat16())
    with pytest.warns(UserWarning, match=r"bfloat16.*model\.float\(\)"):
        simulate(task, (columns()[0].bfloat16(), columns()[1]), SOURCES, Plan(steps=2, lr=0.1), progress=False)


def test_gradient_needs_one_backward_per_query_whatever_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task, store = made()
    differentiated: list[int] = []
    original = imprint.readout.query_gradients

    def counted(functional: Any, theta: Any, batch: Any, count: int, **options: Any) -> Any:
        differentiated.append(count)
        return original(functional, theta, batch, count, **options)

    monkeypatch.setattr(imprint.readout, "query_gradients", counted)
    attribute(task, store, columns(8), readout="gradient", batch_size=2, memory="1kB", progress=False)
    assert sum(differentiated) <= 8 + 2  # two more to see that it works


def test_a_source_that_is_slow_to_show_its_pull_is_no_runaway() -> None:
    """A confident example being unlearned: its gradient starts at nothing and becomes ordinary."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight[:] = torch.tensor([[14.0, 0.0]])
    task = Task(model, loss=lambda model, batch: F.softplus(-model(batch[0]).squeeze(-1)))
    data = (torch.tensor([[1.0, 0.0], [-1.0, 0.1], [-1.0, -0.1]], dtype=torch.float64),)
    store = simulate(task, data, Sources.per_example(3), Plan(steps=60, lr=1.0), progress=False)
    assert len(store) == 3


def test_an_automatic_step_does_not_go_uphill() -> None:
    """Saturated and wrong: there is next to no curvature at the start, and a step of 1/μ would fly away."""
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight[:] = torch.tensor([[15.0, 0.0]])
    task = Task(model, loss=lambda model, batch: F.softplus(-model(batch[0]).squeeze(-1)))
    data = (torch.tensor([[-1.0, 0.2], [-1.0, -0.1], [1.0, 0.3]], dtype=torch.float64),)
    store = simulate(task, data, Sources.per_example(3), Plan(steps=20), progress=False)
    assert store.checkpoints[0].figures["drift"] < 100


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 3)),
    ],
    ids=["batch norm", "dropout"],
)
def test_models_that_would_be_trained_otherwise_are_not_trained_together(model: nn.Module) -> None:
    inputs = Data(columns(), device=torch.device("cpu"))
    with pytest.raises(TaskError, match="cannot be trained together"):
        train_together(lambda: model, Task.classifier, inputs, [torch.arange(16)], [0], Training(epochs=1, lr=0.1))


def test_a_report_is_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert isinstance(result.exception, imprint.StoreError)


def test_errors_on_the_command_line_are_one_line_with_all_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise imprint.MissingExtra("this", "report")

    monkeypatch.setattr("imprint.cli.app", fail)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "imprint-attribution[report]" in capsys.readouterr().err.replace("\n", "")
