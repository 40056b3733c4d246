"""What a snapshot keeps of an optimiser in the middle of a replay, so that an interrupted one goes on to the bit."""

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from imprint.errors import PlanError
from imprint.recording.memory import give_memory, pack_memory, take_memory, unpack_memory
from imprint.recording.settings import describe_groups, restore_groups
from imprint.store.values import Value, parsed
from imprint.task import Parameters

_PLACE = Path("a snapshot")  # for messages


class Trained(Protocol):
    """A training that is under way, of one model or of a stack of rows."""

    @property
    def optimiser(self) -> Optimizer: ...
    @property
    def parameters(self) -> Mapping[str, Tensor]: ...


def pack_optimiser(trained: Trained) -> tuple[Parameters, str]:
    """Return what an optimiser remembers, as tensors and a text; PlanError if it remembers what these cannot hold.

    The settings of its groups belong to it, and the attributes of an optimiser of the user's: it may change both in its
    own steps.
    """
    tensors, memory = pack_memory(take_memory(trained.optimiser, trained.parameters))
    own = {name: _write(trained.optimiser, name, value) for name, value in _list_attributes(trained.optimiser).items()}
    about = {"memory": memory, "settings": describe_groups(trained.optimiser), "attributes": own}
    return tensors, json.dumps(about, allow_nan=False)


def restore_optimiser(trained: Trained, tensors: Mapping[str, Tensor], text: str) -> None:
    """Let an optimiser remember what was packed; StoreError if that is of another one."""
    about = parsed(text.encode(), _PLACE).record("memory", "settings", "attributes")
    memory = unpack_memory(tensors, about["memory"].text(), trained.parameters.keys(), _PLACE)
    settings = [group.mapping() for group in about["settings"].items()]
    if len(settings) != len(trained.optimiser.param_groups):
        about["settings"].refuse(f"settings of {len(trained.optimiser.param_groups)} parameter groups")
    restore_groups(trained.optimiser, [{name: value.content for name, value in group.items()} for group in settings])
    give_memory(trained.optimiser, trained.parameters, memory)
    for name, value in about["attributes"].mapping().items():
        vars(trained.optimiser)[name] = _read(value)


def _list_attributes(optimiser: Optimizer) -> dict[str, Any]:
    """Return the attributes that an optimiser of the user's has beside those of torch's."""
    if type(optimiser).__module__.startswith("torch.optim"):
        return {}
    usual = vars(torch.optim.SGD([torch.zeros(1)]))
    return {name: value for name, value in vars(optimiser).items() if name not in usual}


def _read(value: Value) -> Any:
    """Return an attribute from its literal."""
    try:
        return ast.literal_eval(value.text())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value.refuse("a literal of Python")


def _write(optimiser: Optimizer, name: str, value: Any) -> str:
    """Return an attribute as a literal of Python, of numbers, texts and lists and tuples and dicts of them."""
    text = repr(value)
    try:
        if type(ast.literal_eval(text)) is type(value) and ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    raise PlanError(f"{type(optimiser).__name__} has an attribute {name!r} that a snapshot cannot keep.")
