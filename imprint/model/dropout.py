"""Applies dropout from seeds to models in evaluation mode, so that the same seeds always drop the same values."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from imprint.compat import Dropout, forward_hooks

_TOGETHER: dict[type[nn.Module], int] = {  # how many trailing dimensions share one decision
    nn.Dropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}

_BLOCK = 32  # rows drawn together


def dropouts(model: nn.Module) -> list[Dropout]:
    """List the modules of a model that drop values in training."""
    found = (module for module in model.modules() if isinstance(module, Dropout))
    return [module for module in found if type(module) in _TOGETHER and 0 < module.p < 1]


def applies_dropout(module: nn.Module) -> bool:
    """Tell whether `apply_dropout` is active on some part of a module."""
    return any(isinstance(hook, _Draw) for part in module.modules() for hook in forward_hooks(part).values())


@contextmanager
def apply_dropout(model: nn.Module, noise: tuple[int, ...] | None) -> Iterator[None]:
    """Make the model's dropout modules drop values drawn from the seeds `noise`; with None, nothing is dropped.

    Under `vmap`, which then needs randomness="same", all rows drop the same values.
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
    """Drops values of one module, drawn from a random stream of its own on the device of the values.

    Whole blocks of rows are drawn at once, so an example's dropout does not depend on how many others follow it.
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
