"""What users are likely to do by mistake is refused, or does what they meant."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import imprint
from imprint import (
    Attribution,
    DataError,
    Plan,
    PlanError,
    Reader,
    ReadoutError,
    SimulationError,
    Sources,
    SourcesError,
    Store,
    StoreError,
    Task,
    TaskError,
    attribute,
    self_influence,
    simulate,
)
from imprint.attribution.labels import Labels
from imprint.cli.app import app, main
from imprint.readout import base, kernels
from imprint.store.probing import REGULARISERS
from tests.mistakes import SOURCES, classifier, columns, store_of
from tests.problems import known


def made(model: nn.Module | None = None, **options: Any) -> tuple[Task, imprint.Store]:
    task = Task.classifier(model or nn.Linear(3, 3))
    return task, simulate(task, columns(), SOURCES, Plan(steps=3, lr=0.1), progress=False, **options)


@pytest.mark.parametrize("n", [15, 17])
def test_labels_of_another_split_are_refused(n: int) -> None:
    task = Task.classifier(nn.Linear(3, 3))
    with pytest.raises(SourcesError, match=f"16 training examples, the data has {n}"):
        simulate(task, columns(n), SOURCES, progress=False)


def test_masks_of_different_lengths_are_refused() -> None:
    with pytest.raises(SourcesError, match=r"the same length, got \[3, 4\]"):
        Sources.groups({"a": torch.ones(3, dtype=torch.bool), "b": torch.ones(4, dtype=torch.bool)})


def test_a_number_is_no_list_of_members() -> None:
    with pytest.raises(SourcesError, match="'a' must be a list of example indices"):
        Sources.groups({"a": 5})


def test_a_list_of_batches_is_not_taken_for_samples() -> None:
    task, store = made()
    with pytest.raises(DataError, match="may hold samples or batches"):
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
    original = kernels.query_gradients

    def counted(functional: Any, theta: Any, batch: Any, count: int, **options: Any) -> Any:
        differentiated.append(count)
        return original(functional, theta, batch, count, **options)

    monkeypatch.setattr(base, "query_gradients", counted)
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
    assert known(store.checkpoints[0].measured.drift) < 100


def test_a_report_is_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "taken")])
    assert isinstance(result.exception, imprint.StoreError)


def test_errors_on_the_command_line_are_one_line_with_all_their_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise imprint.MissingExtra("this", "report")

    monkeypatch.setattr("imprint.cli.app.app", fail)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "imprint-attribution[report]" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize(
    ("error", "options", "says"),
    [
        (PlanError, {"plan": 100}, "plan must be an imprint.Plan, got 100"),
        (PlanError, {"plan": Plan(batch_size=99, source_sample=2)}, "batch_size=99 is all of the 16"),
        (StoreError, {"note": {"when": object()}}, "note must be made of JSON values: TypeError: Object"),
        (StoreError, {"note": float("nan")}, "note must be made of JSON values: ValueError: Out of range"),
        (SourcesError, {"sources": ["a"] * 16}, "sources must be an imprint.Sources, got a list: Sources.by_label"),
        (TaskError, {"task": nn.Linear(3, 3)}, "task must be an imprint.Task, got a Linear"),
        (TaskError, {"checkpoints": [nn.Linear(3, 3)]}, r"checkpoint 0 has type Linear, .* give its state_dict\(\)"),
    ],
)
def test_what_is_not_what_it_should_be_is_named(error: type[Exception], options: dict[str, Any], says: str) -> None:
    with pytest.raises(error, match=says):
        store_of(**options)


def test_no_parameters_and_labels_in_two_dimensions_are_refused() -> None:
    with pytest.raises(TaskError, match="parameters is empty"):
        classifier(parameters=[])
    with pytest.raises(SourcesError, match=r"one label per training example, got labels of shape \(4, 2\)"):
        Sources.by_label(torch.zeros(4, 2))
    with pytest.raises(SourcesError, match="valid Unicode strings"):
        Sources.groups({"a": [0]}, names={"a": "\ud800"})


def test_columns_of_numpy_arrays_are_columns_of_tensors() -> None:
    x, y = columns()
    expected = attribute(classifier(), store_of(), (x, y), progress=False).scores
    store = store_of(data=(x.numpy(), y.numpy()))
    assert torch.equal(attribute(classifier(), store, (x.numpy(), y.numpy()), progress=False).scores, expected)


def test_a_plan_takes_lists_and_the_numbers_of_numpy() -> None:
    plan = Plan(steps=[np.int64(3), 4], lr=np.float64(0.5))  # type: ignore[arg-type]
    assert plan == Plan(steps=(3, 4), lr=0.5)
    json.dumps(plan.to_json())


def test_a_generator_of_checkpoints_will_do() -> None:
    states = ({name: scale * t for name, t in classifier().state().items()} for scale in (1.0, 0.5))
    assert len(store_of(checkpoints=states).checkpoints) == 2


def test_a_checkpoint_that_is_not_finite_is_found_before_the_first_is_simulated() -> None:
    bad = {name: tensor * float("nan") for name, tensor in classifier().state().items()}
    told: list[int] = []
    with pytest.raises(SimulationError, match="of checkpoint 1 holds NaN"):
        store_of(checkpoints=[classifier().state(), bad], progress=lambda done, total: told.append(done))
    assert not told


def test_another_regulariser_is_another_simulation(tmp_path: Path) -> None:
    store_of(tmp_path / "store", classifier(regulariser=lambda model: model.weight.square().sum()))
    with pytest.raises(StoreError, match=r"the regulariser changed: its value was .* where it is 0"):
        store_of(tmp_path / "store", classifier())


def pull(scale: float) -> Any:
    """Towards the weights the model has: nothing at the checkpoint itself."""
    there = classifier().model.get_parameter("weight").detach().clone()
    return lambda model: scale * (model.weight - there).square().sum()


def decay(scale: float) -> Any:
    return lambda model: scale / 2 * model.weight.square().sum()


@pytest.mark.parametrize(("before", "now"), [(None, pull(1.0)), (pull(1.0), pull(2.0)), (decay(1e-6), decay(1.1e-6))])
def test_a_regulariser_is_known_by_more_than_its_value_at_the_checkpoint(before: Any, now: Any, tmp_path: Path) -> None:
    store_of(tmp_path / "store", classifier(regulariser=before))
    with pytest.raises(StoreError, match="the regulariser changed"):
        store_of(tmp_path / "store", classifier(regulariser=now))
    again = store_of(tmp_path / "store", classifier(regulariser=before))
    assert len(again.manifest.request.regulariser) == REGULARISERS


def test_a_relative_path_holds_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store_of(Path("store"))
    store = Store("store")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert attribute(classifier(), store, columns(), progress=False).scores.isfinite().all()


def test_queries_keep_their_numbers_in_files_and_plots(tmp_path: Path) -> None:
    part = attribute(classifier(), store_of(), columns(), progress=False)[5:8]
    part.save(tmp_path / "part.safetensors")
    assert Attribution.load(tmp_path / "part.safetensors").queries == (5, 6, 7)
    assert part.plot(query=6).get_title() == "query 6"
    with pytest.raises(ReadoutError, match="there is no query 0: the attribution has 5, 6, 7"):
        part.plot(query=0)


def test_self_influence_takes_the_folder_of_a_store_and_memory_any_number(tmp_path: Path) -> None:
    store_of(tmp_path / "store", sources=Sources.per_example(16))
    values = self_influence(classifier(), tmp_path / "store", columns(), memory=2e9, progress=False)  # type: ignore[arg-type]
    assert values.shape == (16,)


def test_self_influence_takes_the_training_data_in_its_order() -> None:
    task, (x, y), plan = classifier(), columns(), Plan(steps=2, lr=0.1)
    each = simulate(task, (x, y), Sources.per_example(16), plan, progress=False)
    own = self_influence(task, each, (x, y), progress=False)
    for other in ((x.flip(0), y.flip(0)), (x + 1, y)):
        with pytest.raises(ReadoutError, match="not the training examples in the order"):
            self_influence(task, each, other, progress=False)

    backwards = Sources.groups({str(i): [i] for i in reversed(range(16))})
    turned = simulate(task, (x, y), backwards, plan, progress=False)  # row i belongs to source i, whatever its example
    torch.testing.assert_close(self_influence(task, turned, (x.flip(0), y.flip(0)), progress=False), own.flip(0))
    named = simulate(task, (x, y), Sources.by_label([f"example {i:02}" for i in range(16)]), plan, progress=False)
    for store, other in ((turned, (x, y)), (named, (x.flip(0), y.flip(0)))):
        with pytest.raises(ReadoutError, match="not the training examples in the order"):
            self_influence(task, store, other, progress=False)
    few = simulate(task, (x, y), Sources.groups({"a": [3], "b": [5]}), plan, progress=False)
    torch.testing.assert_close(self_influence(task, few, (x[[3, 5]], y[[3, 5]]), progress=False), own[[3, 5]])


def test_all_sources_that_were_asked_for_are_printed_as_far_as_they_fit() -> None:
    def printed(names: list[str]) -> str:
        labels = Labels(10, tuple(names), tuple(names), (1,) * len(names), "loss", "lower")
        return repr(Attribution(labels, torch.arange(1.0, len(names) + 1)[None]).top(len(names)))

    six = [f"source {i}" for i in range(6)]
    assert all(name in printed(six) for name in six) and "…" not in printed(six)
    many = printed([f"https://example.org/{i}" for i in range(40)])
    assert max(map(len, many.splitlines())) <= 122 and many.endswith(", …") and "org/39" in many
    assert "y" * 200 in printed(["x" * 200, "y" * 200])


def test_a_printed_check_has_sizes_for_a_person() -> None:
    found = imprint.check(classifier(), columns(), SOURCES, Plan(steps=2, lr=0.1))
    assert re.search(r"at most ([\d.]+ (bytes|[kMG]B)|unknown) of memory, a store of [\d.]+ (bytes|kB)\n", str(found))
