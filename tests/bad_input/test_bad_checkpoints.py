"""Checkpoints that do not fit and folders that do not serve are refused with an error that names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from imprint import ImprintError, Plan, PlanError, StoreError, Task, TaskError
from tests.bad_input.inputs import simulated


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("2.bias"), r"lacks 2\.bias"),
        (lambda state: state.update({"3.bias": torch.zeros(1)}), r"unknown 3\.bias"),
        (lambda state: state.update({"2.bias": torch.zeros(5)}), r"'2\.bias' has shape \(5,\), the model's is \(2,\)"),
    ],
    ids=["missing", "unknown", "wrong shape"],
)
@pytest.mark.parametrize("from_file", [False, True], ids=["state dict", "file"])
def test_a_checkpoint_that_does_not_fit_names_the_tensor(
    change: Callable[[dict[str, Tensor]], object], words: str, from_file: bool, task: Task, tmp_path: Path
) -> None:
    state: Any = task.state()
    change(state)
    if from_file:
        save_file(state, tmp_path / "state.safetensors")
        state = tmp_path / "state.safetensors"
    with pytest.raises(TaskError, match=words):
        simulated(task, checkpoints=[state])


def test_a_checkpoint_file_that_does_not_exist_is_named(task: Task, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"absent\.safetensors does not exist"):
        simulated(task, checkpoints=[tmp_path / "absent.safetensors"])


def test_a_checkpoint_file_that_is_no_safetensors_is_named(task: Task, tmp_path: Path) -> None:
    (tmp_path / "state.safetensors").write_text("not tensors")
    with pytest.raises(TaskError, match=r"state\.safetensors"):
        simulated(task, checkpoints=[tmp_path / "state.safetensors"])


def test_a_checkpoint_must_hold_tensors(task: Task) -> None:
    state: dict[str, Any] = {**task.state(), "2.bias": [0.0, 0.0]}
    with pytest.raises(TaskError, match=r"2\.bias.*tensor"):
        simulated(task, checkpoints=[state])


def test_one_checkpoint_must_be_in_a_list_too(task: Task) -> None:
    with pytest.raises(ImprintError, match=r"checkpoints.*list"):
        simulated(task, checkpoints=task.state())


def test_no_checkpoints_at_all_is_refused(task: Task) -> None:
    with pytest.raises(PlanError, match="checkpoints is empty"):
        simulated(task, checkpoints=[])


def test_a_store_does_not_go_into_a_file(task: Task, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("kept")
    with pytest.raises(StoreError, match="store is a file"):
        simulated(task, out=tmp_path / "store")
    assert (tmp_path / "store").read_text() == "kept"


def test_a_store_does_not_go_into_a_folder_with_other_things(task: Task, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    with pytest.raises(StoreError, match="holds something else: give a new folder for the store"):
        simulated(task, out=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "kept"


def test_a_store_does_not_replace_a_store(task: Task, tmp_path: Path) -> None:
    simulated(task, out=tmp_path / "store")
    before = (tmp_path / "store" / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match="already holds a store, made otherwise: the plan's steps was"):
        simulated(task, plan=Plan(steps=7, lr=0.1), out=tmp_path / "store")
    assert (tmp_path / "store" / "manifest.json").read_bytes() == before
