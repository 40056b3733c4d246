"""Checkpoints are read from the files people have, and nothing that could execute code is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from imprint import Task, TaskError
from imprint.simulation.states import States


def model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def read(place: Path) -> dict[str, torch.Tensor]:
    return States(Task.classifier(model(1)), [place])[0]


def assert_read(place: Path) -> None:
    found = read(place)
    assert found.keys() == model().state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model().state_dict().items())


class Executes:
    """Creates a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("ending", [".pt", ".pth", ".bin", ".ckpt"])
def test_state_dicts_of_torch_save_are_read(ending: str, tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / f"model{ending}")
    assert_read(tmp_path / f"model{ending}")


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model"])
def test_a_state_dict_is_found_in_what_a_script_saves_around_it(name: str, tmp_path: Path) -> None:
    torch.save({name: model().state_dict(), "epoch": 3, "optimizer": {"state": {}}}, tmp_path / "model.pt")
    assert_read(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["state_dict", "model_state_dict", "model"])
def test_a_tensor_beside_a_state_dict_does_not_hide_it(name: str, tmp_path: Path) -> None:
    torch.save({name: model().state_dict(), "loss": torch.tensor(0.5)}, tmp_path / "model.pt")
    assert_read(tmp_path / "model.pt")


def test_files_of_the_old_format_are_read(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "model.pt", _use_new_zipfile_serialization=False)
    assert_read(tmp_path / "model.pt")


def test_a_file_that_would_execute_code_is_refused_and_does_not(tmp_path: Path) -> None:
    torch.save({**model().state_dict(), "more": Executes(tmp_path / "executed")}, tmp_path / "model.pt")
    with pytest.raises(TaskError, match=r"reading it could execute code. Save model\.state_dict\(\) alone"):
        read(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()


def test_a_whole_pickled_model_is_refused(tmp_path: Path) -> None:
    torch.save(model(), tmp_path / "model.pt")
    with pytest.raises(TaskError, match="could execute code"):
        read(tmp_path / "model.pt")


@pytest.mark.parametrize("content", [b"", b"not a file of torch", b"PK\x03\x04 damaged"])
def test_a_damaged_file_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(TaskError, match=r"checkpoint file .*model\.pt"):
        read(tmp_path / "model.pt")


HOLDS_NONE = [
    [1, 2],
    {"epoch": 3},
    {"model": {}, "ema": {}},
    {"ema": model().state_dict(), "loss": torch.tensor(0.5)},  # a name that is not known
    {"model": model().state_dict(), "state_dict": model().state_dict(), "loss": torch.tensor(0.5)},
]


@pytest.mark.parametrize("held", HOLDS_NONE)
def test_a_file_without_a_state_dict_is_refused(held: Any, tmp_path: Path) -> None:
    torch.save(held, tmp_path / "model.pt")
    with pytest.raises(TaskError, match="no state dict: load it, and give the state dict in it"):
        read(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_the_model_in_a_folder_is_read(name: str, tmp_path: Path) -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save(model().state_dict(), tmp_path / name)
    assert_read(tmp_path)


def write_shards(folder: Path) -> dict[str, str]:
    """The model in two files; returns which file has which tensor."""
    state = model().state_dict()
    first = dict(list(state.items())[:2])
    save_file(first, folder / "model-00001-of-00002.safetensors")
    save_file({k: v for k, v in state.items() if k not in first}, folder / "model-00002-of-00002.safetensors")
    return {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in state}


def test_a_model_in_several_files_is_put_together(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": write_shards(tmp_path)}))
    assert_read(tmp_path)


INDICES: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "is no index of files"),
    "no map": ({"metadata": {}}, "is no index of files"),
    "a list": ({"weight_map": ["a.safetensors"]}, "is no index of files"),
    "another folder": ({"weight_map": {"0.weight": "../other.safetensors"}}, "no file of weights beside it"),
    "a file that is gone": ({"weight_map": {"0.weight": "gone.safetensors"}}, "does not exist"),
    "a tensor that is gone": ({"weight_map": {"more": "model-00001-of-00002.safetensors"}}, "lack more"),
}


@pytest.mark.parametrize(("index", "reason"), INDICES.values(), ids=INDICES)
def test_an_index_that_does_not_fit_its_files_is_refused(index: Any, reason: str, tmp_path: Path) -> None:
    write_shards(tmp_path)
    text = index if isinstance(index, str) else json.dumps(index)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(TaskError, match=reason):
        read(tmp_path)


def test_a_folder_of_a_distributed_training_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "global_step500").mkdir()
    with pytest.raises(TaskError, match="gather them into a model, and save that"):
        read(tmp_path)
