"""Gradient checkpointing that holds for swapped parameters: blocks keep their inputs and are computed again backwards.

What transformers does by itself would be wrong here: it is for training mode only, and it computes a block again when
`functional_call` has already put the model's own parameters back. So the parameters of the forward pass go along.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from imprint.errors import TaskError
from imprint.model.dropout import applies_dropout


@contextmanager
def checkpointing(blocks: Sequence[nn.Module]) -> Iterator[None]:
    """Have these blocks keep nothing but their inputs for a backward pass, for a while.

    Plain autograd supports this. The transforms of torch.func raise an error, so that sources run one by one.
    """
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = _recompute(block, block.forward)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            if own is None:
                del block.forward
            else:  # one that a library has put there
                block.forward = own


def _recompute(block: nn.Module, forward: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if applies_dropout(block):  # by hooks that are gone when it is computed again
            raise TaskError(
                "the model's gradient checkpointing computes blocks again without the dropout that Plan(dropout=True) "
                "has drawn for them: model.gradient_checkpointing_disable() turns it off."
            )
        tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        try:
            return checkpoint(run, tensors, args, kwargs, use_reentrant=False)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise RuntimeError(
                "the model's gradient checkpointing takes plain autograd only: model.gradient_checkpointing_disable() "
                "turns it off"
            ) from error

    def run(tensors: dict[str, Any], args: Any, kwargs: Any) -> Any:
        return functional_call(_Bare(forward, block), {f"block.{name}": t for name, t in tensors.items()}, args, kwargs)

    return call


class _Bare(nn.Module):
    """A block's own forward, as a module whose parameters can be swapped."""

    def __init__(self, forward: Any, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)
