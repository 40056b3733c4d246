"""Dropout that seeds decide, for models in evaluation mode: the same draw again wherever it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imprint.compat import Dropout, forward_hooks

_TOGETHER: dict[type[nn.Module], int] = {  # how many of the last dimensions are dropped or kept together
    nn.Dropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}

_BLOCK = 32  # rows that are drawn together


def dropouts(model: nn.Module) -> list[Dropout]:
    """The modules of a model that drop something in training."""
    found = (module for module in model.modules() if isinstance(module, Dropout))
    return [module for module in found if type(module) in _TOGETHER and 0 < module.p < 1]


def draws(module: nn.Module) -> bool:
    """Whether some part of a module is `dropping` now."""
    return any(isinstance(hook, _Draw) for part in module.modules() for hook in forward_hooks(part).values())


@contextmanager
def dropping(model: nn.Module, noise: tuple[int, ...] | None) -> Iterator[None]:
    """For a while the model's dropout modules drop what the seeds say, each in its turn; with None, nothing.

    Under `vmap`, which needs randomness="same" for it, all rows drop the same.
    """
    if noise is None:
        yield
        return
    handles = [module.register_forward_hook(_Draw((*noise, n))) for n, module in enumerate(dropouts(model))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Draw:
    """What one module drops, by its own stream of random numbers, drawn where it is used.

    A draw is for whole blocks of rows: what an example drops does not depend on how many others come after it.
    """

    def __init__(self, noise: tuple[int, ...]) -> None:
        self._seed = int(np.random.SeedSequence(noise).generate_state(1, np.uint64)[0] >> np.uint64(1))
        self._stream: torch.Generator | None = None

    def __call__(self, module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(module, Dropout)
        rows, *others = output.shape[: output.dim() - _TOGETHER[type(module)]]
        if self._stream is None:
            self._stream = torch.Generator(output.device).manual_seed(self._seed)
        drawn = torch.rand(-(-rows // _BLOCK) * _BLOCK, *others, generator=self._stream, device=output.device)[:rows]
        kept = drawn.reshape(*drawn.shape, *[1] * (output.dim() - drawn.dim())) >= module.p
        return output * kept / (1 - module.p)
