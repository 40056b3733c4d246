"""Dictionaries of tensors as vectors, and stacks of them (first dimension: one row per source)."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from imprint.compat import tree_map
from imprint.task import Functional, Parameters

_HARDLY_THERE = 0.1  # of the size of a model's other weights
_WIDENED = 1 << 21  # values that are held in float64 at once


class Flat:
    """Parameters as one vector and back, in the order and dtype of those given."""

    def __init__(self, like: Parameters) -> None:
        self._like = {name: tensor.shape for name, tensor in like.items()}
        self._sizes = [tensor.numel() for tensor in like.values()]
        first = next(iter(like.values()))
        self.dtype, self.device, self.size = first.dtype, first.device, sum(self._sizes)

    def vector(self, parameters: Parameters) -> Tensor:
        """Return all parameters as one vector."""
        return torch.cat([parameters[name].flatten() for name in self._like])

    def vectors(self, stack: Parameters) -> Tensor:
        """Return each row of a stack as a vector, (rows, size)."""
        return torch.cat([stack[name].reshape(len(stack[name]), -1) for name in self._like], dim=1)

    def parameters(self, vector: Tensor) -> Parameters:
        """Return the parameters in a vector; for a stack of vectors (rows, size), a stack of each."""
        pieces = torch.split(vector.to(self.dtype), self._sizes, dim=-1)
        lead = vector.shape[:-1]
        return {name: p.reshape((*lead, *shape)) for p, (name, shape) in zip(pieces, self._like.items(), strict=True)}


def zeros_like(parameters: Parameters, rows: int) -> Parameters:
    """Return `rows` zero vectors, stacked."""
    return {name: p.new_zeros((rows, *p.shape)) for name, p in parameters.items()}


def repeated(parameters: Parameters, rows: int) -> Parameters:
    """Return `rows` copies of one vector, stacked and writable."""
    return {name: p.expand(rows, *p.shape).clone() for name, p in parameters.items()}


def add_scaled_(target: Parameters, vector: Parameters, scale: float) -> None:
    """Add scale · vector to the target in place; a single vector is added to every row of a stack."""
    for name, tensor in target.items():
        tensor.add_(vector[name], alpha=scale)


def minus(left: Parameters, right: Parameters) -> Parameters:
    """Return left − right."""
    return {name: tensor - right[name] for name, tensor in left.items()}


def scaled(vector: Parameters, scale: float) -> Parameters:
    """Return scale · vector."""
    return {name: tensor * scale for name, tensor in vector.items()}


def norm(vector: Parameters) -> float:
    """Return the Euclidean norm of one vector."""
    return float(torch.stack([t.double().square().sum() for t in vector.values()]).sum().sqrt())


def scale(theta: Parameters, functional: Functional) -> float:
    """Return ‖θ‖; where θ is close to 0, as a fresh adapter's B, the norm of as many of the model's other weights."""
    fixed = functional.fixed
    names = [name for name, p in functional.task.model.named_parameters() if name in fixed and p.is_floating_point()]
    squares = sum(float(torch.linalg.vector_norm(fixed[name], dtype=torch.float64)) ** 2 for name in names)
    count = sum(tensor.numel() for tensor in theta.values())
    usual = math.sqrt(squares * count / max(1, sum(fixed[name].numel() for name in names)))
    own = norm(theta)
    return own if own > _HARDLY_THERE * usual else usual or 1.0


def row_norms(stack: Parameters) -> Tensor:
    """Return the norm of each row, shape (rows,), in float64; only some rows are held in float64 at once."""

    def squares(tensor: Tensor) -> Tensor:
        flat = tensor.reshape(len(tensor), -1)
        some = max(1, _WIDENED // max(1, flat.shape[1]))
        return torch.cat([part.double().square().sum(1) for part in flat.split(some)])

    return torch.stack([squares(tensor) for tensor in stack.values()]).sum(0).sqrt()


def row(stack: Any, index: int) -> Any:
    """Return row `index` of every tensor of a tree."""
    return tree_map(lambda t: t[index], stack)


def over_rows(
    function: Callable[..., Any], *stacks: Any, vectorise: bool, randomness: Literal["same", "error"] = "error"
) -> Any:
    """Apply a function to each row of the stacks, by `vmap` or in a loop, and stack the results."""
    if vectorise:
        return vmap(function, randomness=randomness)(*stacks)
    rows = next(iter(stacks[0].values())).shape[0]
    results = [function(*(row(stack, i) for stack in stacks)) for i in range(rows)]
    return tree_map(lambda *values: torch.stack(values), *results)


def root_mean_squares(rows: Tensor) -> Tensor:
    """Return the root mean square of each column, in float64."""
    return rows.double().square().mean(0).sqrt()


def root_mean_square(values: Tensor | Sequence[float]) -> float:
    """Return the root mean square of all values.

    >>> root_mean_square([3.0, -4.0, 5.0, 0.0])
    3.5355339059327378
    """
    return float(root_mean_squares(torch.as_tensor(values, dtype=torch.float64).flatten()))


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all tensors together, such as the gradients of a model; of half precision in full.

    >>> total_norm([torch.tensor([3.0, 0.0]), torch.tensor(4.0)])
    tensor(5.)
    """
    if not tensors:
        return torch.zeros(())
    wide = (t.float() if t.dtype.itemsize < 4 else t for t in tensors)
    total: Tensor = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(t) for t in wide]))
    return total


def six_digits(values: list[float]) -> list[float]:
    """Round figures to six digits: the last digits of a sum depend on where tensors lie in memory."""
    return [float(f"{value:.6g}") for value in values]
