"""Files written here are safetensors files: the package reads them, and their checksum is known beforehand."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from imprint.store.tensorfile import save

TENSORS: dict[str, Tensor] = {
    "a": torch.randn(3, 4),
    "wide": torch.randn(5, dtype=torch.float64),
    "half/é": torch.randn(7).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "one": torch.tensor(3),
    "none": torch.zeros(0, 4),
}


def test_the_package_reads_what_was_written(tmp_path: Path) -> None:
    checksum = save(TENSORS, tmp_path / "file", {"about": json.dumps({"é": 1})})
    found = load_file(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert json.loads(file.metadata()["about"]) == {"é": 1}
    assert checksum == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


@pytest.mark.parametrize("size", [1, 2_097_151, 2_097_152, 5_000_000])
def test_pieces_end_where_tensors_do(size: int, tmp_path: Path) -> None:
    tensor = torch.arange(size, dtype=torch.float32)
    checksum = save({"x": tensor, "y": tensor.clone()}, tmp_path / "file", {})
    assert torch.equal(load_file(tmp_path / "file")["y"], tensor)
    assert checksum == hashlib.sha256((tmp_path / "file").read_bytes()).hexdigest()


def test_kinds_of_numbers_that_are_rare_are_left_to_the_package(tmp_path: Path) -> None:
    values = torch.randn(3, dtype=torch.complex64)
    assert save({"z": values}, tmp_path / "file", {}) is None
    assert torch.equal(load_file(tmp_path / "file")["z"], values)
