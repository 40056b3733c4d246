"""An optimiser as plain values: its class by name, and the settings of its parameter groups."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from imprint.errors import PlanError, StoreError
from imprint.recording.records import Settings

_STRUCTURE = ("params", "param_names")  # which parameters a group has is recorded once, not with its settings
_TORCH = "torch.optim."


def describe_groups(optimiser: Optimizer) -> tuple[Settings, ...]:
    """Return the settings of each parameter group as plain JSON values; refuse by its name what JSON cannot keep.

    >>> describe_groups(torch.optim.SGD([torch.zeros(2)], lr=torch.tensor(0.5)))[0]["lr"]
    0.5
    """
    return tuple(
        {
            name: plain(value, f"setting {name!r} of the optimiser's parameter group {index}")
            for name, value in group.items()
            if name not in _STRUCTURE
        }
        for index, group in enumerate(optimiser.param_groups)
    )


def find_changes(before: Sequence[Settings], now: Sequence[Settings]) -> tuple[Settings, ...]:
    """Return the settings of each group that are new or other ones.

    >>> find_changes([{"lr": 0.1, "d": 1.0}], [{"lr": 0.1, "d": 2.0, "k": 1}])
    ({'d': 2.0, 'k': 1},)
    """
    missing = object()
    return tuple(
        {name: value for name, value in new.items() if old.get(name, missing) != value}
        for old, new in zip(before, now, strict=True)
    )


def restore_groups(optimiser: Optimizer, settings: Sequence[Settings]) -> None:
    """Give the parameter groups of an optimiser the settings that `describe_groups` has returned."""
    for group, known in zip(optimiser.param_groups, settings, strict=True):
        for name, value in known.items():
            if isinstance(before := group.get(name), Tensor):  # such as a learning rate in a CUDA graph
                before.fill_(value)
            else:
                group[name] = tuple(value) if isinstance(before, tuple) else value


def describe_scheduler(scheduler: Any) -> dict[str, Any] | None:
    """Return what JSON can keep of a scheduler's state; the rest is what it was made with."""
    if scheduler is None:
        return None
    found: dict[str, Any] = {}
    for name, value in scheduler.state_dict().items():
        try:
            found[name] = plain(value, name)
        except PlanError:
            continue
    return found


def plain(value: Any, what: str) -> Any:
    """Return a value as JSON keeps it: tuples as lists, tensors and arrays of one number as that number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return _require(int(value), abs(value) < 2**63, value, what)
    if isinstance(value, float):
        return _require(float(value), math.isfinite(value), value, what)
    if isinstance(value, list | tuple):
        return [plain(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, what) for key, item in value.items()}
    return _require(None, False, value, what)


def _require(value: Any, holds: bool, given: Any, what: str) -> Any:
    if not holds:
        shown = repr(given) if isinstance(given, int | float) else f"a {type(given).__name__}"
        raise PlanError(
            f"{what} is {shown}, which a recording cannot keep: it takes finite numbers, texts, true or false, None, "
            "and lists and dicts of these."
        )
    return value


def name_class(kind: type[Optimizer]) -> str:
    """Return the name under which a recording knows the class of an optimiser.

    >>> name_class(torch.optim.AdamW)
    'torch.optim.AdamW'
    """
    if getattr(torch.optim, kind.__name__, None) is kind:
        return f"{_TORCH}{kind.__name__}"
    return f"{kind.__module__}.{kind.__qualname__}"


def find_class(name: str, given: type[Optimizer] | None) -> type[Optimizer]:
    """Return the class of a recorded optimiser: one of torch.optim by its name, any other as it was given.

    Nothing that a file names is imported.
    """
    own = getattr(torch.optim, name.removeprefix(_TORCH), None) if name.startswith(_TORCH) else None
    if given is None:
        if isinstance(own, type) and issubclass(own, Optimizer) and own is not Optimizer:
            return own
        last = name.rpartition(".")[2]
        raise StoreError(
            f"the run was recorded with the optimiser {name}, which is not one of torch.optim: give its class, "
            f"Recording(folder, optimiser={last if last.isidentifier() else '...'})."
        )
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise StoreError(f"optimiser must be a class of optimisers, such as torch.optim.AdamW, got {given!r}.")
    if name_class(given).rpartition(".")[2] != name.rpartition(".")[2] or (own is not None and own is not given):
        raise StoreError(f"the run was recorded with the optimiser {name}, got {name_class(given)}: give that class.")
    return given
