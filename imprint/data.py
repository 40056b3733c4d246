"""Data as batches: any map-style dataset, columns of tensors, or an iterable of ready batches."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from imprint.errors import DataError, first_line
from imprint.task import Batch

Collate = Callable[[list[Any]], Batch]
_KEPT_BYTES = 2 << 30  # collated data up to this size stays in memory, so that each step does not collate it again


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """`batch` with `function` applied to every tensor in it; other leaves stay as they are."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, MutableMapping) and not isinstance(batch, dict):  # such as a tokenizer's result
        mapped = copy(batch)
        mapped.update({key: map_tensors(function, value) for key, value in batch.items()})
        return mapped
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def leaves(batch: Batch) -> list[Any]:
    """The tensors and other values in a batch, in order."""
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


def flattened(batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    """A batch as a structure of plain JSON, and its tensors by the names that stand in it.

    >>> flattened((torch.zeros(2), {"y": torch.ones(2)}))[0]
    {'tuple': [{'tensor': '0'}, {'dict': {'y': {'tensor': '1'}}}]}
    """
    tensors: dict[str, Tensor] = {}

    def visit(value: Batch) -> Any:
        if isinstance(value, Tensor):
            tensors[str(len(tensors))] = value
            return {"tensor": str(len(tensors) - 1)}
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            return {"dict": {key: visit(item) for key, item in value.items()}}
        if type(value) in (list, tuple):
            return {type(value).__name__: [visit(item) for item in value]}
        if value is None or isinstance(value, str | int | float | bool):
            return {"value": value}
        raise DataError(f"a batch with a {type(value).__name__} in it cannot be written as JSON and tensors.")

    return visit(batch), tensors


def rebuilt(structure: Any, tensor: Callable[[str], Tensor]) -> Batch:
    """The batch that `flattened` took apart."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: rebuilt(item, tensor) for key, item in content.items()}
    if kind == "value":
        return content
    items = (rebuilt(item, tensor) for item in content)
    return list(items) if kind == "list" else tuple(items)


def length(batch: Batch) -> int:
    """How many samples a collated batch has: the first dimension of its first tensor."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise DataError(f"a batch must hold at least one tensor with a first dimension; got {type(batch).__name__}.")


def shown_batch(batch: Batch) -> str:
    """What a batch is made of, for messages.

    >>> shown_batch({"ids": torch.zeros(2, 3), "names": ["a", "b"]})
    "{'ids': float32 (2, 3), 'names': list}"
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {shown_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple) and any(isinstance(value, Tensor) for value in batch):
        return f"({', '.join(map(shown_batch, batch))})"
    return type(batch).__name__


def is_columnar(batch: Batch, count: int) -> bool:
    """Whether every leaf is a tensor whose first dimension runs over the `count` samples."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count for leaf in leaves(batch))


def _size(batch: Batch) -> int:
    return sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, Tensor))


def _usable(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = tensor.to(device)
    return tensor.clone() if tensor.is_inference() else tensor  # inference tensors take no derivative of any kind


class Data:
    """A dataset that hands out batches on a device, by index or in one fixed pass.

    dataset: map-style (`len`, `[i]`), or a tuple or mapping of tensors with one row per example.
    batch_size: how many examples are evaluated at once; it changes memory and speed, not results.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        device: torch.device | str,
        batch_size: int = 1024,
        collate_fn: Collate | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"batch_size must be at least 1, got {batch_size}.")
        self.device = device = torch.device(device)
        self.batch_size = batch_size
        self._collate = collate_fn or default_collate
        self._passes: list[tuple[Tensor, Batch]] | None = None
        self._columns: Batch | None = None
        dataset = as_tensors(dataset)
        if isinstance(dataset, TensorDataset) and collate_fn is None:
            dataset = dataset.tensors
        if is_columns(dataset):
            if collate_fn is not None:
                raise DataError(
                    "columns of tensors are batches already: leave collate_fn out, or give a dataset of samples."
                )
            lengths = sorted({len(leaf) for leaf in leaves(dataset)})
            if len(lengths) > 1:
                raise DataError(f"columns of data must have equally many rows, got {lengths}.")
            self._columns = map_tensors(lambda t: _usable(t, device), dataset)
            self._length = lengths[0]
        elif isinstance(dataset, Mapping):
            wrong = next((key for key, v in dataset.items() if not isinstance(v, Tensor)), "(none)")
            raise DataError(f"a mapping must hold tensors with one row per example; {wrong!r} is no tensor.")
        elif isinstance(dataset, list) and dataset and is_columns(dataset[0]) and collate_fn is None:
            raise DataError(
                "a list of batches is no dataset: give a DataLoader or a generator of batches, a tuple (x, y) with all "
                "rows, or, if these are samples, a torch Dataset."
            )
        elif isinstance(dataset, tuple) and any(isinstance(leaf, Tensor) for leaf in dataset):
            raise DataError("a tuple of data must hold tensors only, each with one row per example.")
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            self._length = len(dataset)
        else:
            raise DataError(f"expected a map-style dataset (with len and [index]), got {type(dataset).__name__}.")
        if self._length == 0:
            raise DataError("the dataset is empty.")
        self._dataset = dataset
        if self._columns is None and collate_fn is None:
            self._columns = self._collect()

    def __len__(self) -> int:
        return self._length

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` as one batch."""
        if self._columns is not None:
            where = indices.to(self.device)
            return map_tensors(lambda t: t[where], self._columns)
        return self._read(indices.tolist())

    def batches(self) -> Iterator[tuple[Tensor, Batch]]:
        """All samples once, in order, as (indices, batch)."""
        if self._passes is not None:
            yield from self._passes
            return
        passes: list[tuple[Tensor, Batch]] = []
        kept = 0
        for start in range(0, len(self), self.batch_size):
            part = slice(start, min(start + self.batch_size, len(self)))
            indices = torch.arange(part.start, part.stop, device=self.device)
            if self._columns is not None:
                yield indices, map_tensors(itemgetter(part), self._columns)
                continue
            batch = self._read(indices.tolist())
            kept += _size(batch)
            passes.append((indices, batch))
            if kept > _KEPT_BYTES:
                passes.clear()
            yield indices, batch
        if self._columns is None and kept <= _KEPT_BYTES:
            self._passes = passes

    def _read(self, indices: list[int]) -> Batch:
        samples = [self._dataset[i] for i in indices]
        try:
            batch = self._collate(samples)
        except Exception as error:
            if self._collate is not default_collate:
                raise DataError(f"the collate_fn failed: {first_line(error)}.") from error
            raise DataError(f"samples could not be collated into a batch ({error}): give a collate_fn.") from error
        return map_tensors(lambda t: _usable(t, self.device), batch)

    def _collect(self) -> Batch | None:
        """The whole dataset as columns, if its samples stack and are small enough to keep."""
        first = self._read(list(range(min(len(self), 64))))
        if not is_columnar(first, min(len(self), 64)) or _size(first) / 64 * len(self) > _KEPT_BYTES:
            return None
        parts = [self._read(list(range(i, min(i + 4096, len(self))))) for i in range(0, len(self), 4096)]
        return _concatenate(parts)


def as_tensors(dataset: Any) -> Any:
    """Columns of numpy arrays as columns of tensors; the `columns` of what has such; anything else as it is."""
    if isinstance(getattr(dataset, "columns", None), dict):  # such as documents and completions
        dataset = dataset.columns
    if isinstance(dataset, tuple) and dataset and all(isinstance(column, np.ndarray) for column in dataset):
        return tuple(_as_tensor(name, column) for name, column in enumerate(dataset))
    if isinstance(dataset, dict) and any(isinstance(column, np.ndarray) for column in dataset.values()):
        arrays = {name: column for name, column in dataset.items() if isinstance(column, np.ndarray)}
        return {**dataset, **{name: _as_tensor(name, column) for name, column in arrays.items()}}
    return dataset


def _as_tensor(name: object, column: Any) -> Tensor:
    try:
        return torch.from_numpy(np.ascontiguousarray(column))
    except TypeError as error:
        raise DataError(f"column {name!r} of the data holds values of {column.dtype}: give numbers.") from error


def length_of(dataset: Any) -> int:
    """How many samples a dataset has, be it columns or map-style."""
    dataset = as_tensors(dataset)
    if not is_columns(dataset) and not hasattr(dataset, "__len__"):
        raise DataError(f"expected a map-style dataset (with len and [index]), got {type(dataset).__name__}.")
    return len(leaves(dataset)[0]) if is_columns(dataset) else len(dataset)


def is_columns(dataset: Any) -> bool:
    """Whether a dataset is a tuple or mapping of tensors with one row per example."""
    if not isinstance(dataset, tuple | Mapping) or not dataset:
        return False
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves(dataset))


def _concatenate(parts: list[Batch]) -> Batch:
    columns = [iter(leaves(part)) for part in parts]
    return map_tensors(lambda _: torch.cat([next(column) for column in columns]), parts[0])


def query_batches(
    queries: Any, *, device: torch.device, batch_size: int, collate_fn: Collate | None
) -> list[tuple[int, Batch]]:
    """Queries as (count, batch) pairs: a dataset cut into batches, or an iterable of batches taken as it is."""
    queries = as_tensors(queries)
    if is_columns(queries) or (hasattr(queries, "__getitem__") and hasattr(queries, "__len__")):
        if len(queries) == 0 or (is_columns(queries) and not any(len(leaf) for leaf in leaves(queries))):
            raise DataError("there are no queries: the set is empty.")
        data = Data(queries, device=device, batch_size=batch_size, collate_fn=collate_fn)
        return [(len(indices), batch) for indices, batch in data.batches()]
    if not isinstance(queries, Iterable):
        raise DataError(f"queries must be a map-style dataset or an iterable of batches, got {type(queries).__name__}.")
    batches = [map_tensors(lambda t: _usable(t, device), batch) for batch in queries]
    counted = [(length(batch), batch) for batch in batches]
    if not any(count for count, _ in counted):
        raise DataError("there are no queries: the iterable gave no batch.")
    return [(count, batch) for count, batch in counted if count]
