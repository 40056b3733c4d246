"""The checkpoints of a training run as complete states of the model."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint.errors import PlanError, TaskError
from imprint.task import Parameters, Task

State = Mapping[str, Tensor] | str | os.PathLike[str]


class States:
    """Checkpoints given as state dicts or .safetensors files, each read and put on the device when it is its turn."""

    def __init__(self, task: Task, checkpoints: Sequence[State] | None) -> None:
        if isinstance(checkpoints, Mapping | str | os.PathLike | nn.Module):
            raise PlanError("checkpoints must be a list: for one checkpoint, give a list of one.")
        if checkpoints is not None and not isinstance(checkpoints, Iterable):
            hint = ": give its .paths" if hasattr(checkpoints, "paths") else ""
            raise PlanError(
                f"checkpoints must be a list of state dicts or .safetensors files, not of type "
                f"{type(checkpoints).__name__}{hint}."
            )
        checkpoints = None if checkpoints is None else list(checkpoints)
        if checkpoints is not None and len(checkpoints) == 0:
            raise PlanError(
                "checkpoints is empty: leave it out to take the model as it is. (The paths of a Recorder are empty "
                "where none of its moments was reached, or it was never called.)"
            )
        self._task = task
        self._checkpoints: Sequence[State] = checkpoints if checkpoints is not None else [task.state()]

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __getitem__(self, index: int) -> Parameters:
        given = self._checkpoints[index]
        if isinstance(given, str | os.PathLike):
            if not Path(given).is_file():
                raise TaskError(f"checkpoint file {given} does not exist.")
            try:
                given = load_file(given)
            except (OSError, SafetensorError) as error:
                raise TaskError(
                    f"checkpoint file {given} cannot be read as safetensors: {error}. (What torch.save wrote is not "
                    "taken: load it and give the state dict.)"
                ) from error
        if not isinstance(given, Mapping):
            hint = ": give its state_dict()" if isinstance(given, nn.Module) else ""
            raise TaskError(
                f"checkpoint {index} has type {type(given).__name__}, where a state dict or the path of a "
                f".safetensors file is needed{hint}."
            )
        return self._task.complete(given)
