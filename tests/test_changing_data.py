"""Data that changes while it is read is found, or read as it was."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from imprint import DataError, Plan, Sources, Store, Task, attribute, simulate
from imprint.batches import copy_batch
from imprint.data import Data, query_batches
from imprint.errors import ReliabilityWarning
from tests.samples import CPU, Pair, Squares, X, Y


class _Augmented(Dataset[tuple[Tensor, int]]):
    """Rows with noise, which is drawn at each reading, or seeded by the index."""

    def __init__(self, fixed: bool = False) -> None:
        self.fixed = fixed
        self.generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index) if self.fixed else self.generator
        return torch.randn(3, generator=generator), index % 2


def _masked(samples: list[Any]) -> Any:
    """A collate function that masks at random, as those of masked language models do."""
    x, y = torch.utils.data.default_collate(samples)
    return x * (torch.rand(x.shape) < 0.5), y


def _simulated(data: Any, **options: Any) -> Store:
    torch.manual_seed(0)
    task, plan = Task.classifier(torch.nn.Linear(3, 2)), options.pop("plan", Plan(steps=2, lr=0.1))
    return simulate(task, data, Sources.groups({"a": [0, 1], "b": [2]}), plan, progress=False, **options)


@pytest.mark.parametrize("plan", [Plan(steps=1, lr=0.1), "auto"], ids=["plan", "auto"])
@pytest.mark.parametrize("collate_fn", [None, _masked], ids=["augmented", "masked"])
def test_training_data_that_is_drawn_at_each_reading_is_refused(collate_fn: Any, plan: Any) -> None:
    data = _Augmented(fixed=collate_fn is not None)
    with pytest.raises(DataError, match=r"example 0 changes each time it is read.*seeded by the index"):
        _simulated(data, plan=plan, collate_fn=collate_fn)


def test_an_option_takes_such_data_and_the_store_says_so(tmp_path: Path) -> None:
    with pytest.warns(ReliabilityWarning, match="not hashed"):
        store = _simulated(_Augmented(), hash_data="none", out=tmp_path / "store")
    assert any('hash_data="none"' in warning for warning in Store(store.path).warnings)
    with pytest.warns(ReliabilityWarning, match="not compared"):
        _simulated(_Augmented(), hash_data="none", out=tmp_path / "store")


def test_an_option_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match="hash_data must be one of all, sampled, none, got 'some'"):
        _simulated(_Augmented(fixed=True), hash_data="some")


def test_a_view_that_is_seeded_by_the_index_is_taken() -> None:
    assert Data(_Augmented(fixed=True), device=CPU).changing_example() is None
    assert len(_simulated(_Augmented(fixed=True))) == 2


def test_one_example_that_changes_is_found_and_not_a_number_is_the_same() -> None:
    class OneChanges(Squares):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return (torch.randn(3) if index == 5 else torch.full((3,), torch.nan)), index

    assert Data(OneChanges(), device=CPU).changing_example() == 5


def test_a_tensor_dataset_that_augments_is_read_and_not_unpacked() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            return 2 * X[index], Y[index]

    ((_, (x, _)),) = Data(Doubled(X, Y), device=CPU).batches()
    assert torch.equal(x, 2 * X)


def test_queries_that_are_drawn_at_each_reading_trigger_a_warning() -> None:
    with pytest.warns(ReliabilityWarning, match="query 0 changes each time it is read"):
        query_batches(_Augmented(), device=CPU, batch_size=8, collate_fn=None)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_generator_may_fill_one_buffer_again_and_again(kind: str) -> None:
    buffer: Any = torch.zeros(1, 3) if kind == "tensor" else np.zeros((1, 3), np.float32)
    batch = {"x": buffer, "y": torch.zeros(1)}

    def queries() -> Iterator[Any]:
        for row in X:
            buffer[:] = row[None] if kind == "tensor" else row[None].numpy()
            yield batch

    found = query_batches(queries(), device=CPU, batch_size=1, collate_fn=None)
    assert torch.equal(torch.cat([torch.as_tensor(each["x"]) for _, each in found]), X)


def test_scores_of_a_generator_that_fills_one_buffer_are_those_of_its_queries() -> None:
    task = Task.classifier(torch.nn.Linear(3, 2))
    store = simulate(task, (X, Y % 2), Sources.per_example(7), Plan(steps=2, lr=0.1), progress=False)
    buffer = (torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))

    def queries() -> Iterator[Any]:
        for x, y in zip(X, Y % 2, strict=True):
            buffer[0][:], buffer[1][:] = x, y
            yield buffer

    expected = attribute(task, store, (X, Y % 2), progress=False).scores
    torch.testing.assert_close(attribute(task, store, queries(), progress=False).scores, expected)


def test_a_dataset_or_a_collate_function_may_fill_one_buffer_again_and_again() -> None:
    class Buffered(Squares):
        buffer = torch.zeros(3)

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            self.buffer[:] = X[index]
            return self.buffer, index

    kept = torch.zeros(1, 3)

    def collate(samples: list[Any]) -> Any:
        kept[:] = samples[0][0]
        return kept, torch.tensor([samples[0][1]])

    assert torch.equal(Data(Buffered(), device=CPU).gather(torch.arange(7))[0], X)
    passes = [batch for _, batch in Data(Buffered(), device=CPU, batch_size=1, collate_fn=collate).batches()]
    assert torch.equal(torch.cat([x for x, _ in passes]), X)


def test_a_copy_keeps_the_types_of_its_containers() -> None:
    class Named(dict[str, Any]):
        """Such as the outputs of some models, whose values are attributes too."""

        def __getattr__(self, name: str) -> Any:
            return self[name]

    given = Named(x=X, pair=Pair(X, [Y, "text"]), array=np.ones(2))
    found = copy_batch(given)
    assert type(found) is Named and type(found.pair) is Pair and found.pair.y[1] == "text"
    given["x"], given["array"][:] = None, 0.0
    assert found.x is not X and torch.equal(found.x, X) and found.array.tolist() == [1.0, 1.0]


def test_a_collate_function_that_changes_the_dataset_in_place_is_found() -> None:
    def shift(samples: list[Any]) -> Any:
        return torch.stack([x.sub_(1.0) for x, _ in samples])

    class Fresh(Squares):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return X[index].clone(), index

    assert Data(Squares(), device=CPU, collate_fn=shift).changing_example() == 0
    assert Data(Fresh(), device=CPU, collate_fn=shift).changing_example() is None
    assert torch.equal(X, torch.arange(21.0).reshape(7, 3))


@pytest.mark.parametrize("shuffle", [True, False])
def test_queries_from_a_loader_that_shuffles_are_warned_of(shuffle: bool, recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(TensorDataset(X, Y), batch_size=2, shuffle=shuffle)
    query_batches(loader, device=CPU, batch_size=4, collate_fn=None)
    assert shuffle == any("shuffle=True" in str(w.message) for w in recwarn)
