"""Data that changes while it is read, lies about itself, or comes in forms that few think of."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.attacks.cases import QUERIES, Case, Table, columns, cross_entropy, judge, mlp, register
from tests.attacks.test_misused_losses import BATCH, CHANCE

DATA: Table = {}
attack = register(DATA)
CHANGES = CHANCE + r"|augment|read|view|order|shuffle"


@pytest.mark.long
@pytest.mark.parametrize("name", DATA)
def test_no_data_is_silently_misread(name: str) -> None:
    judge(DATA[name])


class Samples(Dataset[Any]):
    """The rows of some columns, as `change` gives them out."""

    def __init__(self, rows: tuple[Tensor, ...], change: Callable[..., Any] = lambda x, y: (x, y)) -> None:
        self.rows, self.change, self.reads = rows, change, 0

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if not 0 <= index < len(self.rows[0]):
            raise IndexError(index)
        return self.change(*(column[index] for column in self.rows))


def given(change: Callable[..., Any], **options: Any) -> Case:
    """A case whose training data is read through `change`."""
    return Case(mlp(), given=Samples(columns(), change), **options)


def asked(change: Callable[..., Any], **options: Any) -> Case:
    """A case whose queries are read through `change`."""
    return Case(mlp(), asked=Samples(columns(QUERIES, 2), change), **options)


# --- data that is another one each time


@attack("speaks", CHANGES)
def random_augmentation() -> Case:
    return given(lambda x, y: (x + 0.3 * torch.randn(3, dtype=x.dtype), y))


@attack("speaks", CHANGES)
def random_augmentation_from_numpy() -> Case:
    return given(lambda x, y: (x * np.random.uniform(0.5, 1.5), y))


@attack("speaks", CHANGES)
def random_flips() -> Case:
    return given(lambda x, y: (x.flip(0) if random.random() < 0.5 else x, y))


@attack("speaks", CHANGES)
def random_augmentation_of_few() -> Case:
    return given(lambda x, y: (x + torch.randn(3, dtype=x.dtype) * (torch.rand(()) < 0.3), y))


@attack("speaks", CHANGES)
def labels_drawn_anew() -> Case:
    return given(lambda x, y: (x, torch.randint(0, 3, ())))


@attack("speaks", CHANGES)
def random_augmentation_of_queries() -> Case:
    return asked(lambda x, y: (x + 0.3 * torch.randn(3, dtype=x.dtype), y))


@attack("works")
def augmentation_that_is_the_same_each_time() -> Case:
    x, y = columns()
    shift = torch.randn(3, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return Case(mlp(), data=(x + shift, y), given=Samples((x, y), lambda x, y: (x + shift, y)))


@attack("speaks", CHANGES)
def rows_normalised_in_place_at_each_reading() -> Case:
    return given(lambda x, y: (x.mul_(0.5), y))


@attack("speaks", CHANGES)
def a_curriculum_by_the_number_of_readings() -> Case:
    samples = Samples(columns())
    samples.change = lambda x, y: (x * min(1.0, samples.reads / 40), y)
    return Case(mlp(), given=samples)


@attack("honest", CHANGES)
def samples_that_are_views_of_one_buffer() -> Case:
    buffer = torch.zeros(3, dtype=torch.float64)
    return given(lambda x, y: (buffer.copy_(x), y))


@attack("honest", CHANGES)
def samples_that_are_views_of_one_array() -> Case:
    buffer = np.zeros(3)

    def change(x: Tensor, y: Tensor) -> Any:
        buffer[:] = x.numpy()
        return torch.from_numpy(buffer), y

    return given(change)


@attack("honest", CHANGES)
def queries_that_are_views_of_one_buffer() -> Case:
    buffer = torch.zeros(3, dtype=torch.float64)
    return asked(lambda x, y: (buffer.copy_(x), y))


def batches(change: Callable[[Tensor, Tensor], Any]) -> Iterator[Any]:
    x, y = columns(QUERIES, 2)
    for start in range(0, QUERIES, 2):
        yield change(x[start : start + 2], y[start : start + 2])


@attack("works")
def a_generator_with_one_buffer() -> Case:
    buffer = torch.zeros(2, 3, dtype=torch.float64)
    return Case(mlp(), asked=batches(lambda x, y: (buffer.copy_(x), y)))


@attack("works")
def a_generator_with_one_array() -> Case:
    buffer, labels = torch.from_numpy(np.zeros((2, 3))), torch.zeros(2, dtype=torch.int64)
    return Case(mlp(), asked=batches(lambda x, y: (buffer.copy_(x), labels.copy_(y))))


@attack("works")
def a_generator_with_one_dictionary() -> Case:
    batch: dict[str, Tensor] = {}

    def change(x: Tensor, y: Tensor) -> Any:
        batch.update(x=x, y=y)
        return batch

    return KeyedCase(mlp(), keyed, given=dict(zip("xy", columns(), strict=True)), asked=batches(change))


def keyed(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model, (batch["x"], batch["y"]) if isinstance(batch, dict) else batch)


class KeyedCase(Case):
    """A case whose batches are mappings; the reference goes on with tuples."""


@attack("works")
def a_generator_with_batches_of_different_sizes() -> Case:
    x, y = columns(QUERIES, 2)
    return Case(mlp(), asked=iter([(x[:1], y[:1]), (x[1:1], y[1:1]), (x[1:], y[1:])]))


@attack("honest", CHANGES)
def queries_from_a_loader_that_shuffles() -> Case:
    return Case(mlp(), asked=DataLoader(TensorDataset(*columns(QUERIES, 2)), batch_size=2, shuffle=True))


@attack("works")
def queries_from_a_loader() -> Case:
    return Case(mlp(), asked=DataLoader(TensorDataset(*columns(QUERIES, 2)), batch_size=3))


# --- functions that collate or lose


def collated(collate: Callable[[list[Any]], Any], **options: Any) -> Case:
    return Case(mlp(), given=Samples(columns()), simulated_as={"collate_fn": collate}, **options)


def stack(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


@attack("works")
def a_collate_function() -> Case:
    return collated(stack)


@attack("speaks", BATCH + "|order")
def a_collate_function_that_sorts() -> Case:
    return collated(lambda samples: stack(sorted(samples, key=lambda sample: float(sample[0][0]))))


@attack("speaks", CHANGES + "|order")
def a_collate_function_that_shuffles() -> Case:
    return collated(lambda samples: stack(random.sample(samples, len(samples))))


@attack("speaks", BATCH)
def a_collate_function_that_reverses() -> Case:
    return collated(lambda samples: stack(samples[::-1]))


@attack("speaks")
def a_collate_function_that_drops_samples() -> Case:
    return collated(lambda samples: stack([sample for sample in samples if float(sample[0][0]) > 0] or samples[:1]))


@attack("speaks")
def a_collate_function_that_repeats_samples() -> Case:
    return collated(lambda samples: stack(samples + samples))


@attack("speaks", CHANGES)
def a_collate_function_that_masks_at_random() -> Case:
    def collate(samples: list[Any]) -> Any:
        x, y = stack(samples)
        return x * (torch.rand(x.shape) > 0.3), y

    return collated(collate)


@attack("speaks", CHANGES)
def a_collate_function_that_changes_samples_in_place() -> Case:
    def collate(samples: list[Any]) -> Any:
        for x, _ in samples:
            x.sub_(0.3)
        return stack(samples)

    return collated(collate)


@attack("honest", BATCH)
def a_collate_function_that_normalises_the_batch() -> Case:
    def collate(samples: list[Any]) -> Any:
        x, y = stack(samples)
        return x - x.mean(0), y

    return collated(collate, truth=False)


@attack("works")
def a_collate_function_that_empties_its_list() -> Case:
    def collate(samples: list[Any]) -> Any:
        taken = []
        while samples:
            taken.append(samples.pop(0))
        return stack(taken)

    return collated(collate)


@attack("honest", CHANGES)
def a_collate_function_with_one_buffer() -> Case:
    kept: dict[int, Tensor] = {}

    def collate(samples: list[Any]) -> Any:
        x, y = stack(samples)
        buffer = kept.setdefault(len(samples), torch.zeros_like(x))
        return buffer.copy_(x), y

    return collated(collate)


# --- losses that change their batch


@attack("honest", CHANGES + "|in place")
def a_loss_that_scales_its_inputs_in_place() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch[0].mul_(0.9)
        return cross_entropy(model, batch)

    return Case(mlp(), loss, truth=False)


@attack("honest", CHANGES + "|in place")
def a_loss_that_rewrites_its_targets() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch[1][batch[1] == 2] = 0
        return cross_entropy(model, batch)

    return Case(mlp(), loss)


@attack("honest", CHANGES)
def a_loss_that_pops_its_labels() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            labels = batch.pop("y")
            return cross_entropy(model, (batch["x"], labels))
        return cross_entropy(model, batch)

    names = ("x", "y")
    asked = dict(zip(names, columns(QUERIES, 2), strict=True))
    return KeyedCase(mlp(), loss, given=dict(zip(names, columns(), strict=True)), asked=asked)


@attack("honest", CHANGES)
def a_loss_that_adds_to_its_batch() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if isinstance(batch, dict):
            batch["seen"] = batch["x"] + batch.get("seen", 0)
            return cross_entropy(model, (batch["seen"], batch["y"]))
        return cross_entropy(model, batch)

    names = ("x", "y")
    asked = dict(zip(names, columns(QUERIES, 2), strict=True))
    return KeyedCase(mlp(), loss, given=dict(zip(names, columns(), strict=True)), asked=asked)
