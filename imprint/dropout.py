"""Dropout that seeds decide, for models in evaluation mode: the same draw again wherever it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

_TOGETHER: dict[type[nn.Module], int] = {  # how many of the last dimensions are dropped or kept together
    nn.Dropout: 0,
    nn.Dropout1d: 1,
    nn.Dropout2d: 2,
    nn.Dropout3d: 3,
}


def dropouts(model: nn.Module) -> list[_DropoutNd]:
    """The modules of a model that drop something in training."""
    found = (module for module in model.modules() if isinstance(module, _DropoutNd))
    return [module for module in found if type(module) in _TOGETHER and 0 < module.p < 1]


@contextmanager
def dropping(model: nn.Module, noise: tuple[int, ...] | None) -> Iterator[None]:
    """For a while the model's dropout modules drop what the seeds say, each in its turn; with None, nothing.

    Under `vmap`, which needs randomness="same" for it, all rows drop the same.
    """
    if noise is None:
        yield
        return
    seed = int(np.random.SeedSequence(noise).generate_state(1, np.uint64)[0] >> np.uint64(1))
    draws: dict[torch.device, torch.Generator] = {}  # drawn where they are used: a transfer would take far longer

    def hook(module: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        assert isinstance(module, _DropoutNd)
        alone = output.shape[: output.dim() - _TOGETHER[type(module)]]
        if output.device not in draws:
            draws[output.device] = torch.Generator(output.device).manual_seed(seed)
        kept = torch.rand(alone, generator=draws[output.device], device=output.device) >= module.p
        return output * kept.reshape(*alone, *[1] * (output.dim() - len(alone))) / (1 - module.p)

    handles = [module.register_forward_hook(hook) for module in dropouts(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
