"""Walks, copies, measures and describes batches: nested containers of tensors."""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.errors import DataError

Batch = Any
"""What the user's collate function makes: tensors, tuples, lists or mappings of them."""


def own_containers(batch: Batch, leaf: Callable[[Any], Any] | None = None) -> Batch:
    """Rebuild a batch in new containers around `leaf` of each value, by default around the same tensors.

    A user's function may change the containers that it is given.
    """
    if leaf is None and type(batch) is tuple and set(map(type, batch)) == {Tensor}:
        return batch  # there is nothing in it to change
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(own_containers(value, leaf) for value in batch))
    if type(batch) in (list, tuple):
        return type(batch)(own_containers(value, leaf) for value in batch)
    if isinstance(batch, MutableMapping):
        mapped = copy(batch)
        for key, value in batch.items():
            mapped[key] = own_containers(value, leaf)
        return mapped
    return batch if leaf is None else leaf(batch)


def map_tensors(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply `function` to every tensor of a batch; leave other values as they are."""
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


def copy_batch(batch: Batch) -> Batch:
    """Copy the tensors and arrays of a batch, in containers of the same types; share other objects.

    Whoever made the batch may fill the same memory again.
    """

    def copy_leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return value.copy() if isinstance(value, np.ndarray) else value

    return own_containers(batch, copy_leaf)


def leaves(batch: Batch) -> list[Any]:
    """List the tensors and other values of a batch, in order."""
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


def length(batch: Batch) -> int:
    """Count the samples of a collated batch: the first dimension of its first tensor."""
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise DataError(f"a batch must hold at least one tensor with a first dimension; got {type(batch).__name__}.")


def describe_batch(batch: Batch) -> str:
    """Describe what a batch is made of, for messages.

    >>> describe_batch({"ids": torch.zeros(2, 3), "names": ["a", "b"]})
    "{'ids': float32 (2, 3), 'names': list}"
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_batch(value)}" for key, value in batch.items()) + "}"
    if isinstance(batch, list | tuple) and any(isinstance(value, Tensor) for value in batch):
        return f"({', '.join(map(describe_batch, batch))})"
    return type(batch).__name__


def is_columnar(batch: Batch, count: int) -> bool:
    """Tell whether every leaf is a tensor whose first dimension runs over the `count` samples."""
    return all(isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count for leaf in leaves(batch))


def raw_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the values of a tensor as bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def concatenate(parts: list[Batch]) -> Batch:
    """Join batches of the same structure, tensor by tensor."""
    columns = [iter(leaves(part)) for part in parts]
    return map_tensors(lambda _: torch.cat([next(column) for column in columns]), parts[0])
