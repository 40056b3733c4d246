"""What a snapshot keeps of an optimiser in the middle of a replay, so that an interrupted one goes on to the bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from imprint.recording.memory import give_memory, pack_memory, take_memory, unpack_memory
from imprint.recording.settings import describe_groups, restore_groups
from imprint.store.values import parsed
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

    The settings of its groups belong to it: an optimiser may adapt them in its own steps.
    """
    tensors, memory = pack_memory(take_memory(trained.optimiser, trained.parameters))
    about = {"memory": memory, "settings": describe_groups(trained.optimiser)}
    return tensors, json.dumps(about, allow_nan=False)


def restore_optimiser(trained: Trained, tensors: Mapping[str, Tensor], text: str) -> None:
    """Let an optimiser remember what was packed; StoreError if that is of another one."""
    about = parsed(text.encode(), _PLACE).record("memory", "settings")
    memory = unpack_memory(tensors, about["memory"].text(), trained.parameters.keys(), _PLACE)
    settings = [group.mapping() for group in about["settings"].items()]
    if len(settings) != len(trained.optimiser.param_groups):
        about["settings"].refuse(f"settings of {len(trained.optimiser.param_groups)} parameter groups")
    restore_groups(trained.optimiser, [{name: value.content for name, value in group.items()} for group in settings])
    give_memory(trained.optimiser, trained.parameters, memory)
