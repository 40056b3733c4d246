"""The folder of a truth is never taken for that of another, and what is damaged in it is named."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from imprint import Sources, StoreError, Task
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth
from imprint.store.values import sealed
from tests.evaluation.truths import (
    EXTRA,
    HALVES,
    OTHER,
    QUERIES,
    REMOVALS,
    TRAINING,
    Counting,
    Killed,
    N,
    ask,
    build,
    contents,
    dies_after,
    points,
    task,
    together,
    train,
)


def smoothed(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=0.1)


def smaller(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data /= 2
    return model


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "queries": ({"queries": OTHER}, "the queries changed"),
    "number of queries": ({"queries": points(4, 1)}, "queries was 5, is 4"),
    "data": ({"how": together(data=points(N, 2))}, "the data changed"),
    "seed": ({"seed": 1}, "seed was 0, is 1"),
    "training": ({"how": together(training=replace(TRAINING, lr=0.1))}, "the training's lr was 0.2, is 0.1"),
    "other halves": ({"subsets": Subsets.halves(N, 5, seed=1)}, "the subsets changed"),
    "number of halves": ({"subsets": Subsets.halves(N, 6)}, "subsets was 5, is 6"),
    "sources": ({"subsets": Subsets.halves(Sources.by_label([i // 2 for i in range(N)]), 5)}, "the sources changed"),
    "kind": ({"subsets": REMOVALS}, "kind was halves, is removal"),
    "measurement": ({"task": task(measure="margin")}, "measure was loss, is margin"),
    "parameters": ({"task": task(parameters="0.*")}, "the parameters changed"),
    "loop": ({"how": train}, "training was .*, is train"),
    "dropout": (
        {"how": together(build=lambda: nn.Sequential(*build().children(), nn.Dropout(0.5)))},
        r"the model has \(3\): Dropout\(p=0.5, inplace=False\), had \)",
    ),
    "initialisation": ({"how": together(build=lambda: smaller(build()))}, "the initial model changed"),
    "loss": (
        {"how": together(task_of=lambda model: Task(model, smoothed))},
        "loss on probe example 0 is",
    ),
    "measurement of the same name": ({"task": Task(build(), smoothed)}, "F at random parameters of query 0 is"),
}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES.keys())
def test_another_request_is_refused_and_the_difference_named(
    change: dict[str, Any], difference: str, finished: bool, tmp_path: Path
) -> None:
    try:
        ask(tmp_path, progress=dies_after(10**6 if finished else 5))
    except Killed:
        assert not finished
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match=f"holds another ground truth: {difference}"):
        ask(tmp_path, **change)
    assert contents(tmp_path) == kept


def test_the_same_queries_may_come_in_other_batches(tmp_path: Path) -> None:
    first = ask(tmp_path)
    assert torch.equal(ask(tmp_path, batch_size=2).values, first.values)
    loader = DataLoader(TensorDataset(*points(QUERIES, 1)), batch_size=3)
    assert torch.equal(ask(tmp_path, queries=iter(loader)).values, first.values)
    with pytest.raises(StoreError, match="the queries changed"):
        ask(tmp_path, queries=iter(DataLoader(TensorDataset(*OTHER), batch_size=3)))


def spoil_end(content: bytes) -> bytes:
    return content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]


@pytest.mark.parametrize("spoil", [lambda content: content[:30], spoil_end], ids=["cut off", "changed"])
def test_damaged_values_are_named_and_made_again_once_deleted(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    expected = ask(tmp_path).values
    part = tmp_path / "values-000006.safetensors"
    part.write_bytes(spoil(part.read_bytes()))
    for read in (ask, Truth.load):
        with pytest.raises(StoreError, match=r"values-000006\.safetensors is damaged.*Delete it"):
            read(tmp_path)
    part.unlink()
    assert torch.equal(ask(tmp_path).values, expected)


def test_a_list_of_subsets_is_known_to_be_damaged_wherever_it_is(tmp_path: Path) -> None:
    ask(tmp_path)
    file = tmp_path / "subsets.safetensors"
    whole = file.read_bytes()
    numbers = range(8 + int.from_bytes(whole[:8], "little"), len(whole), 8)
    assert len(numbers) > 100
    for place in numbers:
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
            Truth.load(tmp_path)
    file.write_bytes(whole[:30])
    with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
        Truth.load(tmp_path)


def without(name: str) -> Callable[[str], str]:
    return lambda text: json.dumps({key: value for key, value in json.loads(text).items() if key != name})


DAMAGES: dict[str, tuple[Callable[[str], str], str]] = {
    "cut off": (lambda text: text[: len(text) // 2], "cannot be read"),
    "no object": (lambda text: "[]", "must be an object"),
    "lacking": (without("runs"), "was changed after it was written"),
    "later": (lambda text: text.replace('"schema": 4', '"schema": 5'), "has schema 5, this version reads up to 4"),
}


@pytest.mark.parametrize(("spoil", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_description_is_refused(spoil: Callable[[str], str], message: str, tmp_path: Path) -> None:
    ask(tmp_path)
    file = tmp_path / "truth.json"
    file.write_text(spoil(file.read_text()))
    kept = contents(tmp_path)
    for read in (ask, Truth.load):
        with pytest.raises(StoreError, match=rf"truth\.json.*{message}"):
            read(tmp_path)
    assert contents(tmp_path) == kept


def test_runs_that_are_not_complete_are_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = ask(tmp_path / "truth", how=train)
    (tmp_path / "truth" / "values-000004.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        part = Truth.load(tmp_path / "truth")
    assert "1 of 2 runs are complete" in caplog.text
    assert torch.equal(part.values, whole.values[1:])


def test_a_truth_without_a_complete_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path, Counting(EXTRA + 4))
    with pytest.raises(StoreError, match=r"is unfinished: 4 of 10 models .* Make the same call again"):
        Truth.load(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json", "subsets.safetensors"])
def test_a_folder_with_something_else_is_refused_untouched(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="holds something else"):
        ask(tmp_path)
    with pytest.raises(StoreError, match=r"no truth\.json"):
        Truth.load(tmp_path)
    assert contents(tmp_path) == {tmp_path / name: b"mine"}
    with pytest.raises(StoreError, match="is a file: give a folder for the ground truth"):
        ask(tmp_path / name)


def test_data_that_one_call_names_and_the_other_does_not_is_no_change(tmp_path: Path) -> None:
    first = ask(tmp_path, train, data=points(N, 0))
    assert torch.equal(ask(tmp_path, train).values, first.values)
    with pytest.raises(StoreError, match="the data changed"):
        ask(tmp_path, train, data=points(N, 2))


def test_values_of_another_truth_or_of_other_models_are_refused(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    expected = ask(mine).values
    ask(other, seed=1, subsets=HALVES)
    place = mine / "values-000002.safetensors"
    own = place.read_bytes()
    for wrong in (other / "values-000002.safetensors", mine / "values-000004.safetensors"):
        place.write_bytes(wrong.read_bytes())
        for read in (ask, Truth.load):
            with pytest.raises(
                StoreError, match=r"values-000002\.safetensors does not hold the models that this ground truth has"
            ):
                read(mine)
    place.write_bytes(own)
    (mine / "values-000010.safetensors").write_bytes((mine / "values-000008.safetensors").read_bytes())
    with pytest.raises(StoreError, match=r"values-000010\.safetensors does not hold the models"):
        Truth.load(mine)
    (mine / "values-000010.safetensors").unlink()
    assert torch.equal(Truth.load(mine).values, expected)


def as_schema_2(folder: Path) -> None:
    """A folder as the version before wrote it: files of values that say no more than their checksum."""
    file = folder / "truth.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    file.write_text(json.dumps(sealed({**about, "schema": 2}), indent=1))
    for part in folder.glob("values-*.safetensors"):
        with safe_open(part, framework="pt") as opened:
            values, told = opened.get_tensor("values"), opened.metadata()
        save_file({"values": values}, part, {"sha256": told["sha256"]})


def test_a_truth_of_the_version_before_is_read_and_continued(tmp_path: Path) -> None:
    first = ask(tmp_path)
    as_schema_2(tmp_path)
    assert torch.equal(Truth.load(tmp_path).values, first.values)
    assert torch.equal(ask(tmp_path).values, first.values)
    (tmp_path / "values-000004.safetensors").unlink()
    assert torch.equal(ask(tmp_path).values, first.values)
    more = ask(tmp_path, runs=3)
    torch.testing.assert_close(more.values, ask(runs=3).values, rtol=1e-10, atol=1e-13)
    assert torch.equal(Truth.load(tmp_path).values, more.values)


def test_a_truth_of_an_earlier_version_is_read_but_not_continued(tmp_path: Path) -> None:
    values = ask(tmp_path).values
    file = tmp_path / "truth.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"}
    file.write_text(json.dumps(sealed({**about, "schema": 1})))
    assert torch.equal(Truth.load(tmp_path).values, values)
    with pytest.raises(StoreError, match=r"made by an earlier version.*read but not continued"):
        ask(tmp_path)
