"""A store can be looked at and checked from the command line."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from imprint import Plan, Sources, Store, StoreError, Task, simulate
from imprint.cli import app
from imprint.inspection import inspected
from imprint.simulation.plan import Engine


def make(out: Path, engine: Engine = "tangent") -> Store:
    task = Task.classifier(nn.Linear(3, 3))
    data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
    plan = Plan(engine=engine, steps=3, lr=0.1, weight=(1.0, 0.0))
    states = [task.state(), task.state()]
    sources = Sources.by_label([i % 3 for i in range(12)])
    return simulate(task, data, sources, plan, checkpoints=states, out=out, progress=False)


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_a_store_is_shown_with_its_plan_and_figures(engine: Engine, tmp_path: Path) -> None:
    make(tmp_path / "a [store]", engine)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "a [store]")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in ("a [store]", "3 of 12 training examples", f"engine={engine}", "jvp, central", "curvature"):
        assert text in result.output


def test_programs_get_the_same_as_json(tmp_path: Path) -> None:
    store = make(tmp_path / "store", "trajectories")
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "store"), "--json"])
    values = json.loads(result.output)
    assert values == inspected(store)
    assert values["checkpoints"][0]["figures"]["linearity"]["median"] >= 0
    assert values["checkpoints"][0]["imprint_norms"]["least"] > 0
    assert "imprint_norms" not in values["checkpoints"][1]  # skipped by its weight
    assert "literal" not in values["readouts"]


def test_a_sound_store_is_verified_and_a_damaged_one_named(tmp_path: Path) -> None:
    store = make(tmp_path / "store")
    assert CliRunner().invoke(app, ["verify", str(store.path)]).exit_code == 0
    shard = store.path / "checkpoint-000" / "imprints-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    result = CliRunner().invoke(app, ["verify", str(store.path)])
    assert result.exit_code != 0
    assert isinstance(result.exception, StoreError)
    assert "imprints-00000.safetensors is damaged" in str(result.exception)
