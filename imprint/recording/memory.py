"""What an optimiser remembers between steps: taken from it, packed as tensors and a text, and given back.

Checkpoints of a recording keep it, and so do the snapshots of a replay.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Size, Tensor
from torch.optim import Optimizer

from imprint.errors import PlanError, StoreError
from imprint.recording.records import OptimiserState
from imprint.recording.settings import plain
from imprint.store.values import Value, parsed

_COUNT = "step"  # of each parameter, a tensor that torch keeps on the CPU unless the optimiser wants it elsewhere


def take_memory(optimiser: Optimizer, parameters: Mapping[str, Tensor]) -> OptimiserState:
    """Return what an optimiser remembers about each of some parameters, in their order. Tensors are its own."""
    found = {id(parameter): state for parameter, state in optimiser.state.items()}
    known = {id(parameter) for group in optimiser.param_groups for parameter in group["params"]}
    if not found.keys() <= known or not all(isinstance(key, str) for state in found.values() for key in state):
        raise PlanError(
            f"the optimiser, {type(optimiser).__name__}, remembers something that belongs to no parameter, which a "
            "recording cannot keep."
        )
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, parameter in parameters.items():
        for key, value in sorted(found.get(id(parameter), {}).items()):
            (tensors if isinstance(value, Tensor) else numbers).setdefault(name, {})[key] = value
    return OptimiserState(tensors, numbers)


def give_memory(optimiser: Optimizer, parameters: Mapping[str, Tensor], state: OptimiserState) -> None:
    """Have an optimiser remember about some parameters what a state says, and nothing else.

    Tensors are copied to the device of their parameter and keep their dtype; counts of steps stay where torch wants
    them.
    """
    on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimiser.param_groups
        for parameter in group["params"]
    }

    def move(key: str, value: Any, parameter: Tensor) -> Any:
        if isinstance(value, list):
            return [move(key, item, parameter) for item in value]
        if not isinstance(value, Tensor):
            return value
        stays = key == _COUNT and not on_device[id(parameter)]
        return value.clone() if stays else value.to(parameter.device, copy=True)

    optimiser.state.clear()
    for name, parameter in parameters.items():
        found = {**state.numbers.get(name, {}), **state.tensors.get(name, {})}
        if found:
            optimiser.state[parameter] = {key: move(key, value, parameter) for key, value in found.items()}


def stack_memory(state: OptimiserState, shapes: Mapping[str, Size], rows: int) -> OptimiserState:
    """Return the memory of an optimiser of so many rows of parameters, each of which remembers the same.

    shapes: of the parameters, one row of them. What has another shape than its parameter raises NotImplementedError.
    """

    def stack(name: str, key: str, value: Tensor) -> Tensor:
        if key == _COUNT or (value.dim() == 0 and shapes[name]):
            return value
        if value.shape != shapes[name]:
            raise NotImplementedError(f"the optimiser keeps {key!r} in another shape than its parameters")
        return value.expand(rows, *value.shape)

    return OptimiserState(
        {name: {k: stack(name, k, value) for k, value in own.items()} for name, own in state.tensors.items()},
        state.numbers,
    )


def pack_memory(state: OptimiserState) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a state under short names, and a text that says which is which."""
    tensors: dict[str, Tensor] = {}

    def name(tensor: Tensor) -> str:
        tensors[str(len(tensors))] = tensor.detach()
        return str(len(tensors) - 1)

    about: dict[str, Any] = {"tensors": {}, "numbers": {}}
    for parameter, values in state.tensors.items():
        about["tensors"][parameter] = {key: name(tensor) for key, tensor in values.items()}
    for parameter, others in state.numbers.items():
        for key, value in others.items():
            what = f"what the optimiser remembers of {parameter!r} as {key!r}"
            about["numbers"].setdefault(parameter, {})[key] = _describe(value, name, what)
    return tensors, json.dumps(about, sort_keys=True, allow_nan=False)


def _describe(value: Any, name: Callable[[Tensor], str], what: str) -> Any:
    """Return a plain value, or lists of tensors (such as those of LBFGS), as a structure of JSON."""
    if isinstance(value, Tensor):
        return {"tensor": name(value)}
    if isinstance(value, list | tuple):
        return {"list": [_describe(item, name, what) for item in value]}
    return {"value": plain(value, what)}


def unpack_memory(tensors: Mapping[str, Tensor], text: str, known: Collection[str], place: Path) -> OptimiserState:
    """Return the state that `pack_memory` packed, of parameters that are known; refuse anything else.

    place: the file that it comes from, for messages.
    """
    value = parsed(text.encode(), place).record("tensors", "numbers")

    def find(reference: Any) -> Tensor:
        if not isinstance(reference, str) or reference not in tensors:
            raise StoreError(f"{place} cannot be read: it names a tensor that it does not have.")
        return tensors[reference]

    def each(part: str) -> dict[str, dict[str, Value]]:
        found = {name: values.mapping() for name, values in value[part].mapping().items()}
        if unknown := sorted(found.keys() - set(known)):
            raise StoreError(f"{place} does not fit the recording: it is about an unknown parameter {unknown[0]!r}.")
        return found

    return OptimiserState(
        {name: {key: find(item.content) for key, item in values.items()} for name, values in each("tensors").items()},
        {name: {key: _rebuild(item, find) for key, item in values.items()} for name, values in each("numbers").items()},
    )


def _rebuild(value: Value, find: Callable[[Any], Tensor]) -> Any:
    items = list(value.mapping().items())
    if len(items) != 1 or items[0][0] not in ("tensor", "list", "value"):
        value.refuse("a tensor, a list or a value")
    kind, content = items[0]
    if kind == "list":
        return [_rebuild(item, find) for item in content.items()]
    return find(content.content) if kind == "tensor" else content.content
