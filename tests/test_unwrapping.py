"""Training data may come as a DataLoader, or as a table of the package `datasets`; its order is that of the dataset."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from imprint import DataError, Plan, Sources, Task, simulate
from imprint.data import Data, length_of

X, Y = torch.arange(14.0).reshape(7, 2) / 10, torch.tensor([0, 1, 2, 0, 1, 2, 0])
SAMPLES = TensorDataset(X, Y)


class Table:
    """What is read of a `datasets.Dataset`: column names, rows and columns by name."""

    def __init__(self, columns: dict[str, list[Any]], **about: Any) -> None:
        self._columns, self.column_names = columns, list(columns)
        self.format = {"type": None, **about}

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key: int | str) -> Any:
        return self._columns[key] if isinstance(key, str) else {n: c[key] for n, c in self._columns.items()}


COLUMNS: dict[str, list[Any]] = {"x": X.tolist(), "y": Y.tolist(), "text": [*"abcdefg"]}


def reverse_pairs(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([y for _, y in samples]), torch.stack([x for x, _ in samples])


def imprints(data: Any, **options: Any) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    task = Task(model, loss)
    sources = Sources.by_label(["a", "b", "c", "a", "b", "c", "a"])
    store = simulate(task, data, sources, Plan(steps=2, lr=0.1), progress=False, **options)
    return store.imprints(0, 0, 3, torch.device("cpu"))["weight"]


def test_loaders_and_tables_give_what_their_columns_give() -> None:
    expected = imprints((X, Y))
    pairs: Any = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    loaders = [DataLoader(SAMPLES, 3), DataLoader(SAMPLES, 7, drop_last=True), DataLoader(pairs, 2)]
    for data in (*loaders, Table(COLUMNS)):
        assert torch.equal(imprints(data), expected)


def test_a_loaders_own_collate_function_is_used() -> None:
    data = Data(DataLoader(SAMPLES, batch_size=3, collate_fn=reverse_pairs), device="cpu")
    assert torch.equal(data.gather(torch.tensor([2, 0]))[0], Y[[2, 0]])
    assert length_of(DataLoader(SAMPLES, batch_size=3)) == 7


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        yield X[0]


LOADERS: dict[str, tuple[Any, str]] = {
    "shuffled": (DataLoader(SAMPLES, 3, shuffle=True), r"shuffles .* collate_fn=loader\.collate_fn"),
    "a list as its sampler": (DataLoader(SAMPLES, 3, sampler=[3, 1, 2]), "has a list of its own"),
    "batches of its own": (
        DataLoader(SAMPLES, batch_sampler=[[0, 1], [2]]),
        "has a list of its own, so which samples it draws is not known",
    ),
    "no batches": (DataLoader(SAMPLES, batch_size=None), "gives samples without batches"),
    "ready batches": (
        DataLoader(SAMPLES, batch_size=None, sampler=BatchSampler(SequentialSampler(SAMPLES), 3, False)),
        "gives samples without batches",
    ),
    "a last batch that is dropped": (DataLoader(SAMPLES, 3, drop_last=True), "drops the last 1 of 7 samples"),
    "a stream": (DataLoader(Endless(), 3), "is an IterableDataset, whose examples have no indices"),
}


@pytest.mark.parametrize(("loader", "reason"), LOADERS.values(), ids=LOADERS)
def test_loaders_whose_order_is_not_that_of_their_dataset_are_refused(loader: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Data(loader, device="cpu")


def test_a_second_collate_function_is_refused() -> None:
    with pytest.raises(DataError, match="has a collate_fn of its own: leave yours out"):
        Data(DataLoader(SAMPLES, 3), device="cpu", collate_fn=reverse_pairs)


def test_columns_of_a_table_are_its_numbers(caplog: pytest.LogCaptureFixture) -> None:
    found = Data(Table(COLUMNS), device="cpu").stacked
    assert found is not None and list(found) == ["x", "y"]
    assert found["x"].dtype == torch.float32 and torch.equal(found["x"], X)
    assert torch.equal(found["y"], Y)
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "columns of the data that are no numbers are left out: text",
    )


def test_the_first_row_alone_does_not_decide_which_columns_there_are(caplog: pytest.LogCaptureFixture) -> None:
    columns: dict[str, list[Any]] = {"y": [1, 2], "text": [None, "a"], "tags": [[], ["a"]], "nothing": [None, None]}
    found = Data(Table(columns), device="cpu").stacked
    assert found is not None and list(found) == ["y"]
    assert "are left out: text, tags, nothing" in caplog.text


def test_with_a_collate_function_the_rows_of_a_table_are_its_samples() -> None:
    rows = Data(Table(COLUMNS), device="cpu", collate_fn=lambda samples: torch.tensor([s["y"] for s in samples]))
    assert torch.equal(rows.gather(torch.tensor([5, 1])), Y[[5, 1]])
    made = Data(Table({"x": list(X)}, type="custom"), device="cpu").stacked  # samples made by the user's own function
    assert made is not None and torch.equal(made["x"], X)


TABLES: dict[str, tuple[Any, str]] = {
    "rows of different lengths": (
        Table({"input_ids": [[1, 2], [3]]}),
        "column 'input_ids' of the data cannot be made one tensor .* give a collate_fn that pads them",
    ),
    "an empty row": (Table({"x": [[], [1, 2]], "y": [0, 1]}), "column 'x' of the data cannot be made one tensor"),
    "a null": (Table({"x": [None, 3], "y": [0, 1]}), "column 'x' of the data is null in row 0: fill it in"),
    "a later null": (Table({"x": [[1.0], None], "y": [0, 1]}), "column 'x' of the data is null in row 1"),
    "a null in a row": (Table({"x": [[1, 2], [None, 2]], "y": [0, 1]}), "column 'x' of the data is null in row 1"),
    "a null in the first row": (Table({"x": [[None, 2], [1, 2]], "y": [0, 1]}), "'x' of the data is null in row 0"),
    "a null before tensors": (Table({"x": [None, X[0]], "y": [0, 1]}), "column 'x' of the data is null in row 0"),
    "texts alone": (Table({"text": ["a", "b"]}), "no column of the data holds numbers: it has text"),
    "no rows": (Table({"x": []}), "no column of the data holds numbers"),
}


@pytest.mark.parametrize(("table", "reason"), TABLES.values(), ids=TABLES)
def test_tables_that_are_no_columns_of_numbers_say_what_to_do(table: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Data(table, device="cpu")


def test_a_table_of_which_an_index_gives_a_column_is_refused() -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match=r"\[0\] of the Table is a ChunkedArray, not a row: give a mapping of arrays"):
        Data(arrow.table({"x": [1.0, 2.0], "y": [0, 1]}), device="cpu")


def test_several_splits_are_refused() -> None:
    splits = Table({"train": [1], "test": [2]})
    splits.column_names = {"train": ["x"], "test": ["x"]}  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"several splits: give one of them, such as dataset\['train'\]"):
        Data(splits, device="cpu")


@pytest.mark.parametrize("kind", [None, "torch", "numpy"])
def test_tables_of_the_real_package_are_read(kind: str | None) -> None:
    datasets: Any = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(COLUMNS).with_format(kind)
    assert torch.equal(imprints(table), imprints((X, Y)))
    assert Sources.by_label(table["text"]).ids == tuple("abcdefg")
    with pytest.raises(DataError, match="several splits"):
        Data(datasets.DatasetDict({"train": table}), device="cpu")
    with pytest.raises(DataError, match="give a collate_fn that pads"):
        Data(datasets.Dataset.from_dict({"ids": [[1, 2], [3]]}).with_format(kind), device="cpu")
