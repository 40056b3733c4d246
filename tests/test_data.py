"""Data in all its forms gives the same batches."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from imprint import DataError
from imprint.batches import is_columnar, leaves, length, map_tensors
from imprint.data import Data, query_batches
from tests.samples import CPU, Pair, Squares, X, Y

PAIRS = [(X[i], i) for i in range(7)]
FORMS: dict[str, Any] = {
    "TensorDataset": TensorDataset(X, Y),
    "list of tuples": PAIRS,
    "columns": (X, Y),
    "named columns": Pair(X, Y),
    "dataset": Squares(),
    "subset": Subset(TensorDataset(torch.cat([X, X]).flip(0), torch.cat([Y, Y]).flip(0)), list(range(6, -1, -1))),
    "list of named tuples": [Pair(*pair) for pair in PAIRS],
}
DICT_FORMS: dict[str, Any] = {
    "list of dicts": [{"x": x, "y": y} for x, y in PAIRS],
    "dict of columns": {"x": X, "y": Y},
}


@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("form", [*FORMS, *DICT_FORMS])
def test_every_form_gives_all_samples_in_order(form: str, batch_size: int) -> None:
    data = Data({**FORMS, **DICT_FORMS}[form], device=CPU, batch_size=batch_size)
    assert len(data) == 7
    for _ in range(2):  # the second pass comes from what was kept
        batches = list(data.batches())
        assert [len(indices) for indices, _ in batches] == [
            min(batch_size, 7 - start) for start in range(0, 7, batch_size)
        ]
        assert torch.cat([indices for indices, _ in batches]).tolist() == list(range(7))
        x, y = (torch.cat([leaves(batch)[column] for _, batch in batches]) for column in range(2))
        assert torch.equal(x, X)
        assert torch.equal(y, Y)


@pytest.mark.parametrize("form", [*FORMS, *DICT_FORMS])
def test_samples_are_gathered_by_index_in_any_order(form: str) -> None:
    data = Data({**FORMS, **DICT_FORMS}[form], device=CPU)
    x, y = leaves(data.gather(torch.tensor([5, 0, 5])))
    assert torch.equal(x, X[[5, 0, 5]])
    assert y.tolist() == [5, 0, 5]


@pytest.mark.parametrize("form", DICT_FORMS)
def test_dictionaries_stay_dictionaries(form: str) -> None:
    assert Data(DICT_FORMS[form], device=CPU).gather(torch.tensor([1])).keys() == {"x", "y"}


def test_named_tuples_stay_named_tuples() -> None:
    batch = Data(Pair(X, Y), device=CPU).gather(torch.tensor([1]))
    assert isinstance(batch, Pair)
    assert batch.y.tolist() == [1]


def _doubled(samples: list[Any]) -> dict[str, Any]:
    return {"twice": torch.stack([2 * x for x, _ in samples]), "titles": [f"sample {int(y)}" for _, y in samples]}


@pytest.mark.parametrize("form", FORMS)
def test_a_collate_function_makes_the_batches(form: str) -> None:
    if "columns" in form:
        pytest.skip("columns are collated already")
    data = Data(FORMS[form], device=CPU, batch_size=3, collate_fn=_doubled)
    (first, *_), batch = (list(part) for part in zip(*data.batches(), strict=True))
    assert torch.equal(torch.cat([part["twice"] for part in batch]), 2 * X)
    assert [title for part in batch for title in part["titles"]] == [f"sample {i}" for i in range(7)]
    assert data.gather(torch.tensor([6]))["titles"] == ["sample 6"]
    assert first.tolist() == [0, 1, 2]


def test_columns_are_collated_already_and_refuse_a_function_for_it() -> None:
    with pytest.raises(DataError, match="collate_fn"):
        Data((X, Y), device=CPU, collate_fn=_doubled)


@pytest.mark.parametrize("collate_fn", [None, _doubled])
def test_a_dataset_is_not_read_again_for_every_pass(collate_fn: Any) -> None:
    dataset = Squares()
    data = Data(dataset, device=CPU, batch_size=3, collate_fn=collate_fn)
    first = [indices.tolist() for indices, _ in data.batches()]
    reads = dataset.reads
    for _ in range(3):
        assert [indices.tolist() for indices, _ in data.batches()] == first
    assert dataset.reads == reads


def test_data_that_is_too_large_to_keep_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.data._KEPT_BYTES", 10)
    dataset = Squares()
    data = Data(dataset, device=CPU, batch_size=3)
    first = [batch for _, batch in data.batches()]
    reads = dataset.reads
    second = [batch for _, batch in data.batches()]
    assert dataset.reads == reads + 7
    assert all(torch.equal(one[0], two[0]) for one, two in zip(first, second, strict=True))


@given(st.integers(1, 40), st.integers(1, 50))
def test_the_batch_size_changes_no_sample(rows: int, batch_size: int) -> None:
    column = torch.arange(rows)
    data = Data((column,), device=CPU, batch_size=batch_size)
    assert torch.equal(torch.cat([batch[0] for _, batch in data.batches()]), column)
    assert all(len(indices) <= batch_size for indices, _ in data.batches())


def test_inference_tensors_become_usable() -> None:
    with torch.inference_mode():
        columns = X.clone(), Y.clone()
    assert columns[0].is_inference()
    whole = Data([columns], device=CPU, collate_fn=lambda samples: samples[0])
    (_, kept), *_ = whole.batches()
    ((_, taken),) = query_batches(iter([columns]), device=CPU, batch_size=1, collate_fn=None)
    for batch in (kept, taken):
        assert not any(tensor.is_inference() for tensor in batch)
        assert torch.equal(batch[0], X)


# --- queries


@pytest.mark.parametrize("form", FORMS)
def test_queries_come_in_every_form_of_data(form: str) -> None:
    batches = query_batches(FORMS[form], device=CPU, batch_size=3, collate_fn=None)
    assert [count for count, _ in batches] == [3, 3, 1]
    assert torch.equal(torch.cat([batch[0] for _, batch in batches]), X)


def test_a_loader_is_taken_batch_by_batch() -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    batches = query_batches(loader, device=CPU, batch_size=1, collate_fn=None)
    assert [count for count, _ in batches] == [4, 3]
    assert torch.equal(torch.cat([batch[0] for _, batch in batches]), X)


def test_a_generator_of_batches_is_taken_as_it_is() -> None:
    parts = ((X[i : i + 2], Y[i : i + 2]) for i in (0, 2, 4))
    assert [count for count, _ in query_batches(parts, device=CPU, batch_size=1, collate_fn=None)] == [2, 2, 2]


def test_one_tensor_is_a_set_of_queries() -> None:
    ((count, batch),) = query_batches(X, device=CPU, batch_size=10, collate_fn=None)
    assert count == 7
    assert torch.equal(batch, X)


# --- trees


def test_tensors_are_mapped_in_a_tree_and_other_leaves_kept() -> None:
    tree = {"a": [torch.ones(2), "text"], "b": Pair(torch.ones(1), (None, torch.zeros(3)))}
    mapped = map_tensors(lambda tensor: tensor + 1, tree)
    assert mapped["a"][0].tolist() == [2, 2]
    assert mapped["a"][1] == "text"
    assert isinstance(mapped["b"], Pair)
    assert mapped["b"].y[0] is None
    assert mapped["b"].y[1].tolist() == [1, 1, 1]
    assert tree["a"][0].tolist() == [1, 1]


def test_a_batch_is_as_long_as_its_first_tensor_with_rows() -> None:
    assert length({"flag": torch.tensor(3), "x": torch.zeros(5, 2)}) == 5
    with pytest.raises(DataError, match="at least one tensor"):
        length({"flag": torch.tensor(3), "text": "none"})


@pytest.mark.parametrize(
    ("batch", "columnar"),
    [
        ((torch.zeros(3, 2), torch.zeros(3)), True),
        ({"x": torch.zeros(3), "nested": [torch.zeros(3, 1)]}, True),
        ((torch.zeros(3), torch.zeros(4)), False),
        ((torch.zeros(3), torch.tensor(0.0)), False),
        ((torch.zeros(3), ["a", "b", "c"]), False),
    ],
)
def test_a_batch_is_columnar_if_every_leaf_has_a_row_per_sample(batch: Any, columnar: bool) -> None:
    assert is_columnar(batch, 3) == columnar


def test_a_device_can_be_named_by_a_text() -> None:
    assert Data((X, Y), device="cpu").device == CPU


def test_a_list_of_samples_that_may_be_batches_needs_a_collate_function() -> None:
    samples = [{"ids": torch.full((5,), row), "labels": torch.zeros(5)} for row in range(3)]
    with pytest.raises(DataError, match=r"Samples: give collate_fn=, such as torch\.utils\.data\.default_collate"):
        Data(samples, device=CPU)
    data = Data(samples, device=CPU, collate_fn=default_collate)
    assert len(data) == 3 and data.gather(torch.tensor([2, 0]))["ids"].tolist() == [[2] * 5, [0] * 5]


class _Broken(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 5:
            raise OSError("truncated\nfile")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named() -> None:
    with pytest.raises(DataError, match=r"^sample 5 of 7 could not be read \(OSError: truncated\): [^\n]*leave it out"):
        Data(_Broken(), device=CPU)


@pytest.mark.parametrize("length", [7.5, -1, None])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    kind = type("Odd", (Squares,), {"__len__": lambda self: length})
    with pytest.raises(DataError, match="the length of the dataset, a Odd, could not be read"):
        Data(kind(), device=CPU)


@pytest.mark.parametrize(("column", "match"), [(X.to_sparse(), "sparse tensor"), (X.to("meta"), "meta device")])
def test_columns_without_rows_in_memory_are_refused(column: Tensor, match: str) -> None:
    with pytest.raises(DataError, match=rf"{match}, float32 \(7, 3\)"):
        Data((column, Y), device=CPU)
