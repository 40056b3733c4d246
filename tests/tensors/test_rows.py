"""Gradients of single examples in factors: what they multiply out to, and which layers have them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional as F

from imprint import Task
from imprint.task import Parameters
from imprint.tensors.rows import Rows, along, factorable, forward_along, gradients, orthonormal

N = 6


class Twice(nn.Module):
    """A layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.again(x).tanh()).tanh())  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.one(x).tanh()).tanh())  # type: ignore[no-any-return]


class Functional(nn.Module):
    """A layer whose weight is used by hand as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(self.first(x).tanh(), self.first.weight))  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """A layer that is never called: only its weight is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(x, self.first.weight, self.first.bias).tanh())  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """A layer on every one of three tokens, then one on their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.each(x).tanh().mean(1))  # type: ignore[no-any-return]


class Unused(nn.Module):
    """With a layer that does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)  # type: ignore[no-any-return]


def half_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))


def with_batch_norm() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
    model(torch.randn(50, 4))
    return model


Make = Callable[[], nn.Module]
CASES: dict[str, tuple[Make, tuple[int, ...], Any, tuple[str, ...]]] = {
    "network": (mlp, (4,), "*", ("0", "2")),
    "without bias": (lambda: mlp(False), (4,), "*", ("0", "2")),
    "layer norm in front": (lambda: nn.Sequential(nn.LayerNorm(4), mlp()), (4,), "*", ("1.0", "1.2")),
    "convolution in front": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(6, 3)),
        (1, 4),
        "*",
        ("3",),
    ),
    "batch norm": (with_batch_norm, (4,), "*", ("0", "3")),
    "a frozen layer": (half_frozen, (4,), "*", ("2", "4")),
    "one layer selected": (mlp, (4,), "2.*", ("2",)),
    "weights without their biases": (mlp, (4,), "*weight", ()),
    "one bias not selected": (mlp, (4,), ["0.*", "2.weight"], ("0",)),
    "biases alone": (mlp, (4,), "*bias", ()),
    "a layer used twice": (Twice, (4,), "*", ("last",)),
    "tied weights": (Tied, (4,), "*", ("last",)),
    "a weight used by hand too": (Functional, (4,), "*", ("last",)),
    "a weight used by hand only": (ByHand, (4,), "*", ("last",)),
    "sequences": (Sequences, (3, 4), "*", ("last",)),
    "no linear layer": (lambda: nn.Sequential(nn.Flatten(), nn.LayerNorm(3)), (3,), "*", ()),
    "a single layer": (lambda: nn.Linear(4, 3), (4,), "*", ("",)),
}
every_case = pytest.mark.parametrize(("make", "shape", "selected", "layers"), CASES.values(), ids=CASES.keys())


def problem(make: Make, shape: tuple[int, ...], selected: Any) -> tuple[Task, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    task = Task.classifier(make().double().eval(), parameters=selected)
    return task, (torch.randn(N, *shape, dtype=torch.float64), torch.randint(0, 3, (N,)))


def each(task: Task, data: tuple[Tensor, Tensor]) -> Parameters:
    """∇ℓ of every example by vmap."""
    functional, theta = task.at(task.state())

    def one(theta: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return functional.losses(theta, (x.unsqueeze(0), y.unsqueeze(0)), 1)[0]

    found: Parameters = vmap(grad(one), in_dims=(None, 0, 0))(theta, *data)
    return found


@every_case
def test_layers_with_single_products_are_found_and_multiply_out_to_the_gradients(
    make: Make, shape: tuple[int, ...], selected: Any, layers: tuple[str, ...]
) -> None:
    task, data = problem(make, shape, selected)
    functional, theta = task.at(task.state())
    assert factorable(functional, theta, data, N) == layers
    rows = gradients(functional.losses, theta, data, N, task, layers)
    found, expected = rows.multiplied_out(theta), each(task, data)
    assert list(found) == list(task.names)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_layer_without_any_gradient_is_no_obstacle() -> None:
    task, data = problem(Unused, (4,), "*")
    functional, theta = task.at(task.state())
    layers = factorable(functional, theta, data, N)
    assert layers == ("last",)
    found = gradients(functional.losses, theta, data, N, task, layers).multiplied_out(theta)
    assert not found["idle.weight"].any() and bool(found["last.weight"].any())


@every_case
def test_what_is_linear_in_rows_is_read_from_their_factors(
    make: Make, shape: tuple[int, ...], selected: Any, layers: tuple[str, ...]
) -> None:
    """Inner products with each other and with a basis, lengths, and forward derivatives along them."""
    task, data = problem(make, shape, selected)
    functional, theta = task.at(task.state())
    rows = gradients(functional.losses, theta, data, N, task, layers)
    full = torch.cat([t.flatten(1) for t in each(task, data).values()], 1)
    torch.testing.assert_close(rows.dots(rows[1:4], theta), full @ full[1:4].T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(rows.squares(theta), full.square().sum(1), rtol=1e-10, atol=1e-12)
    basis = {name: torch.randn(7, *p.shape, dtype=torch.float64) for name, p in theta.items()}
    directions = torch.cat([q.flatten(1) for q in basis.values()], 1)
    for at_once in (1, 4, 100):
        torch.testing.assert_close(along(rows, basis, at_once), full @ directions.T, rtol=1e-10, atol=1e-12)
    forward = forward_along(functional.losses, theta, data, N, task, rows)
    torch.testing.assert_close(forward, full @ full.T, rtol=1e-10, atol=1e-12)


def some_rows() -> tuple[Rows, Parameters]:
    """Rows with a part of every kind, on an orthonormal basis, and tensors like them."""
    like = {"0.weight": torch.empty(3, 4), "0.bias": torch.empty(3), "norm": torch.empty(5), "scale": torch.empty(())}
    size = sum(t.numel() for t in like.values())
    turned = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0][:6]
    pieces = torch.split(turned, [t.numel() for t in like.values()], 1)
    basis = {n: piece.reshape(6, *t.shape) for (n, t), piece in zip(like.items(), pieces, strict=True)}

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    dense = {"norm": normal(4, 5), "scale": normal(4)}
    return Rows({"0": normal(4, 4)}, {"0": normal(4, 3)}, dense, normal(4, 6), basis), like


def test_lengths_are_those_of_the_rows_in_full() -> None:
    rows, like = some_rows()
    full = torch.cat([t.reshape(4, -1) for t in rows.multiplied_out(like).values()], 1)
    seen = along(Rows(rows.inputs, rows.outputs, rows.dense), rows.basis)
    torch.testing.assert_close(rows.lengths(like, seen), full.norm(dim=1), rtol=1e-12, atol=0)


def test_a_rounded_basis_is_made_orthonormal_with_least_change() -> None:
    rows, _ = some_rows()
    rounded = {name: q.bfloat16().double() for name, q in rows.basis.items()}
    found, turn = orthonormal(rounded)
    flat, before = (torch.cat([q.reshape(6, -1) for q in basis.values()], 1) for basis in (found, rounded))
    torch.testing.assert_close(flat @ flat.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(turn @ before, flat, rtol=0, atol=1e-12)
    assert 1e-4 < float((flat - before).norm()) < 1e-2
    torch.testing.assert_close(flat @ before.T, (flat @ before.T).T, rtol=0, atol=1e-12)  # as of the nearest one


def test_rounded_rows_lose_nothing_when_they_are_kept() -> None:
    rows, _ = some_rows()
    plain = Rows(rows.inputs, rows.outputs, rows.dense).rounded(torch.bfloat16, -0.3)
    for tensor in plain.scaled(-0.3).tensors().values():
        torch.testing.assert_close(tensor.bfloat16().double(), tensor, rtol=1e-14, atol=0)
    torch.testing.assert_close(plain.outputs["0"], rows.outputs["0"], rtol=0.004, atol=0)


def test_rows_are_taken_apart_and_put_together_again() -> None:
    rows, like = some_rows()
    again = Rows.of(rows.tensors(), rows.basis)
    assert len(again) == len(rows) == 4 and len(rows[1:3]) == 2
    for name, tensor in rows.multiplied_out(like).items():
        assert torch.equal(again.multiplied_out(like)[name], tensor)
        torch.testing.assert_close(rows[1:3].multiplied_out(like)[name], tensor[1:3], rtol=1e-12, atol=1e-14)
    plain = Rows(rows.inputs, rows.outputs, rows.dense)
    joined = Rows.joined([plain[:1], plain[1:]])
    assert all(torch.equal(tensor, plain.tensors()[name]) for name, tensor in joined.tensors().items())


def test_multiplying_out_leaves_the_rows_as_they_were() -> None:
    """The bias moves by δ itself, and dense parts by what they are: neither may be added to in place."""
    rows, like = some_rows()
    before = {name: tensor.clone() for name, tensor in rows.tensors().items()}
    rows.multiplied_out(like)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rows.tensors().items())
