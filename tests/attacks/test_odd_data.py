"""Datasets that lie about themselves, and data in forms that few think of."""

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from tests.attacks.cases import QUERIES, Case, N, Table, columns, judge, mlp, register
from tests.attacks.test_misused_data import Samples, given

ODD: Table = {}
attack = register(ODD)


@pytest.mark.long
@pytest.mark.parametrize("name", ODD)
def test_no_odd_data_is_silently_misread(name: str) -> None:
    judge(ODD[name])


# --- datasets that lie


class Longer(Samples):
    def __len__(self) -> int:
        return super().__len__() + 3


class Shrinking(Samples):
    def __getitem__(self, index: int) -> Any:
        if self.reads > N // 2:
            raise IndexError(index)
        return super().__getitem__(index)


class Failing(Samples):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("the picture is truncated")
        return super().__getitem__(index)


class Streaming(IterableDataset[Any]):
    def __init__(self, rows: tuple[Tensor, ...]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0])

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.rows, strict=True))


@attack("speaks")
def a_dataset_that_is_shorter_than_it_says() -> Case:
    return Case(mlp(), given=Longer(columns()))


@attack("speaks")
def queries_that_are_fewer_than_they_say() -> Case:
    return Case(mlp(), asked=Longer(columns(QUERIES, 2)))


@attack("speaks")
def a_dataset_that_shrinks_while_it_is_read() -> Case:
    return Case(mlp(), given=Shrinking(columns()))


@attack("speaks")
def a_dataset_with_a_broken_sample() -> Case:
    return Case(mlp(), given=Failing(columns()))


@attack("speaks")
def an_iterable_dataset_with_a_length() -> Case:
    return Case(mlp(), given=Streaming(columns()))


@attack("honest")
def queries_from_an_iterable_dataset_with_a_length() -> Case:
    return Case(mlp(), asked=Streaming(columns(QUERIES, 2)))


@attack("works")
def a_loader_for_training_data() -> Case:
    return Case(mlp(), given=DataLoader(TensorDataset(*columns()), batch_size=4))


@attack("speaks")
def a_dataset_with_a_fractional_length() -> Case:
    class Fractional(Samples):
        def __len__(self) -> int:
            return 12.0  # type: ignore[return-value]

    return Case(mlp(), given=Fractional(columns()))


@attack("speaks")
def a_dataset_with_a_negative_length() -> Case:
    class Negative(Samples):
        def __len__(self) -> int:
            return -1

    return Case(mlp(), given=Negative(columns()))


@attack("honest")
def a_dataset_with_a_table_of_its_columns() -> Case:
    samples = Samples(columns())
    samples.columns = {"x": 0, "y": 1}  # type: ignore[attr-defined]
    return Case(mlp(), given=samples)


@attack("speaks")
def columns_of_different_lengths() -> Case:
    x, y = columns()
    return Case(mlp(), given={"x": x, "y": y[:-1]})


@attack("speaks")
def a_tuple_of_different_lengths() -> Case:
    x, y = columns()
    return Case(mlp(), given=(x, y[:-1]))


@attack("speaks")
def samples_of_different_shapes() -> Case:
    return given(lambda x, y: (x[: 2 + int(y) % 2], y))


@attack("speaks")
def samples_of_different_types() -> Case:
    return given(lambda x, y: (x if int(y) else x.tolist(), y))


@attack("speaks")
def targets_out_of_range() -> Case:
    x, y = columns()
    return Case(mlp(), given=(x, y + 2))


@attack("speaks")
def targets_that_are_fractions() -> Case:
    x, y = columns()
    return Case(mlp(), given=(x, y + 0.5))


@attack("speaks")
def targets_of_queries_out_of_range() -> Case:
    x, y = columns(QUERIES, 2)
    return Case(mlp(), asked=(x, y + 2))


@attack("speaks")
def a_table_of_pandas() -> Case:
    pandas = pytest.importorskip("pandas")
    return Case(mlp(), given=pandas.DataFrame(columns()[0].numpy()))


@attack("speaks")
def a_text_for_data() -> Case:
    return Case(mlp(), given="train.csv")


@attack("speaks")
def sparse_columns() -> Case:
    x, y = columns()
    return Case(mlp(), given=(x.to_sparse(), y))


@attack("speaks")
def columns_without_values() -> Case:
    x, y = columns()
    return Case(mlp(), given=(x.to("meta"), y))


# --- forms that must simply work


def shaped(change: Callable[[Tensor], Any], change_y: Callable[[Tensor], Any] = lambda y: y) -> Case:
    x, y = columns()
    asked = columns(QUERIES, 2)
    return Case(mlp(), given=(change(x), change_y(y)), asked=(change(asked[0]), change_y(asked[1])))


@attack("works")
def arrays_of_numpy() -> Case:
    return shaped(Tensor.numpy, Tensor.numpy)


@attack("works")
def arrays_that_cannot_be_written() -> Case:
    def freeze(tensor: Tensor) -> Any:
        array = tensor.numpy().copy()
        array.flags.writeable = False
        return array

    return shaped(freeze, freeze)


@attack("works")
def arrays_that_run_backwards() -> Case:
    return shaped(lambda x: x.numpy()[::-1].copy()[::-1], lambda y: y.numpy()[::-1].copy()[::-1])


@attack("works")
def arrays_in_the_order_of_fortran() -> Case:
    return shaped(lambda x: np.asfortranarray(x.numpy()), Tensor.numpy)


@attack("works")
def columns_that_are_not_contiguous() -> Case:
    return shaped(lambda x: x.T.contiguous().T, lambda y: torch.stack([y, y], 1)[:, 0])


@attack("works")
def columns_that_require_gradients() -> Case:
    return shaped(lambda x: x.clone().requires_grad_())


@attack("works")
def columns_with_a_graph() -> Case:
    return shaped(lambda x: x.clone().requires_grad_() * 1.0)


@attack("works")
def columns_made_in_inference_mode() -> Case:
    def make(tensor: Tensor) -> Tensor:
        with torch.inference_mode():
            return tensor.clone()

    return shaped(make, make)


@attack("works")
def samples_made_in_inference_mode() -> Case:
    def change(x: Tensor, y: Tensor) -> Any:
        with torch.inference_mode():
            return x.clone(), y.clone()

    return given(change)


def three(unused: Tensor) -> Case:
    data = (*columns(), unused[:N])
    queries = (*columns(QUERIES, 2), unused[:QUERIES])
    return Case(mlp(), data=data, queries=queries)


@attack("works")
def nan_in_a_column_that_no_loss_uses() -> Case:
    return three(torch.full((N,), torch.nan))


@attack("works")
def infinities_in_a_column_that_no_loss_uses() -> Case:
    return three(torch.full((N, 2), -torch.inf))


@attack("works")
def booleans_in_a_column_that_no_loss_uses() -> Case:
    return three(torch.arange(N) % 2 == 0)


@attack("works")
def complex_numbers_in_a_column_that_no_loss_uses() -> Case:
    return three(torch.randn(N, dtype=torch.complex64))


@attack("works")
def bfloat16_in_a_column_that_no_loss_uses() -> Case:
    return three(torch.randn(N).bfloat16())


@attack("works")
def nan_in_samples_that_no_loss_uses() -> Case:
    return given(lambda x, y: (x, y, torch.tensor(torch.nan)))


@attack("works")
def names_beside_samples() -> Case:
    return given(lambda x, y: (x, y, f"example with {float(x[0]):.3f}"))


@attack("works")
def samples_of_plain_numbers() -> Case:
    return given(lambda x, y: (x, int(y)))


Sample = namedtuple("Sample", "x y")


@attack("works")
def samples_with_names() -> Case:
    return given(lambda x, y: Sample(x, y))


@attack("works")
def a_concatenation_of_datasets() -> Case:
    x, y = columns()
    parts: list[Dataset[Any]] = [TensorDataset(x[:5], y[:5]), Samples((x[5:], y[5:]))]
    return Case(mlp(), given=ConcatDataset(parts))


@attack("works")
def a_subset_in_another_order() -> Case:
    x, y = columns()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    return Case(mlp(), data=(x[order], y[order]), given=Subset(Samples((x, y)), order.tolist()))


@attack("works")
def a_subset_with_repetitions() -> Case:
    x, y = columns()
    order = torch.arange(N) // 2
    return Case(mlp(), data=(x[order], y[order]), given=Subset(TensorDataset(x, y), order.tolist()))


@attack("works")
def targets_that_are_ignored() -> Case:
    x, y = columns()
    y[::3] = -100
    return Case(mlp(), data=(x, y))


@attack("works")
def every_target_of_one_source_ignored() -> Case:
    x, y = columns()
    y[::4] = -100
    return Case(mlp(), data=(x, y))


@attack("works")
def masked_rows_with_nan() -> Case:
    """NaN is kept out by a mask before the model sees it."""
    x, y = columns()
    x = torch.where(torch.arange(3) == 2, torch.nan, x)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].nan_to_num(0.5)), batch[1], reduction="none")

    queries = columns(QUERIES, 2)
    return Case(mlp(), loss, data=(x, y), queries=queries)
