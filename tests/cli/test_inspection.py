"""A store can be looked at and checked from the command line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from imprint import Plan, Sources, Store, StoreError, Task, simulate
from imprint.cli.app import app
from imprint.cli.inspection import inspect_store
from imprint.tensors.vectors import row_norms


def make(out: Path, engine: str = "tangent") -> Store:
    task = Task.classifier(nn.Linear(3, 3))
    data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
    plan = Plan(engine=engine, steps=3, lr=0.1, weight=(1.0, 0.0))
    states = [{name: scale * t for name, t in task.state().items()} for scale in (1.0, 0.5)]
    sources = Sources.by_label(["few", "some", "some", "many", "many", "many"] * 2)
    return simulate(task, data, sources, plan, checkpoints=states, out=out, progress=False)


@pytest.mark.parametrize("engine", ["tangent", "trajectories", "spectral"])
def test_a_store_is_shown_with_its_plan_and_figures(engine: str, tmp_path: Path) -> None:
    make(tmp_path / "a [store]", engine)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a [store]")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("a [store]", "3 of 12 training examples", f"engine={engine}", "jvp, central", "curvature"):
        assert text in result.output


def test_counts_are_whole_numbers_and_the_curvature_is_named(tmp_path: Path) -> None:
    task = Task.classifier(nn.Linear(40, 30))
    data, each = (torch.randn(60, 40), torch.randint(0, 30, (60,))), Sources.per_example(60)
    spectral = Plan(engine="spectral", steps=12345, damping=0.1, directions=1150, curvature="gauss-newton")
    path = Plan(steps=2, lr=0.1, curvature="gauss-newton")
    for name, plan, label in (("spectral", spectral, "Gauss–Newton"), ("path", path, "Hessian")):
        simulate(task, data, each, plan, out=tmp_path / name, progress=False)
        shown = CliRunner().invoke(app, ["inspect", str(tmp_path / name)], env={"COLUMNS": "200"}).output
        assert f"curvature ({label})" in shown
        assert not re.search(r"(steps|directions) +│ [\d.]+e", shown)
    count = inspect_store(Store(tmp_path / "spectral"))["checkpoints"][0]["decided"]["directions"]
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "spectral")], env={"COLUMNS": "200"}).output
    assert count > 999
    assert re.search(rf"directions +│ {count} ", shown) and re.search(r"steps +│ 12345 ", shown)


def test_a_store_that_follows_adam_says_where_its_moments_came_from(tmp_path: Path) -> None:
    task = Task.classifier(nn.Linear(3, 3))
    data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
    recorded = {name: torch.ones_like(t) for name, t in task.state().items()}
    recorded["weight"][:, 0] = 0
    plan = Plan(steps=3, lr=0.01, preconditioner="adam")
    states: list[Any] = [(task.state(), recorded), {name: t + 1 for name, t in task.state().items()}]
    simulate(task, data, Sources.per_example(12), plan, checkpoints=states, out=tmp_path / "store", progress=False)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "store")], env={"COLUMNS": "200"}).output
    assert re.search(r"second moments +│ recorded +│ estimated", shown)
    assert re.search(r"share unmoved +│ 0.25 +│ 0 ", shown)
    make(tmp_path / "plain")
    assert "moments" not in CliRunner().invoke(app, ["inspect", str(tmp_path / "plain")]).output


def test_programs_get_the_same_as_json(tmp_path: Path) -> None:
    store = make(tmp_path / "store", "trajectories")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"])
    values = json.loads(result.output)
    assert values == json.loads(json.dumps(inspect_store(store)))
    assert values["checkpoints"][0]["measured"]["linearity"]["median"] >= 0
    assert values["checkpoints"][0]["measured"]["norms"]["least"] > 0
    assert values["checkpoints"][1]["decided"] is None  # skipped by its weight
    assert "literal" not in values["readouts"]


def test_the_largest_sources_come_first(tmp_path: Path) -> None:
    largest = inspect_store(make(tmp_path / "store"))["largest_sources"]
    assert [(source["name"], source["size"]) for source in largest] == [("many", 6), ("some", 4), ("few", 2)]
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "store")], env={"COLUMNS": "200"})
    assert "many (6), some (4), few (2)" in result.output


@pytest.mark.parametrize("engine", ["tangent", "trajectories", "spectral"])
def test_norms_are_those_of_the_imprints_and_need_no_reading_of_them(engine: str, tmp_path: Path) -> None:
    store = make(tmp_path / "store", engine)
    norms = row_norms(store.imprints(0, 0, 3, torch.device("cpu"))).tolist()
    for shard in store.path.rglob("imprints-*.safetensors"):
        shard.unlink()
    found = inspect_store(Store(store.path))["checkpoints"][0]["measured"]["norms"]
    expected = {"least": min(norms), "median": sorted(norms)[1], "largest": max(norms)}
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_sound_store_is_verified_and_a_damaged_one_named(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    assert CliRunner().invoke(app, ["verify", str(store.path)]).exit_code == 0
    shard = store.path / "checkpoint-000" / "imprints-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    result = CliRunner().invoke(app, ["verify", str(store.path)])
    assert result.exit_code != 0
    assert isinstance(result.exception, StoreError)
    assert "imprints-00000.safetensors is damaged" in str(result.exception)
