"""The two derivatives the path engines are made of, summed over batches of weighted examples.

The objective is Σ_i c_i ℓ(θ; i) + r(θ), with c_i = 1/N for plain training. Its gradient moves the base path; the
forward derivative of that gradient in (θ, c) along (v, d) is H v + Σ_i d_i ∇ℓ_i, which moves the response.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vjp

from imprint.runtime.turns import jvp
from imprint.task import Batch, Functional, Parameters
from imprint.tensors.vectors import add_scaled_


@dataclass(frozen=True)
class Weighted:
    """A batch of training examples with the weight c_i of each; `examples` are their indices."""

    examples: Tensor
    weights: Tensor
    batch: Batch

    def __len__(self) -> int:
        return len(self.examples)


def gradient(
    task: Functional, theta: Parameters, weights: Tensor, batch: Batch, *, plain: bool = False
) -> tuple[Parameters, Tensor]:
    """Return ∇_θ Σ_i c_i ℓ(θ; i) and the losses ℓ(θ; i).

    plain: use autograd itself, which runs what torch.func refuses.
    """

    def objective(theta: Parameters) -> tuple[Tensor, Tensor]:
        losses = task.losses(theta, batch, len(weights))
        return (weights * losses).sum(), losses

    if plain:
        return _plain_gradient(objective, theta)
    return grad(objective, has_aux=True)(theta)  # type: ignore[no-any-return]


def _plain_gradient(
    objective: Callable[[Parameters], tuple[Tensor, Tensor]], theta: Parameters
) -> tuple[Parameters, Tensor]:
    """Return the gradient of the first result by plain autograd, and the second result."""
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in theta.items()}
        total, beside = objective(leaves)
        slopes = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, slopes, strict=True)), beside.detach()


def gradient_along(
    task: Functional, theta: Parameters, weights: Tensor, batch: Batch, v: Parameters, d: Tensor
) -> Parameters:
    """Return the forward derivative of `gradient` in (θ, c) along (v, d): H v + Σ_i d_i ∇ℓ_i."""

    def objective(theta: Parameters, weights: Tensor) -> Tensor:
        return (weights * task.losses(theta, batch, len(weights))).sum()

    return jvp(grad(objective), (theta, weights), (v, d))[1]  # type: ignore[no-any-return]


def regulariser_gradient(task: Functional, theta: Parameters, *, plain: bool = False) -> Parameters:
    """Return ∇r(θ)."""
    if plain:
        return _plain_gradient(lambda theta: (value := task.regulariser(theta), value), theta)[0]
    return grad(task.regulariser)(theta)  # type: ignore[no-any-return]


def regulariser_gradient_along(task: Functional, theta: Parameters, v: Parameters) -> Parameters:
    """Return ∇²r(θ) v."""
    return jvp(grad(task.regulariser), (theta,), (v,))[1]  # type: ignore[no-any-return]


def hessian_product(task: Functional, theta: Parameters, batches: Iterable[Weighted], v: Parameters) -> Parameters:
    """Return H v for the objective of the batches and the regulariser."""
    total = {name: tensor.new_zeros(tensor.shape) for name, tensor in v.items()}
    for part in batches:
        product = gradient_along(task, theta, part.weights, part.batch, v, part.weights.new_zeros(len(part)))
        add_scaled_(total, product, 1.0)
    if task.task.regulariser is not None:
        add_scaled_(total, regulariser_gradient_along(task, theta, v), 1.0)
    return total


Product = Callable[[Parameters], Parameters]
"""v ↦ G v on one batch."""


def gauss_newton_product(task: Functional, theta: Parameters, products: Iterable[Product], v: Parameters) -> Parameters:
    """Return G v, G = Σ_i c_i J_iᵀ ∇²ℓ(z_i) J_i + ∇²r: the Hessian without the curvature of the model itself."""
    total = {name: tensor.new_zeros(tensor.shape) for name, tensor in v.items()}
    for product in products:
        add_scaled_(total, product(v), 1.0)
    if task.task.regulariser is not None:
        add_scaled_(total, regulariser_gradient_along(task, theta, v), 1.0)
    return total


def gauss_newton_along(
    task: Functional, theta: Parameters, weights: Tensor, batch: Batch
) -> Callable[[Parameters, Tensor], Parameters]:
    """Return (v, d) ↦ G v + Σ_i d_i ∇ℓ_i: `gradient_along` with the outputs z(θ) linearised at θ."""
    z, pull, *_ = vjp(lambda theta: task.outputs(theta, batch), theta)
    slope = _output_slope(task, batch)

    def along(v: Parameters, d: Tensor) -> Parameters:
        moved = jvp(lambda theta: task.outputs(theta, batch), (theta,), (v,))[1]
        return pull(jvp(slope, (z, weights), (moved, d))[1])[0]  # type: ignore[no-any-return]

    return along


def gauss_newton_kept(task: Functional, theta: Parameters, part: Weighted) -> Product:
    """Return v ↦ G v for very many v: graphs are built once, and every product runs backward through them.

    ∇²ℓ is its own transpose.
    """
    z, pull, *_ = vjp(lambda theta: task.outputs(theta, part.batch), theta)
    push = transposed(pull, z)
    bend = vjp(lambda z: _output_slope(task, part.batch)(z, part.weights), z)[1]
    return lambda v: pull(bend(push(v)[0])[0])[0]


def transposed(pull: Callable[[Tensor], tuple[Parameters]], z: Tensor) -> Callable[[Parameters], tuple[Tensor]]:
    """Return v ↦ J v from u ↦ Jᵀu, which is linear in u. `z` is what J is the derivative of."""
    return vjp(lambda u: pull(u)[0], torch.zeros_like(z))[1]


def _output_slope(task: Functional, batch: Batch) -> Callable[[Tensor, Tensor], Tensor]:
    """Return (z, c) ↦ ∇_z Σ_i c_i ℓ_i(z)."""

    def slope(z: Tensor, weights: Tensor) -> Tensor:
        return grad(lambda z: (weights * task.output_losses(z, batch, len(weights))).sum())(z)  # type: ignore[no-any-return]

    return slope
