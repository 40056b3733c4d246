"""Wrap every interface of torch that torch may change without notice, one short function each.

All were seen to work with torch 2.11 and 2.13. A function says what happens where its interface is gone, if it can do
without. The others import a name or read an attribute that torch has had for many versions, and fail without it.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.jit._script import RecursiveScriptModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["Dropout", "TorchDispatchMode", "tree_map"]  # as they are

Dropout = _DropoutNd
"""The base of the dropout layers, which has the probability `p`."""


_outside: list[tuple[bool, list[SDPBackend]]] = []  # how attention was computed before `math_attention`, by level


@contextmanager
def math_attention() -> Iterator[None]:
    """Compute attention by plain matrix products for a while.

    Fused attention and the encoder's fast path have no rules for forward mode and `vmap`.
    """
    _outside.append((torch.backends.mha.get_fastpath_enabled(), _enabled_attention()))
    try:
        with _attention(False, [SDPBackend.MATH]):
            yield
    finally:
        _outside.pop()


@contextmanager
def users_attention() -> Iterator[None]:
    """Compute attention as the user's own code does, within `math_attention`, too."""
    if not _outside:
        yield
        return
    with _attention(*_outside[0]):
        yield


@contextmanager
def _attention(fast_path: bool, backends: list[SDPBackend]) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        with sdpa_kernel(backends):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _enabled_attention() -> list[SDPBackend]:
    """List the implementations of attention that torch may choose from."""
    switches = {
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    }
    return [backend for backend, is_enabled in switches.items() if is_enabled()]  # type: ignore[no-untyped-call]


def argument_of(operation: Any, name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return an argument of one of torch's operations as it was called; None if it has no such argument."""
    for position, argument in enumerate(operation._schema.arguments):
        if argument.name == name:
            value = given[position] if position < len(given) else named.get(name)
            return argument.default_value if value is None else value
    return None


def is_in_forward_mode() -> bool:
    """Return whether a level of forward mode is open; torch has one for the whole process.

    Without torch's counter the answer is yes, and a disturbance by another thread goes unnoticed.
    """
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def jvp_depth(default: int) -> int:
    """Return how many calls of `torch.func.jvp` are open in the process; the default where torch does not count."""
    return int(getattr(eager_transforms, "JVP_NESTING", default))


def leave_forward_mode() -> None:
    """Close every level of forward mode, because a forked child inherits the open levels of its parent's threads.

    If torch has no such counters, nothing is closed, and a child forked during a readout must not read out.
    """
    if hasattr(eager_transforms, "JVP_NESTING"):
        eager_transforms.JVP_NESTING = 0
    while getattr(forward_ad, "_current_level", -1) >= 0:
        forward_ad.exit_dual_level()


_unread: ContextVar[bool] = ContextVar("_unread", default=False)


@contextmanager
def without_values() -> Iterator[None]:
    """Have this thread read no numbers from tensors for a while: what it computes will be repeated with other numbers.

    It then counts as capturing a CUDA graph, so that models of transformers also leave out their checks of values.
    """
    token, ask = _unread.set(True), torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: _unread.get() or ask()
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = ask
        _unread.reset(token)


def has_values(tensor: Tensor) -> bool:
    """Return whether numbers can be read from a tensor: not in transforms, `without_values` or while a model is traced.

    Where torch does not tell transformed tensors, none has: checks of values are left out.
    """
    wrapped = getattr(torch._C._functorch, "is_functorch_wrapped_tensor", lambda tensor: True)
    return not wrapped(tensor) and not _unread.get() and not torch.compiler.is_compiling()


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors are the same view of the same values, without reading them."""
    if one.dtype != other.dtype or one.device != other.device or not (has_values(one) and has_values(other)):
        return False
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def abandon_capture(device: torch.device, pool: Any) -> None:
    """Have torch's allocator forget a CUDA graph whose capture failed.

    Torch forgets only those that end well. Without these functions, or where torch forgets it itself, nothing happens.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)


def is_scripted(model: nn.Module) -> bool:
    """Return whether a model was made by `torch.jit.script` or `torch.jit.trace`."""
    return isinstance(model, RecursiveScriptModule)


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has wrapped; the model itself where it has not.

    Where torch keeps it elsewhere, the names of parameters begin with those of the wrapper.
    """
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a model has batch normalisation of any kind."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def trains_batch_norm(model: nn.Module) -> bool:
    """Return whether some batch normalisation of a model uses the statistics of the batch."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def has_convolutions(model: nn.Module) -> bool:
    """Return whether a model has convolutions of any kind."""
    return any(isinstance(module, _ConvNd) for module in model.modules())


def own_parameters(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the table of a module's own parameters, without what a parametrisation computes."""
    return module._parameters  # type: ignore[return-value]


def own_buffers(module: nn.Module) -> MutableMapping[str, Tensor | None]:
    """Return the table of a module's own buffers, which may be written to."""
    return module._buffers


def unsaved_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that no state dict holds."""
    return module._non_persistent_buffers_set


def forward_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Return the table of a module's own forward hooks, which may be written to."""
    return module._forward_hooks


def forward_pre_hooks(module: nn.Module) -> MutableMapping[int, Any]:
    """Return the table of a module's own hooks before its forward pass."""
    return module._forward_pre_hooks


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether hooks change the gradient of a parameter."""
    return bool(parameter._backward_hooks)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place; tensors made in inference mode do not count."""
    return tensor._version
