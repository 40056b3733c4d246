"""The fast linear layer gives what torch's own gives, value and derivative."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn import functional as F

from imprint.tensors.linear import FastLinear


@pytest.mark.parametrize("rows", [(1,), (1, 1), (), (3,)], ids=["one row", "one token", "a vector", "several rows"])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("of_input", [True, False], ids=["x moves", "x is fixed"])
def test_derivatives_are_those_of_torch(rows: tuple[int, ...], has_bias: bool, of_input: bool) -> None:
    weight, bias, x = torch.randn(4, 5).double(), torch.randn(4).double(), torch.randn(*rows, 5).double()
    stack = tuple(torch.randn(7, *t.shape).double() for t in (weight, bias, x))

    def layer(weight: Tensor, bias: Tensor, moving: Tensor) -> Tensor:
        return F.linear(moving if of_input else x, weight, bias if has_bias else None).tanh()

    def along(*directions: Tensor) -> tuple[Tensor, Tensor]:
        return jvp(layer, (weight, bias, x), directions)  # type: ignore[return-value]

    expected = vmap(along)(*stack)
    with FastLinear():
        found = vmap(along)(*stack)
        alone = along(*(t[0] for t in stack))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(alone, tuple(t[0] for t in expected), rtol=1e-12, atol=1e-12)


def test_layers_outside_a_derivative_are_left_alone() -> None:
    x, weight = torch.randn(1, 5), torch.randn(4, 5)
    with FastLinear():
        assert torch.equal(F.linear(x, weight), F.linear(x, weight, bias=None))
    torch.testing.assert_close(F.linear(x, weight), x @ weight.T)
