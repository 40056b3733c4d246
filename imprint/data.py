"""Reads data as batches: a map-style dataset, columns of tensors, or an iterable of ready batches."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from imprint.batches import concatenate, copy_batch, describe_batch, is_columnar, leaves, length, map_tensors, raw_bytes
from imprint.display import strip_addresses
from imprint.errors import DataError, ImprintError, ReliabilityWarning, first_line
from imprint.task import Batch
from imprint.unwrapping import is_table, read_table, shuffles, unwrap_loader

HashData = Literal["all", "sampled", "none"]
Collate = Callable[[list[Any]], Batch]
_KEPT_BYTES = 2 << 30  # collated data up to this size stays in memory
_READ_TWICE = 32  # examples that are read again, to see whether they change
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _count_bytes(batch: Batch) -> int:
    return sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, Tensor))


def _move_to(device: torch.device, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise DataError(f"the data has a tensor on the meta device, {describe_batch(tensor)}: give one with values.")
    if tensor.is_sparse or tensor.layout in _SPARSE:
        raise DataError(f"the data has a sparse tensor, {describe_batch(tensor)}: convert it with to_dense().")
    tensor = tensor.to(device)
    return tensor.clone() if tensor.is_inference() else tensor  # inference tensors take part in no derivative


class Data:
    """A dataset that returns batches on a device, by index or in one pass in order.

    dataset: map-style (`len`, `[i]`), or a tuple or mapping of tensors with one row per example; also a table of the
        package `datasets`, or a DataLoader that goes through its dataset in order.
    batch_size: how many examples are evaluated at once; changes memory and speed, but not results, unless dropout is
        drawn.
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
        if isinstance(dataset, DataLoader):
            dataset, collate_fn = unwrap_loader(dataset, collate_fn)
        if is_table(dataset) and collate_fn is None:
            dataset = read_table(dataset)
        self._collate = collate_fn or default_collate
        self._passes: list[tuple[Tensor, Batch]] | None = None
        self._columns: Batch | None = None
        self._given_columns = False
        dataset = as_tensors(dataset)
        if hasattr(dataset, "iloc"):  # of pandas, where [i] is a column or a label
            raise DataError(
                f"a pandas {type(dataset).__name__} cannot serve as a dataset, because [i] is not its row i: give a "
                "tuple of columns, such as (table[features].to_numpy(), table[target].to_numpy())."
            )
        if (
            isinstance(dataset, TensorDataset)
            and type(dataset).__getitem__ is TensorDataset.__getitem__
            and collate_fn is None
        ):
            dataset = dataset.tensors
        if is_columns(dataset):
            if collate_fn is not None:
                raise DataError(
                    "columns of tensors are already batched: omit collate_fn, or give a dataset of samples."
                )
            lengths = sorted({len(leaf) for leaf in leaves(dataset)})
            if len(lengths) > 1:
                raise DataError(f"all columns of the data must have the same number of rows, got {lengths}.")
            self._columns, self._given_columns = map_tensors(partial(_move_to, device), dataset), True
            self._length = lengths[0]
        elif isinstance(dataset, Mapping):
            wrong = next((key for key, v in dataset.items() if not isinstance(v, Tensor)), "(none)")
            raise DataError(f"a mapping must hold tensors with one row per example; {wrong!r} is not a tensor.")
        elif isinstance(dataset, list) and dataset and is_columns(dataset[0]) and collate_fn is None:
            raise DataError(
                "a list whose items are groups of tensors may hold samples or batches. Samples: give collate_fn=, such "
                "as torch.utils.data.default_collate if they have the same shapes, or a torch Dataset. Batches: give a "
                "DataLoader, a generator of batches, or a tuple (x, y) with all rows."
            )
        elif isinstance(dataset, tuple) and any(isinstance(leaf, Tensor) for leaf in dataset):
            raise DataError("a tuple of data must hold only tensors, each with one row per example.")
        elif isinstance(dataset, IterableDataset):
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset, whose examples have no indices: give a map-style "
                "dataset (with len and [index]), such as the list of its samples."
            )
        elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            self._length = _read_length(dataset)
        else:
            raise DataError(f"expected a map-style dataset (with len and [index]), got {_describe_type(dataset)}.")
        if self._length == 0:
            raise DataError("the dataset is empty.")
        self._dataset = dataset
        if self._columns is None and collate_fn is None:
            self._columns = self._collect_columns()

    def __len__(self) -> int:
        return self._length

    @property
    def stacked(self) -> Batch | None:
        """All samples as one batch, or None if they are not stored as columns of tensors."""
        return self._columns

    def changing_example(self) -> int | None:
        """Read some examples again and return the first that has changed, or None."""
        if self._given_columns:
            return None
        chosen: list[int] = spread_examples(len(self), _READ_TWICE).tolist()
        first, second = self.gather(torch.tensor(chosen)), self._read(chosen)
        pairs = list(zip_longest(leaves(first), leaves(second)))
        for row, example in enumerate(chosen):
            if any(_row(before, row, len(chosen)) != _row(now, row, len(chosen)) for before, now in pairs):
                return example
        return self._find_changed_by_collate(chosen) if self._collate is not default_collate else None

    def _find_changed_by_collate(self, indices: list[int]) -> int | None:
        """Find an example whose tensors the collate_fn changes in the dataset's own memory, or None.

        Here the collate_fn gets copies. In the user's training it would change the data each time it is read.
        """
        kept = [_strided_tensors(self._read_sample(i)) for i in indices]
        given = [copy_batch(self._read_sample(i)) for i in indices]
        tensors = [_strided_tensors(sample) for sample in given]  # the collate_fn may change its list and samples
        before = [[raw_bytes(tensor).tobytes() for tensor in each] for each in tensors]
        self._collate_samples(given)
        for row, example in enumerate(indices):
            for mine, again, now, was in zip(
                kept[row], _strided_tensors(self._read_sample(example)), tensors[row], before[row], strict=False
            ):
                if mine.data_ptr() == again.data_ptr() and raw_bytes(now).tobytes() != was:
                    return example
        return None

    def gather(self, indices: Tensor) -> Batch:
        """Return the samples at `indices` as one batch."""
        if self._columns is not None:
            where = indices.to(self.device)
            return map_tensors(lambda t: t[where], self._columns)
        return self._read(indices.tolist())

    def batches(self) -> Iterator[tuple[Tensor, Batch]]:
        """Yield all samples once, in order, as (indices, batch)."""
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
            kept += _count_bytes(batch)
            passes.append((indices, batch))
            if kept > _KEPT_BYTES:
                passes.clear()
            yield indices, batch
        if self._columns is None and kept <= _KEPT_BYTES:
            self._passes = passes

    def _read(self, indices: list[int]) -> Batch:
        batch = self._collate_samples([copy_batch(self._read_sample(i)) for i in indices])
        if self._collate is not default_collate:  # default_collate makes new tensors each time
            batch = copy_batch(batch)
        return map_tensors(partial(_move_to, self.device), batch)

    def _read_sample(self, index: int) -> Any:
        try:
            return self._dataset[index]
        except (ImprintError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"sample {index} of {len(self)} could not be read ({first_line(error)}): dataset[i] must work "
                f"for every i below len(dataset). Fix sample {index}, or leave it out."
            ) from error

    def _collate_samples(self, samples: list[Any]) -> Batch:
        try:
            return self._collate(samples)
        except Exception as error:
            if self._collate is not default_collate:
                raise DataError(f"the collate_fn failed: {first_line(error)}.") from error
            raise DataError(f"samples could not be collated into a batch ({error}): give a collate_fn.") from error

    def _collect_columns(self) -> Batch | None:
        """Collate the whole dataset into columns, if its samples can be stacked and are small enough to keep."""
        first = self._read(list(range(min(len(self), 64))))
        if not is_columnar(first, min(len(self), 64)) or _count_bytes(first) / 64 * len(self) > _KEPT_BYTES:
            return None
        parts = [self._read(list(range(i, min(i + 4096, len(self))))) for i in range(0, len(self), 4096)]
        return concatenate(parts)


def spread_examples(n: int, count: int = 8) -> Tensor:
    """Choose up to `count` of `n` indices, evenly spread, the first and the last among them."""
    return torch.from_numpy(np.unique(np.linspace(0, n - 1, min(count, n)).round().astype(np.int64)))


def _strided_tensors(sample: Any) -> list[Tensor]:
    """List the tensors of a sample whose values are plain bytes in memory."""
    return [leaf for leaf in leaves(sample) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _read_length(dataset: Any) -> int:
    """Call the dataset's __len__, which may be the user's code."""
    try:
        return len(dataset)
    except Exception as error:
        raise DataError(
            f"the length of the dataset, a {type(dataset).__name__}, could not be read ({first_line(error)}): its "
            "__len__ must return the number of samples."
        ) from error


def _row(leaf: Any, row: int, count: int) -> object:
    """Return one of the `count` rows of a leaf in a form that == compares; all of the leaf if it has no rows."""
    if not isinstance(leaf, Tensor):
        return strip_addresses(repr(leaf))
    part = leaf[row] if leaf.dim() and leaf.shape[0] == count else leaf
    return part.dtype, tuple(part.shape), raw_bytes(part).tobytes()


def as_tensors(dataset: Any) -> Any:
    """Convert columns of NumPy arrays to tensors, and objects with a `columns` dict to it; leave the rest as it is."""
    if isinstance(getattr(dataset, "columns", None), dict):  # such as the datasets of imprint.language
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
        raise DataError(f"column {name!r} of the data has dtype {column.dtype}: give numbers.") from error


def length_of(dataset: Any) -> int:
    """Count the samples of a dataset, given as columns, map-style or by a loader."""
    dataset = as_tensors(dataset.dataset if isinstance(dataset, DataLoader) else dataset)
    if not is_columns(dataset) and not hasattr(dataset, "__len__"):
        raise DataError(f"expected a map-style dataset (with len and [index]), got {_describe_type(dataset)}.")
    return len(leaves(dataset)[0]) if is_columns(dataset) else _read_length(dataset)


def _describe_type(dataset: object) -> str:
    """Name the type of what was given as a dataset; of a loader, point to the dataset that it loads."""
    hint = ": give its .dataset, and its collate_fn if it has one of its own" if hasattr(dataset, "dataset") else ""
    return type(dataset).__name__ + hint


def read_texts(queries: Any, count: int) -> tuple[str, ...]:
    """Return the text of each query, where the queries have columns and `texts`, as those of imprint.language do."""
    if not isinstance(getattr(queries, "columns", None), dict):
        return ()
    texts = getattr(queries, "texts", ())
    known = isinstance(texts, list | tuple) and len(texts) == count and all(isinstance(each, str) for each in texts)
    return tuple(texts) if known else ()


def is_columns(dataset: Any) -> bool:
    """Tell whether a dataset is a tuple or mapping of tensors with one row per example."""
    if not isinstance(dataset, tuple | Mapping) or not dataset:
        return False
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves(dataset))


def query_batches(
    queries: Any, *, device: torch.device, batch_size: int, collate_fn: Collate | None
) -> list[tuple[int, Batch]]:
    """Return queries as (count, batch) pairs: split a dataset into batches, use an iterable of batches as it is."""
    queries = as_tensors(queries)
    if is_columns(queries) or (hasattr(queries, "__getitem__") and hasattr(queries, "__len__")):
        if _read_length(queries) == 0 or (is_columns(queries) and not any(len(leaf) for leaf in leaves(queries))):
            raise DataError("there are no queries: the dataset is empty.")
        data = Data(queries, device=device, batch_size=batch_size, collate_fn=collate_fn)
        if (query := data.changing_example()) is not None:
            warnings.warn(
                f"query {query} changes each time it is read, so its scores cannot be reproduced. Give queries "
                "without random augmentation, and a collate_fn that changes no sample in place.",
                ReliabilityWarning,
                stacklevel=3,
            )
        return [(len(indices), batch) for indices, batch in data.batches()]
    if not isinstance(queries, Iterable):
        raise DataError(f"queries must be a map-style dataset or an iterable of batches, got {type(queries).__name__}.")
    if isinstance(queries, DataLoader) and shuffles(queries):
        warnings.warn(
            "the queries come from a DataLoader that shuffles (shuffle=True, or a random sampler), so scores are in "
            "the order it drew, not in the order of its dataset. Give a DataLoader with shuffle=False, or the dataset.",
            ReliabilityWarning,
            stacklevel=3,
        )
    batches = [map_tensors(partial(_move_to, device), copy_batch(batch)) for batch in queries]
    counted = [(length(batch), batch) for batch in batches]
    if not any(count for count, _ in counted):
        raise DataError("there are no queries: the iterable yields no batch.")
    return [(count, batch) for count, batch in counted if count]
