"""Batches as plain JSON and named tensors, the form in which a store keeps probe examples."""

from collections.abc import Callable, Mapping
from typing import Any

import torch  # noqa: F401  (for the doctest)
from torch import Tensor

from imprint.errors import DataError
from imprint.task import Batch


def flatten(batch: Batch) -> tuple[Any, dict[str, Tensor]]:
    """Take a batch apart into a structure of plain JSON, and its tensors by the names that stand in it.

    >>> flatten((torch.zeros(2), {"y": torch.ones(2)}))[0]
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


def rebuild(structure: Any, tensor: Callable[[str], Tensor]) -> Batch:
    """Put a batch together that `flatten` took apart."""
    ((kind, content),) = structure.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {key: rebuild(item, tensor) for key, item in content.items()}
    if kind == "value":
        return content
    items = (rebuild(item, tensor) for item in content)
    return list(items) if kind == "list" else tuple(items)
