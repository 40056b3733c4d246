"""Differentiate linear layers of a single query in forward mode, at the speed of reading the imprints.

The derivative of W x along a stack of displacements is dW x for each of them. `vmap` makes that a batched product with
transposed matrices, which on a CPU takes two to three times as long as reading them; with the matrix on the left, in
the order it has in memory, it takes no longer. Only speed depends on this module.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class FastLinear(TorchFunctionMode):
    """Have `F.linear` of a single row take its forward-mode derivative by dW x while this mode is active."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.linear or kwargs or args[1].dim() != 2 or args[0].shape[:-1].numel() != 1:
            return func(*args, **(kwargs or {}))
        return _linear(*args)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x, dx = unpack_dual(x)
    weight, dweight = unpack_dual(weight)
    bias, dbias = unpack_dual(bias) if bias is not None else (None, None)
    out = F.linear(x, weight, bias)
    terms = [] if dbias is None else [dbias]
    if dx is not None:
        terms.append(F.linear(dx, weight))
    if dweight is not None:
        column = x.reshape(1, -1).T  # strided as it is: the batched product is fast for this layout only
        terms.append(torch.bmm(dweight.unsqueeze(0), column.unsqueeze(0)).reshape(out.shape))
    if not terms:
        return out
    dual: Tensor = make_dual(out, sum(terms[1:], terms[0]).expand(out.shape))
    return dual
