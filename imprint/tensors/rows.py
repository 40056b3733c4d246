"""Displacements of many sources in factored form, and gradients of single examples, which come in that form.

The gradient of a linear layer's weight, for one example, is δ aᵀ: its input a, and the derivative δ of the value by its
output. An imprint of the spectral engine is such a gradient and a combination of the directions of a basis. Everything
linear in an imprint can be read from the factors; `dense` multiplies them out.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from imprint.batches import describe_batch, is_columnar, map_tensors
from imprint.errors import TaskError
from imprint.runtime.turns import jvp
from imprint.task import Batch, Functional, Parameters, Task

MULTIPLIED = 256  # rows that are multiplied out at once, to be compared with a basis

Values = Callable[[Parameters, Batch, int], Tensor]
"""One value per example, such as `Functional.losses` or `Functional.measures`."""


@dataclass(frozen=True)
class Rows:
    """One displacement per row: coefficients · basis + the layers' δ aᵀ + dense.

    inputs, outputs: a (rows, in) and δ (rows, out) of each factored linear layer, by the name of its module; its bias,
        if it has one, moves by δ.
    dense: of parameters that are in no such layer, (rows, *shape).
    coefficients: on the basis, (rows, directions), where there is one.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    dense: Parameters
    coefficients: Tensor | None = None
    basis: Parameters = field(default_factory=dict)

    def __len__(self) -> int:
        parts = [*self.inputs.values(), *self.dense.values()]
        return len(parts[0] if self.coefficients is None else self.coefficients)

    @property
    def only_basis(self) -> bool:
        """Whether the rows are combinations of the basis and nothing else."""
        return not self.inputs and not self.dense

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(
            {name: tensor[rows] for name, tensor in self.inputs.items()},
            {name: tensor[rows] for name, tensor in self.outputs.items()},
            {name: tensor[rows] for name, tensor in self.dense.items()},
            None if self.coefficients is None else self.coefficients[rows],
            self.basis,
        )

    def scaled(self, scale: float) -> "Rows":
        """Multiply every row by a number; the rows must have no basis."""
        assert self.coefficients is None
        outputs = {name: scale * tensor for name, tensor in self.outputs.items()}
        return Rows(self.inputs, outputs, {name: scale * tensor for name, tensor in self.dense.items()})

    def rounded(self, dtype: torch.dtype, scale: float) -> "Rows":
        """Round rows without a basis, so that `scale` times them loses nothing when stored in another dtype."""

        def back(tensor: Tensor) -> Tensor:
            return (scale * tensor).to(dtype).to(tensor) / scale

        inputs = {name: tensor.to(dtype).to(tensor) for name, tensor in self.inputs.items()}
        outputs = {name: back(tensor) for name, tensor in self.outputs.items()}
        return Rows(inputs, outputs, {name: back(tensor) for name, tensor in self.dense.items()})

    def multiplied_out(self, like: Parameters) -> Parameters:
        """Return the rows in full, (rows, *shape) for each parameter of `like`."""
        full = dict(self.dense)
        for layer, inputs in self.inputs.items():
            weight, bias = parameters_of(layer)
            full[weight] = self.outputs[layer].unsqueeze(2) * inputs.unsqueeze(1)
            if bias in like:
                full[bias] = self.outputs[layer]
        for name, directions in self.basis.items():
            assert self.coefficients is not None
            part = (self.coefficients @ _matrix(directions)).reshape(len(self), *directions.shape[1:])
            full[name] = part.add_(full[name]) if name in full else part
        return {name: full[name] for name in like}

    def dots(self, other: "Rows", like: Parameters) -> Tensor:
        """Return the inner products of rows, without their bases, shape (rows, other rows)."""
        products = [_matrix(t) @ _matrix(other.dense[name]).T for name, t in self.dense.items()]
        for layer, inputs in self.inputs.items():
            shared = inputs @ other.inputs[layer].T
            if parameters_of(layer)[1] in like:
                shared = shared + 1
            products.append(shared * (self.outputs[layer] @ other.outputs[layer].T))
        return torch.stack(products).sum(0)

    def lengths(self, like: Parameters, seen: Tensor) -> Tensor:
        """Return the length of each row on an orthonormal basis, in float64.

        seen: the inner products of the rest with the basis, from `along`.
        """
        assert self.coefficients is not None
        inside = self.coefficients.double()
        squares = self.squares(like) + (inside * (inside + 2 * seen.double())).sum(1)
        return squares.clamp(min=0).sqrt()

    def squares(self, like: Parameters) -> Tensor:
        """Return the squared length of each row without its part on the basis, in float64."""
        parts = [torch.linalg.vector_norm(_matrix(t), dim=1, dtype=torch.float64) ** 2 for t in self.dense.values()]
        for layer, inputs in self.inputs.items():
            width = inputs.double().square().sum(1) + (1.0 if parameters_of(layer)[1] in like else 0.0)
            parts.append(width * self.outputs[layer].double().square().sum(1))
        return torch.stack(parts).sum(0)

    def tensors(self) -> Parameters:
        """Return all tensors but the basis, under names that say which part they are."""
        named = {f"inputs/{name}": tensor for name, tensor in self.inputs.items()}
        named |= {f"outputs/{name}": tensor for name, tensor in self.outputs.items()}
        named |= {f"dense/{name}": tensor for name, tensor in self.dense.items()}
        return named if self.coefficients is None else {**named, "coefficients": self.coefficients}

    @classmethod
    def joined(cls, parts: "Sequence[Rows]") -> "Rows":
        """Join the rows of several parts without a basis."""

        def cat(kind: str) -> Parameters:
            return {name: torch.cat([getattr(part, kind)[name] for part in parts]) for name in getattr(parts[0], kind)}

        return parts[0] if len(parts) == 1 else cls(cat("inputs"), cat("outputs"), cat("dense"))

    @classmethod
    def of(cls, tensors: Parameters, basis: Parameters) -> "Rows":
        """Put together what `tensors` returned."""

        def part(kind: str) -> Parameters:
            return {name.removeprefix(kind): t for name, t in tensors.items() if name.startswith(kind)}

        return cls(part("inputs/"), part("outputs/"), part("dense/"), tensors.get("coefficients"), basis)


def parameters_of(layer: str) -> tuple[str, str]:
    """Return the names of a linear layer's weight and bias; the model itself has no name."""
    return (f"{layer}.weight", f"{layer}.bias") if layer else ("weight", "bias")


def _matrix(stack: Tensor) -> Tensor:
    """Return a stack of tensors, which may be scalars, as the rows of a matrix."""
    return stack.reshape(len(stack), -1)


def along(rows: Rows, basis: Parameters, at_once: int = MULTIPLIED) -> Tensor:
    """Return the inner products of rows with the directions of a basis, shape (rows, directions)."""
    parts = []
    for start in range(0, len(rows), at_once):
        full = rows[start : start + at_once].multiplied_out(basis)
        products = [_matrix(full[name]) @ _matrix(directions).T for name, directions in basis.items()]
        parts.append(torch.stack(products).sum(0))
    return torch.cat(parts)


def orthonormal(basis: Parameters) -> tuple[Parameters, Tensor]:
    """Return the orthonormal basis T · basis nearest to one that rounding has left almost orthonormal, and T.

    T = (Q Qᵀ)^(−1/2): what is found on the new basis is kept on the given one as coefficients · T.
    """
    gram = torch.stack([_matrix(directions) @ _matrix(directions).T for directions in basis.values()]).sum(0)
    squares, turned = torch.linalg.eigh(gram.double())
    turn = ((turned / squares.sqrt()) @ turned.T).to(gram)
    return {name: (turn @ _matrix(q)).reshape(q.shape) for name, q in basis.items()}, turn


def gradients(values: Values, theta: Parameters, batch: Batch, count: int, task: Task, layers: Sequence[str]) -> Rows:
    """Return ∇ of each example's value, one row per example; `layers` are those that `factorable` found."""
    inputs, outputs = _factors(values, theta, batch, count, task, layers)
    if unfit := next((layer for layer in layers if layer not in inputs), None):
        raise TaskError(
            f"linear layer {unfit!r} is not used once for each example, as it was for the first ones: simulate with "
            'form="dense".'
        )
    covered = {name for layer in layers for name in parameters_of(layer)}
    rest = [name for name in theta if name not in covered]
    return Rows(inputs, outputs, _dense(values, theta, batch, count, rest) if rest else {})


def factorable(functional: Functional, theta: Parameters, batch: Batch, count: int) -> tuple[str, ...]:
    """Return the linear layers whose gradients are single products δ aᵀ: used once per example, and nowhere else.

    They are tried on a batch: the products must be the gradient.
    """
    task = functional.task
    names = []
    for name, module in task.replica.named_modules():
        weight, bias = parameters_of(name)
        if type(module) is nn.Linear and weight in theta and (module.bias is None or bias in theta):
            names.append(name)
    inputs, outputs = _factors(functional.losses, theta, batch, count, task, names)
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
        total = functional.losses(leaves, batch, count).sum()
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    true = dict(zip(leaves, slopes, strict=True))
    found = []
    for name in inputs:
        weight, bias = parameters_of(name)
        parts = {weight: outputs[name].T @ inputs[name], bias: outputs[name].sum(0)}
        if all(_same(part, true[key]) for key, part in parts.items() if key in true):
            found.append(name)
    return tuple(found)


def _same(found: Tensor, true: Tensor) -> bool:
    return torch.allclose(found, true, rtol=1e-3, atol=1e-5 * float(true.abs().max()))


def _factors(
    values: Values, theta: Parameters, batch: Batch, count: int, task: Task, layers: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return inputs and output derivatives of linear layers, by one backward pass for all examples.

    A layer that is called more than once, or on more than one vector per example, has none.
    """
    if not layers:
        return {}, {}
    inputs: dict[str, Tensor] = {}
    probes: dict[str, Tensor] = {}
    unfit: set[str] = set()

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
        def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
            if name in probes or output.dim() != 2 or len(output) != count:
                unfit.add(name)
                return output
            inputs[name] = given[0].detach()
            probes[name] = torch.zeros_like(output, requires_grad=True)
            return output + probes[name]

        return hook

    with _hooked(task, {name: watch(name) for name in layers}), torch.enable_grad():
        total = values(theta, batch, count).sum()
        slopes = torch.autograd.grad(total, list(probes.values()), materialize_grads=True) if probes else ()
    fit = [name for name in probes if name not in unfit]
    outputs = dict(zip(probes, slopes, strict=True))
    return {name: inputs[name] for name in fit}, {name: outputs[name] for name in fit}


def _dense(values: Values, theta: Parameters, batch: Batch, count: int, names: Sequence[str]) -> Parameters:
    """Return ∇ by some of the parameters for each example, (count, *shape)."""
    chosen = {name: theta[name] for name in names}
    others = {name: tensor for name, tensor in theta.items() if name not in chosen}

    def one(chosen: Parameters, sample: Batch) -> Tensor:
        return values({**others, **chosen}, sample, 1)[0]

    if not is_columnar(batch, count):
        raise TypeError(f"a batch of this data does not split into examples: {describe_batch(batch)}")
    each: Parameters = vmap(grad(one), in_dims=(None, 0))(chosen, map_tensors(lambda t: t.unsqueeze(1), batch))
    return each


def forward_along(values: Values, theta: Parameters, batch: Batch, count: int, task: Task, rows: Rows) -> Tensor:
    """Return the forward derivative of the values along each row, without its basis; shape (rows, count).

    The layers' parts are read as adapters of rank one: t δ (a · x) is added to a layer's output, and t differentiated.
    """

    def one(rows: tuple[dict[str, Tensor], dict[str, Tensor], Parameters]) -> Tensor:
        inputs, outputs, dense = rows

        def moved(t: Tensor) -> Tensor:
            def adapter(layer: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
                def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
                    reach: Tensor = (given[0] @ inputs[layer]).unsqueeze(-1)
                    if parameters_of(layer)[1] in theta:
                        reach = reach + 1
                    return output + t * reach * outputs[layer]

                return hook

            with _hooked(task, {layer: adapter(layer) for layer in inputs}):
                at = {name: p + t * dense[name] if name in dense else p for name, p in theta.items()}
                return values(at, batch, count)

        like = next(iter(theta.values()))
        return jvp(moved, (like.new_zeros(()),), (like.new_ones(()),))[1]  # type: ignore[no-any-return]

    return vmap(one)((rows.inputs, rows.outputs, rows.dense))


@contextmanager
def _hooked(task: Task, hooks: dict[str, Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]]) -> Iterator[None]:
    """Put forward hooks on modules of the model, by name, for a while."""
    handles = [task.replica.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
