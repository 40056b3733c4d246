"""How much memory a computation may take, and how much it would."""

import os
import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from imprint.errors import PlanError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def budget(memory: int | str | None, device: torch.device) -> int:
    """Bytes that may be used: a number, a text such as "2GiB", or by default a share of what is free.

    >>> budget("1.5GiB", torch.device("cpu"))
    1610612736
    """
    if memory is None:
        if device.type == "cuda":
            return int(0.5 * torch.cuda.mem_get_info(device)[0])
        return int(0.25 * _free())
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match is None or match[2] not in _UNITS:
            raise PlanError(f'memory must be a number of bytes or a text such as "2GiB", got {memory!r}.')
        memory = int(float(match[1]) * _UNITS[match[2]])
    if memory <= 0:
        raise PlanError(f"memory must be positive, got {memory}.")
    return memory


def _free() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not told on this platform
        return 4 << 30


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of a dictionary of tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


def activation_bytes(function: Callable[[Mapping[str, Tensor]], Tensor], parameters: Mapping[str, Tensor]) -> int:
    """What reverse mode keeps of one evaluation of `function` besides the parameters themselves."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in parameters.items()}
    known = {tensor.untyped_storage().data_ptr() for tensor in leaves.values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(leaves)
    return sum(kept.values())
