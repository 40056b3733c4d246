"""The checkpoints of a training run as complete states of the model, and the second moments that came with them."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint.errors import PlanError, TaskError
from imprint.plan import Checkpoints, State
from imprint.recorder import MOMENTS, moments_beside
from imprint.simulation.state_files import load_state
from imprint.simulation.trainer_moments import read_moments
from imprint.task import Parameters, Task

logger = logging.getLogger(__name__)


class States:
    """Checkpoints given as state dicts, files or a Trainer's folders, each read when it is its turn.

    runs: the training run that each is of, counted from 0. Checkpoints of several runs come as one list for each run.
    """

    def __init__(self, task: Task, checkpoints: Checkpoints | None) -> None:
        if isinstance(checkpoints, Mapping | str | os.PathLike | nn.Module):
            raise PlanError("checkpoints must be a list: for one checkpoint, give a list of one.")
        if checkpoints is not None and not isinstance(checkpoints, Iterable):
            raise PlanError(
                f"checkpoints must be a list of state dicts or files, not of type "
                f"{type(checkpoints).__name__}{_hint_at_paths(checkpoints)}."
            )
        given, self.runs = flatten([task.complete(task.tensors())] if checkpoints is None else list(checkpoints))
        if not given:
            raise PlanError(
                "checkpoints is empty: leave it out to take the model as it is. (The paths of a Recorder are empty "
                "where none of its moments was reached, or it was never called.)"
            )
        for index, each in enumerate(given):
            if isinstance(each, tuple) and len(each) != 2:
                raise PlanError(
                    f"checkpoint {index} is a tuple of {len(each)}, where a pair (checkpoint, second moments) may be; "
                    "the checkpoints of one of several runs are a list."
                )
        self._task = task
        self._warned = False  # that second moments are lacking: once, at the first checkpoint
        self._checkpoints: Sequence[State] = given

    def __len__(self) -> int:
        return len(self._checkpoints)

    def __getitem__(self, index: int) -> Parameters:
        given = self._checkpoints[index]
        state = given[0] if isinstance(given, tuple) else given
        if isinstance(state, str | os.PathLike):
            if Path(state).name.endswith(MOMENTS):
                raise TaskError(
                    f"{state} holds the second moments of a checkpoint, not its weights: give the checkpoint beside it."
                )
            state = load_state(state)
        if not isinstance(state, Mapping):
            hint = ": give its state_dict()" if isinstance(state, nn.Module) else _hint_at_paths(state)
            raise TaskError(
                f"checkpoint {index} has type {type(state).__name__}, where a state dict or the path of a "
                f".safetensors file or a Trainer's checkpoint folder is needed{hint}."
            )
        return self._task.complete(state)

    def moments(self, index: int) -> Parameters | None:
        """Return the second moments that came with a checkpoint, or lie beside its file."""
        given = self._checkpoints[index]
        if isinstance(given, tuple):
            found = load_state(given[1], "second moments") if isinstance(given[1], str | os.PathLike) else given[1]
            if not isinstance(found, Mapping):
                raise TaskError(
                    f"the second moments of checkpoint {index} have type {type(found).__name__}, where a dict by "
                    "parameter or the path of a .safetensors file is needed."
                )
            if lacking := self._name_lacking(found):
                raise TaskError(
                    f"the second moments of checkpoint {index} lack {lacking}: every selected parameter needs its own. "
                    "Give the checkpoint alone to have them estimated."
                )
        else:
            recorded = self._find_recorded(given)
            if recorded is None:
                return None
            found = recorded
        return {name: self._checked(index, name, found[name]) for name in self._task.names}

    def _find_recorded(self, given: object) -> Mapping[str, Tensor] | None:
        """Read the moments that lie beside a file or in a Trainer's folder; None where some of them are lacking."""
        if not isinstance(given, str | os.PathLike):
            return None
        place = Path(given) if Path(given).is_dir() else moments_beside(Path(given))
        if not place.exists():
            return None
        found = read_moments(place, self._task) if place.is_dir() else load_state(place, "second moments")
        if found is None or not (lacking := self._name_lacking(found)):
            return found
        if not self._warned:
            logger.warning("%s has no second moments of %s: those of all parameters are estimated", place, lacking)
        self._warned = True
        return None

    def _name_lacking(self, moments: Mapping[str, Tensor]) -> str:
        """Name the first selected parameter without moments, and how many others there are."""
        lacking = [name for name in self._task.names if name not in moments]
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return f"parameter {lacking[0]!r}{more}" if lacking else ""

    def _checked(self, index: int, name: str, moments: Tensor) -> Tensor:
        """Return the second moments of a parameter on its device, in its precision or a finer one."""
        parameter = self._task.model.get_parameter(name)
        if not isinstance(moments, Tensor) or moments.shape != parameter.shape or not moments.is_floating_point():
            found = tuple(moments.shape) if isinstance(moments, Tensor) else type(moments).__name__
            raise TaskError(
                f"the second moments of parameter {name!r} at checkpoint {index} must be real numbers of "
                f"shape {tuple(parameter.shape)}, got {found}."
            )
        if not bool((moments.isfinite() & (moments >= 0)).all()):
            raise TaskError(
                f"the second moments of parameter {name!r} at checkpoint {index} are not all finite and at least 0: "
                "they are means of squared gradients."
            )
        return moments.detach().to(parameter.device, torch.promote_types(parameter.dtype, torch.float32), copy=True)


def flatten(checkpoints: Sequence[Any]) -> tuple[list[State], tuple[int, ...]]:
    """Return the checkpoints of all runs one after the other, and the number of the run that each is of."""
    lists = [isinstance(each, list) for each in checkpoints]
    if not any(lists):
        return list(checkpoints), (0,) * len(checkpoints)
    if not all(lists):
        raise PlanError(
            f"number {lists.index(False)} of the checkpoints is no list, and others are: give the checkpoints of one "
            "run, or one list for each run."
        )
    for run, each in enumerate(checkpoints):
        if not each:
            raise PlanError(f"training run {run} has no checkpoints: leave it out.")
    numbers = (run for run, each in enumerate(checkpoints) for _ in each)
    return [state for each in checkpoints for state in each], tuple(numbers)


def _hint_at_paths(given: Any) -> str:
    return ": give its .paths" if hasattr(given, "paths") else ""
