"""Refuses, by name, models that would fail later with an obscure error inside torch."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from imprint.compat import is_scripted, own_parameters
from imprint.errors import TaskError


def refuse_unsupported(model: nn.Module) -> None:
    """Refuse scripted models, uninitialised or 8-bit values, and sparse gradients."""
    if not isinstance(model, nn.Module):
        raise TaskError(f"a task's model must be a torch.nn.Module, got a {type(model).__name__}.")
    if is_scripted(model):
        raise TaskError(
            "the model was scripted by torch.jit, so its parameters cannot be replaced by name: give the nn.Module it "
            "was scripted from."
        )
    for name, module in model.named_modules():
        weight = dict(own_parameters(module)).get("weight")  # not the attribute, which a parametrisation computes
        if getattr(module, "sparse", False) is True and isinstance(weight, Tensor) and weight.requires_grad:
            raise TaskError(
                f"module {name!r} ({type(module).__name__}) has sparse gradients, which cannot be simulated: set "
                "sparse=False on it; its outputs stay the same."
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _refuse_tensor(name, tensor)


def _refuse_tensor(name: str, tensor: Tensor) -> None:
    if is_lazy(tensor):
        raise TaskError(f"{name!r} is lazy and has no values yet: run the model once on a batch, then build the task.")
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        raise TaskError(
            f"{name!r} has dtype {str(tensor.dtype).removeprefix('torch.')}, in which torch does not compute: convert "
            "the model first, with model.float() or model.bfloat16()."
        )
    if tensor.dtype == torch.complex128:
        raise TaskError(f"{name!r} is complex128, which a store cannot hold: use complex64, or pairs of real numbers.")
