"""Batches: nested containers of tensors, walked, copied, measured and described."""

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.errors import DataError
from imprint.task import Batch, own_containers


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


def copied(batch: Batch) -> Batch:
    """Return a batch with tensors and arrays of its own, in containers of the same types.

    Whoever made it may fill the same memory again. Objects of other kinds stay as they are.
    """
    return own_containers(batch, _copied_leaf)


def _copied_leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def leaves(batch: Batch) -> list[Any]:
    """The tensors and other values in a batch, in order."""
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves(value)]
    if isinstance(batch, list | tuple):
        return [leaf for value in batch for leaf in leaves(value)]
    return [batch]


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


def raw_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the values of a tensor as bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def concatenate(parts: list[Batch]) -> Batch:
    """Join batches of the same structure, tensor by tensor."""
    columns = [iter(leaves(part)) for part in parts]
    return map_tensors(lambda _: torch.cat([next(column) for column in columns]), parts[0])
