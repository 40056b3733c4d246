"""Lets training examples keep their index on the way from a Trainer's dataset to its training step.

`NumberedData` hands samples with their index to the loader, and `NumberedCollator` puts the indices of a batch into the
batch itself, so that they also arrive from the processes of a loader with workers.
"""

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from imprint.errors import DataError

_COLUMN = "imprint_indices"  # of a batch, until its training step begins


class _Numbered(NamedTuple):
    """A sample and its index; not a dict, so that a Trainer does not remove columns from it."""

    number: int
    sample: Any


class NumberedData(Dataset[Any]):
    """A dataset whose samples a DataLoader receives with their indices; anyone else reads them as they are.

    A DataLoader calls `__getitems__`; samplers, such as those that sort by length, call `__getitem__`.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __getitems__(self, indices: list[Any]) -> list[_Numbered]:
        numbers = [int(index) for index in indices]
        read = getattr(self.dataset, "__getitems__", None)
        samples = read(indices) if callable(read) else [self.dataset[index] for index in indices]
        return [_Numbered(*pair) for pair in zip(numbers, samples, strict=True)]


class NumberedCollator:
    """Collates numbered samples with the user's collator, and adds the column of their indices."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Return the batch of these samples."""
        if not all(isinstance(sample, _Numbered) for sample in samples):
            raise DataError(
                "the Trainer's training loader reads other samples than those of its train_dataset, so that the "
                "recording cannot tell which examples are trained on: build the loader of get_train_dataloader from "
                "self.train_dataset and self.data_collator."
            )
        batch = self._collate([sample.sample for sample in samples])
        if not isinstance(batch, MutableMapping):
            raise DataError(f"a Trainer's data_collator must return a dict of tensors, got a {type(batch).__name__}.")
        batch[_COLUMN] = torch.tensor([sample.number for sample in samples])
        return batch


def take_indices(batch: Any) -> list[int] | None:
    """Remove the indices from a batch and return them; None if it has none."""
    indices = batch.pop(_COLUMN, None) if isinstance(batch, MutableMapping) else None
    return None if indices is None else [int(index) for index in indices]
