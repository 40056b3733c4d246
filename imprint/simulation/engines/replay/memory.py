"""What an optimiser remembers, as tensors by name and a text, so that a snapshot can keep it."""

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from imprint.task import Parameters


def pack(optimiser: Optimizer, parameters: Mapping[str, Tensor]) -> tuple[Parameters, str]:
    """Return the tensors that an optimiser remembers, and a text that says where they belong.

    A memory of other things than numbers, texts, tensors and containers of them raises TypeError.
    """
    tensors: Parameters = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            name = f"memory/{len(tensors)}"
            tensors[name] = value.detach()
            return {"tensor": [name, value.device.type]}
        if isinstance(value, list | tuple):
            return {"list": [plain(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[key, plain(item)] for key, item in value.items()]}
        if value is None or isinstance(value, bool | int | float | str):
            return {"value": value}
        raise TypeError(f"the optimiser remembers a {type(value).__name__}")

    memory = {name: plain(optimiser.state[p]) for name, p in parameters.items() if p in optimiser.state}
    return tensors, json.dumps(memory)


def unpack_(optimiser: Optimizer, parameters: Mapping[str, Tensor], tensors: Parameters, text: str) -> None:
    """Let an optimiser remember what was packed; anything that was not packed raises KeyError or ValueError."""

    def value_of(packed: dict[str, Any]) -> Any:
        ((kind, content),) = packed.items()
        if kind == "tensor":
            name, device = content
            return tensors[name].cpu() if device == "cpu" else tensors[name]  # step counts are on the CPU in general
        if kind == "list":
            return [value_of(item) for item in content]
        if kind == "dict":
            return {key: value_of(item) for key, item in content}
        return content

    memory = {parameters[name]: value_of(packed) for name, packed in json.loads(text).items()}
    optimiser.state.update(memory)
