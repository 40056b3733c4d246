"""Tensors that are not what the manifest says are refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from imprint import Store, StoreError, Task, attribute
from tests.store.making import both, data, scores
from tests.store.manifests import recount

TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "a row less": (lambda t: {k: v[:1].clone() for k, v in t.items()}, r"is \(1, .* not \(2, "),
    "another shape": (lambda t: {**t, "0.bias": t["0.bias"][:, :1].clone()}, r"'0.bias' is \(2, 1\) .* not \(2, 2\)"),
    "another dtype": (lambda t: {**t, "0.bias": t["0.bias"].double()}, "'0.bias' is .*float64, not .*float32"),
    "whole numbers": (lambda t: {**t, "0.bias": t["0.bias"].long()}, "'0.bias' is .*int64, not .*float32"),
    "missing": (lambda t: {k: v for k, v in t.items() if k != "0.bias"}, "'0.bias' is missing"),
    "renamed": (lambda t: {f"x.{k}": v for k, v in t.items()}, "is missing"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.parametrize("kind", ["imprints", "midpoints"])
def test_a_shard_with_other_tensors_is_refused_by_name(
    kind: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, copied: Path
) -> None:
    name = f"checkpoint-000/{kind}-00000.safetensors"
    save_file(change(load_file(copied / name)), copied / name)
    recount(copied, name)
    expected = (
        rf"{kind}-00000\.safetensors does not fit the manifest: tensor .*{message}.*rows 0 to 1: sources 'ann' to"
    )
    store = Store(copied)
    for use in (store.verify, lambda: both(store)):
        with pytest.raises(StoreError, match=expected):
            use()


def test_a_base_without_a_tensor_of_the_model_is_refused(copied: Path) -> None:
    """The model's own would be taken in its place, and the scores would depend on what it is now."""
    name = "checkpoint-002/base.safetensors"
    tensors = load_file(copied / name)
    del tensors["1.running_mean"]
    save_file(tensors, copied / name)
    recount(copied, name)
    with pytest.raises(StoreError, match=r"at checkpoint 2 it has no such tensor for '1\.running_mean'.*shape \(2,\)"):
        scores(copied)


def test_a_model_with_another_frozen_part_is_refused(sound: Path) -> None:
    other = Task.classifier(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 5)), parameters="0.*")
    with pytest.raises(StoreError, match=r"made with another model: .* shape \(2, 2\) for '2\.weight'.*shape \(5, 2\)"):
        attribute(other, sound, data(), progress=False)


def test_a_file_of_tensors_that_is_none_is_refused(copied: Path) -> None:
    name = "checkpoint-000/imprints-00001.safetensors"
    (copied / name).write_text("not tensors")
    recount(copied, name)
    with pytest.raises(StoreError, match=r"imprints-00001\.safetensors cannot be read: .*\(row 2: source 'cid'\)"):
        Store(copied).verify()
