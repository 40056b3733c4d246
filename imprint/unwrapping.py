"""Takes training data apart in the forms people have it: DataLoaders, and tables such as those of `datasets`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from imprint.errors import DataError, first_line

logger = logging.getLogger(__name__)
_SHUFFLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def shuffles(loader: "DataLoader[Any]") -> bool:
    """Tell whether a loader draws its samples in random order."""
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return any(isinstance(s, _SHUFFLERS) or getattr(s, "shuffle", False) is True for s in samplers)


def unwrap_loader(
    loader: "DataLoader[Any]", collate_fn: Callable[[list[Any]], Any] | None
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Return the dataset and the collate function of a loader that goes through all of its dataset in order.

    Sources are sets of indices into the dataset, so that the order must be known.
    """
    advice = "give its dataset and its collate_fn: data=loader.dataset, collate_fn=loader.collate_fn"
    if collate_fn is not None:
        raise DataError(f"the DataLoader has a collate_fn of its own: leave yours out, or {advice}.")
    if isinstance(loader.dataset, IterableDataset):  # which is refused by itself
        return loader.dataset, None
    if shuffles(loader):
        raise DataError(
            "the DataLoader shuffles (shuffle=True, or a random sampler), so its first sample is not the first of the "
            f"dataset, which sources refer to: {advice}. Batches are drawn by the plan."
        )
    if type(loader.sampler) is not SequentialSampler or type(loader.batch_sampler) is not BatchSampler:
        sampler = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
        why = "gives samples without batches" if sampler is None else f"has a {type(sampler).__name__} of its own"
        raise DataError(f"the DataLoader {why}, so which samples it draws is not known: {advice}.")
    count, size = len(loader.dataset), loader.batch_size or 1  # type: ignore[arg-type]
    if loader.drop_last and count % size:
        raise DataError(
            f"the DataLoader drops the last {count % size} of {count} samples (drop_last=True): give it "
            "drop_last=False, or a torch.utils.data.Subset of what was trained on."
        )
    is_plain = loader.collate_fn is default_collate and not isinstance(loader.dataset, list)  # which may be of batches
    return loader.dataset, None if is_plain else loader.collate_fn


def is_table(dataset: Any) -> bool:
    """Tell whether a dataset has named columns and rows by index, as a `datasets.Dataset` does."""
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return False
    if isinstance(dataset.column_names, Mapping):
        some = next(iter(dataset.column_names), "train")
        raise DataError(f"the data has several splits: give one of them, such as dataset[{some!r}].")
    return bool(_format(dataset) != "custom")  # where a function of the user's makes the samples


def read_table(dataset: Any) -> dict[str, Tensor]:
    """Return the columns of numbers of a table as tensors; leave out columns of anything else, such as texts."""
    first = dataset[0] if len(dataset) else {}
    if not isinstance(first, Mapping):
        raise DataError(
            f"[0] of the {type(dataset).__name__} is a {type(first).__name__}, not a row: give a mapping of arrays or "
            "tensors with one row per example, one for each column."
        )
    numeric = [name for name in dataset.column_names if _holds_numbers(dataset, name, first.get(name))]
    if left_out := [name for name in dataset.column_names if name not in numeric]:
        logger.warning("columns of the data that are no numbers are left out: %s", ", ".join(left_out))
    if not numeric:
        raise DataError(
            f"no column of the data holds numbers: it has {', '.join(map(str, dataset.column_names)) or 'none'}. Give "
            "a collate_fn that makes batches of its rows; texts can be given to imprint.language."
        )
    return {name: _stack(name, dataset[name][:]) for name in numeric}


def _format(dataset: Any) -> Any:
    found = getattr(dataset, "format", None)
    return found.get("type") if isinstance(found, Mapping) else None


def _holds_numbers(dataset: Any, name: str, first: Any) -> bool:
    """Tell whether the first value of a column that is neither null nor empty is a number, or made of numbers."""
    found = _is_numeric(first)
    if found is None:
        found = next((known for value in dataset[name] if (known := _is_numeric(value)) is not None), False)
    return found


def _is_numeric(value: Any) -> bool | None:
    """Tell whether a value is a number or made of numbers; None where it is null, or has nothing in it."""
    if value is None or (isinstance(value, np.ndarray | Tensor) and 0 in value.shape):
        return None
    if isinstance(value, np.ndarray) and value.dtype != object:
        return bool(np.issubdtype(value.dtype, np.number) or value.dtype == bool)
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes):
        known = {_is_numeric(each) for each in value} - {None}
        return all(known) if known else None
    return isinstance(value, Tensor | Number | np.bool_)


def _holds_null(value: Any) -> bool:
    nested = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    return value is None or (nested and any(map(_holds_null, value)))


def _stack(name: str, values: Any) -> Tensor:
    """Return a column as one tensor with a row per example."""
    if isinstance(values, Tensor):
        return values
    try:
        if isinstance(values, np.ndarray):
            return torch.from_numpy(np.ascontiguousarray(values))
        rows = list(values)
        if isinstance(rows[0], Tensor):
            return torch.stack(rows)
        found = torch.from_numpy(np.asarray(rows))
        return found.to(torch.get_default_dtype()) if found.is_floating_point() else found  # as Python's numbers are
    except (ValueError, TypeError, RuntimeError) as error:
        lacking = next((row for row, value in enumerate(values) if _holds_null(value)), None)
        if lacking is not None:
            raise DataError(
                f"column {name!r} of the data is null in row {lacking}: fill it in, or leave out such rows, or the "
                "column."
            ) from error
        raise DataError(
            f"column {name!r} of the data cannot be made one tensor ({first_line(error)}): if its rows have different "
            "lengths, give a collate_fn that pads them, such as the data_collator you trained with."
        ) from error
