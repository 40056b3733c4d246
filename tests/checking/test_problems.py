"""`check` finds what stands in the way of a simulation."""

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import DataError, ImprintError, Plan, Sources, SourcesError, Store, Task, simulate
from imprint.errors import TaskError
from tests.checking.members import PLANS, checked, classifier, refused, simulated


def test_a_loss_that_is_nan_is_found_wherever_it_is() -> None:
    member = classifier(60)
    member.data[0][47] = torch.nan  # beyond the few examples on which engines are tried
    problem = refused(member)
    assert "the loss of training example 47 (source '2') is nan" in problem
    with pytest.raises(ImprintError) as failed:
        simulated(member, PLANS["tangent"])
    assert str(failed.value) == problem


def test_mirrored_trajectories_off_the_optimum_are_refused() -> None:
    plan = Plan(engine="trajectories", variant="mirrored", steps=2, lr=0.1)
    assert "mirrored trajectories are valid only at an optimum" in refused(classifier(), plan)


@pytest.mark.curvature
def test_a_step_that_runs_away_comes_with_advice() -> None:
    task = Task.regression(nn.Linear(4, 1))
    member = classifier()._replace(task=task, data=(torch.randn(12, 4), torch.randn(12)), queries=None)
    problem = refused(member, Plan(steps=4, lr=1e6))
    assert "runs away" in problem
    assert "The step is lr=1e+06" in problem and 'lr="auto" chooses one' in problem


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
@pytest.mark.curvature
def test_a_step_that_a_simulation_warns_of_is_warned_of_before(engine: str) -> None:
    member, plan = classifier(), Plan(engine=engine, steps=2, lr=10.0, batch_size=5, momentum=0.3)
    found = checked(member, plan)
    with pytest.warns(UserWarning, match=r"a step multiplies some direction by .* would be safe") as caught:
        simulated(member, plan)
    assert found.ok and found.warnings == (str(caught[0].message),)
    assert str(found).startswith(f"{found.tried}\nwarning: {caught[0].message}\n")
    for lr in (0.1, "auto"):
        calm = checked(member, replace(plan, lr=lr))
        assert calm.warnings == () and "warning" not in str(calm)


def test_a_disk_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Path] = []

    def usage(place: Path) -> SimpleNamespace:
        asked.append(place)
        return SimpleNamespace(free=100)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    problem = refused(classifier(), out=tmp_path / "not" / "yet" / "there")
    assert re.match(r"the simulation needs [\d,]+ bytes of disk, and .* has 100 free: select fewer", problem)
    assert asked == [tmp_path]  # the disk on which the folder will be


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_the_disk_must_hold_the_store_and_a_snapshot(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member = classifier(12, 9000, Sources.per_example(12))
    expected = checked(member, replace(PLANS[engine], lr=0.001)).estimate
    assert expected is not None
    path = {"tangent": 1, "trajectories": 2}[engine] * expected.rows_at_once + 1  # every row, and the base
    assert expected.disk_bytes == expected.store_bytes + path * 4 * 27_003
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=expected.store_bytes + 1))
    assert "bytes of disk" in refused(member, replace(PLANS[engine], lr=0.001))


def test_a_folder_that_cannot_be_one_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("mine")
    for out in (tmp_path / "taken", tmp_path / "taken" / "within" / "it"):
        assert refused(classifier(), out=out) == f"{tmp_path / 'taken'} is a file: give a folder for the store."
        with pytest.raises(ImprintError):
            simulated(classifier(), PLANS["tangent"], out=out)

    def denied(*arguments: object, **options: object) -> None:
        raise PermissionError("Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", denied)
    assert refused(classifier(), out=tmp_path / "store") == f"{tmp_path} cannot be written to: Permission denied"


def test_a_bad_checkpoint_is_found_before_its_turn_comes() -> None:
    member = classifier()
    good = member.task.state()
    bad = {**good, "bias": torch.full((3,), torch.nan)}
    assert "'bias' of checkpoint 1 holds NaN" in refused(member, checkpoints=[good, bad])
    skipped = Plan(steps=2, lr=0.1, weight=(1.0, 0.0))
    assert checked(member, skipped, checkpoints=[good, bad]).ok


class _Integers(torch.autograd.Function):
    """Has no derivative of any kind."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise NotImplementedError("nobody knows")


def test_a_model_that_no_engine_takes_is_told_as_such() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return _Integers.apply(model(batch[0])).sum(1)  # type: ignore[no-any-return, no-untyped-call]

    member = classifier()._replace(task=Task(nn.Linear(4, 3), loss))
    found = checked(member, PLANS["tangent"])
    assert not any(engine.works for engine in found.engines)
    remarks = {engine.name: engine.remark for engine in found.engines}
    assert all("cannot differentiate this model" in remarks[name] for name in ("tangent", "trajectories"))
    assert "needs to see the model's outputs" in remarks["spectral"]
    assert "needs a recorded run" in remarks["replay"]
    assert len(remarks) == 4
    assert found.readouts == () and found.estimate is None
    assert found.problems == (found.engines[0].remark,)


def test_a_loss_that_is_never_the_same_is_refused() -> None:
    noise = torch.Generator().manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        values: Tensor = model(batch[0])[:, 0]
        return values + torch.rand(1, generator=noise)

    member = classifier()._replace(task=Task(nn.Linear(4, 3), loss))
    with pytest.raises(TaskError, match=r"on the second.*draws random numbers"):
        checked(member, PLANS["trajectories"])


def test_queries_that_cannot_be_measured_are_found() -> None:
    member = classifier()
    problem = refused(member, queries=(torch.randn(2, 5), torch.tensor([0, 1])))
    assert problem.startswith("no readout works: the measurement failed on the first queries")
    assert checked(member, PLANS["tangent"], queries=None).ok  # by default a few training examples


def test_what_does_not_fit_together_raises_as_it_does_in_a_simulation() -> None:
    member = classifier()
    with pytest.raises(SourcesError, match="made for 12 training examples, the data has 6"):
        checked(member._replace(data=(member.data[0][:6], member.data[1][:6])))
    with pytest.raises(DataError, match="there are no queries"):
        checked(member, queries=[])


def test_a_lack_of_memory_is_a_problem_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr("imprint.checking.estimate", out_of_memory)
    problem = refused(classifier())
    assert re.fullmatch(
        r"memory runs out \(.*CUDA out of memory.*\): lower memory= or batch_size=, or select .*", problem
    )


def test_an_engine_that_runs_out_of_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate_some(*arguments: Any, **options: Any) -> Store:
        if arguments[3].engine == "trajectories":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return simulate(*arguments, **options)

    monkeypatch.setattr("imprint.checking.simulate", simulate_some)
    tangent, trajectories, *_ = checked(classifier(), PLANS["tangent"]).engines
    assert tangent.works and not trajectories.works and trajectories.remark.startswith("memory runs out")
