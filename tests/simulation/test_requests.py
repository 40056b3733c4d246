"""A store is gone on with, and read, only by what asks for the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute
from tests.simulation.killing import PLANS, STEPS, Killed, Made, N, data, dies_after, run, task

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


def changed_task() -> Task:
    model = task().model
    return Task(
        model, loss=lambda model, batch: 2 * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    )


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "plan": ({"plan": Plan(steps=STEPS + 1, lr=0.2)}, f"the plan's steps was {STEPS}, is {STEPS + 1}"),
    "loss": ({"task": changed_task()}, r"loss on probe example 0 is .*, was .*: the loss function changed"),
    "data": ({"data": (data()[0] + torch.eye(N, 4), data()[1])}, "the training data changed"),
    "length": (
        {"data": tuple(t[:23] for t in data()), "sources": Sources.groups({"a": [0]})},
        "had 24 examples, has 23",
    ),
    "sources": ({"sources": Sources.by_label([i % 5 for i in range(N)])}, "the sources changed"),
    "weights": ({"checkpoints": [task().state(), task().state()]}, "the weights of checkpoint 1 changed"),
    "checkpoints": ({"checkpoints": [task().state()]}, "there were 2 checkpoints, are 1"),
    "dtype": ({"dtype": torch.bfloat16}, "kept as float32, now as bfloat16"),
}


@pytest.mark.parametrize("state", ["finished", "unfinished"])
@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES.keys())
def test_another_request_is_refused_and_the_difference_named(
    change: dict[str, Any], difference: str, state: str, finished: Path, begun: Path, tmp_path: Path
) -> None:
    folder = finished if state == "finished" else Path(shutil.copytree(begun, tmp_path / "begun"))
    kept = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match=difference):
        run(folder, **{"plan": PLANS["tangent"], **change})
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == kept


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with part of a store."""
    folder = tmp_path_factory.mktemp("begun") / "store"
    with pytest.raises(Killed):
        run(folder, PLANS["tangent"], progress=dies_after(STEPS + 3))
    return folder


def test_an_unfinished_store_is_not_read(begun: Path) -> None:
    with pytest.raises(StoreError, match="unfinished simulation"):
        Store(begun)


def test_a_store_is_not_read_with_another_loss(made: Made) -> None:
    with pytest.raises(StoreError, match=r"loss on probe example 0 is .*, was .*the loss function changed"):
        attribute(changed_task(), Store(made(PLANS["tangent"])), data(), progress=False)


def test_the_measurement_may_change_freely(made: Made) -> None:
    margin = Task.classifier(task().model, measure="margin")
    assert attribute(margin, Store(made(PLANS["tangent"])), data(), progress=False).scores.isfinite().all()
