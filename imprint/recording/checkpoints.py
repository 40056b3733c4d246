"""The checkpoints of a recording: trained parameters, buffers, and what the optimiser remembers, as safetensors."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from imprint.errors import PlanError, StoreError, first_line
from imprint.recorder import moments_beside, second_moments
from imprint.recording.header import Header, Kept
from imprint.recording.records import OptimiserState
from imprint.recording.settings import plain
from imprint.store.checkpoint import File
from imprint.store.files import refuse_unreadable, sha256, write_tensors
from imprint.store.values import Value, parsed
from imprint.task import Parameters

Groups = tuple[tuple[str, ...], ...]
_ABOUT = "optimiser"  # the one entry of a file's metadata: several would have no order


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that a state dict has, tied ones once."""
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def write_checkpoint(folder: Path, step: int, model: nn.Module, optimiser: Optimizer, groups: Groups) -> Kept:
    """Write the model and the optimiser as they are after so many steps; durable once this returns."""
    place = folder / f"checkpoint-{step:06}.safetensors"
    parameters = dict(model.named_parameters())
    trained = {name: parameters[name] for group in groups for name in group}
    tensors, about = _pack(capture(optimiser, trained))
    beside = folder / f"checkpoint-{step:06}.optimiser.safetensors"
    moments = second_moments(model, optimiser) if _has_moments(optimiser) else {}
    if moments:
        write_tensors(moments_beside(place), moments)
    write_tensors(beside, tensors, {_ABOUT: about})
    write_tensors(place, {**trained, **persistent_buffers(model)})
    return Kept(step, _describe(place), _describe(beside), _describe(moments_beside(place)) if moments else None)


def _describe(place: Path) -> File:
    return File(place.name, sha256(place), place.stat().st_size)


def _has_moments(optimiser: Optimizer) -> bool:
    states = [state for state in optimiser.state.values() if state]
    keeps = all("exp_avg_sq" in state and "step" in state for state in states)
    return bool(states) and keeps and all("betas" in group for group in optimiser.param_groups)


def capture(optimiser: Optimizer, parameters: Mapping[str, Tensor]) -> OptimiserState:
    """Return what an optimiser remembers about each of some parameters, in their order. Tensors are its own."""
    found = {id(parameter): state for parameter, state in optimiser.state.items()}
    known = {id(parameter) for parameter in parameters.values()}
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


def _pack(state: OptimiserState) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a state under short names, and a text that says which is which."""
    tensors: dict[str, Tensor] = {}

    def name(tensor: Tensor) -> str:
        tensors[str(len(tensors))] = tensor
        return str(len(tensors) - 1)

    about: dict[str, Any] = {"tensors": {}, "numbers": {}}
    for parameter, values in state.tensors.items():
        about["tensors"][parameter] = {key: name(tensor) for key, tensor in values.items()}
    for parameter, others in state.numbers.items():
        for key, value in others.items():
            what = f"what the optimiser remembers of {parameter!r} as {key!r}"
            about["numbers"].setdefault(parameter, {})[key] = _plain_structure(value, name, what)
    return tensors, json.dumps(about, sort_keys=True, allow_nan=False)


def _plain_structure(value: Any, name: Any, what: str) -> Any:
    """Return a plain value, or lists of tensors (such as those of LBFGS), as a structure of JSON."""
    if isinstance(value, Tensor):
        return {"tensor": name(value)}
    if isinstance(value, list | tuple):
        return {"list": [_plain_structure(item, name, what) for item in value]}
    return {"value": plain(value, what)}


def read_state(folder: Path, kept: Kept, header: Header) -> Parameters:
    """Load the trained parameters and the buffers of a checkpoint."""
    tensors, _ = _load(folder, kept.state)
    expected = {*header.trained, *header.buffers}
    if expected != tensors.keys():
        name = sorted(expected ^ tensors.keys())[0]
        lacks = "lacks" if name in expected else "has an unknown"
        raise StoreError(f"{folder / kept.state.path} does not fit the recording: it {lacks} tensor {name!r}.")
    return tensors


def read_optimiser_state(folder: Path, kept: Kept, header: Header) -> OptimiserState:
    """Load what the optimiser remembered at a checkpoint."""
    tensors, about = _load(folder, kept.optimiser)
    place = folder / kept.optimiser.path
    value = parsed(about.encode(), place).record("tensors", "numbers")
    known = set(header.trained)

    def find(reference: Any) -> Tensor:
        if not isinstance(reference, str) or reference not in tensors:
            raise StoreError(f"{place} cannot be read: it names a tensor that it does not have.")
        return tensors[reference]

    def each(part: str) -> dict[str, dict[str, Value]]:
        found = {name: values.mapping() for name, values in value[part].mapping().items()}
        if unknown := sorted(found.keys() - known):
            raise StoreError(f"{place} does not fit the recording: it is about an unknown parameter {unknown[0]!r}.")
        return found

    return OptimiserState(
        {name: {key: find(item.content) for key, item in values.items()} for name, values in each("tensors").items()},
        {name: {key: _rebuild(item, find) for key, item in values.items()} for name, values in each("numbers").items()},
    )


def _rebuild(value: Value, find: Any) -> Any:
    items = list(value.mapping().items())
    if len(items) != 1 or items[0][0] not in ("tensor", "list", "value"):
        value.refuse("a tensor, a list or a value")
    kind, content = items[0]
    if kind == "list":
        return [_rebuild(item, find) for item in content.items()]
    return find(content.content) if kind == "tensor" else content.content


def _load(folder: Path, file: File) -> tuple[dict[str, Tensor], str]:
    """Load a file of tensors and its metadata, after comparing it with its checksum."""
    place = folder / file.path
    try:
        refuse_unreadable(place)
        if (size := place.stat().st_size) != file.bytes:
            raise StoreError(f"{place} is damaged: it has {size:,} bytes, {file.bytes:,} were written.")
        if sha256(place) != file.sha256:
            raise StoreError(f"{place} is damaged: it differs from its checksum.")
        with safe_open(place, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
            return tensors, (opened.metadata() or {}).get(_ABOUT, "")
    except FileNotFoundError as error:
        raise StoreError(f"{place} is missing: the recording has lost a checkpoint.") from error
    except (OSError, SafetensorError, MemoryError) as error:
        raise StoreError(f"{place} cannot be read: {first_line(error)}.") from error


@torch.no_grad()
def load_state(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a state into tensors of the same names, in place."""
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
            raise StoreError(
                f"the recording has {name!r} of shape {tuple(state[name].shape)} and {state[name].dtype}, the model "
                f"{tuple(tensor.shape)} and {tensor.dtype}: resume with the model that was recorded."
            )
        tensor.copy_(state[name])  # not detached: its version is to change


def load_optimiser_state(optimiser: Optimizer, parameters: Mapping[str, Tensor], state: OptimiserState) -> None:
    """Have an optimiser remember about some parameters what a state says, and nothing else.

    Tensors move to the device of their parameter and keep their dtype; counts of steps stay where torch wants them.
    """
    on_device = {
        id(parameter): bool(group.get("capturable") or group.get("fused"))
        for group in optimiser.param_groups
        for parameter in group["params"]
    }
    optimiser.state.clear()
    for name, parameter in parameters.items():
        found: dict[str, Any] = dict(state.numbers.get(name, {}))
        for key, value in state.tensors.get(name, {}).items():
            stays = key == "step" and not on_device[id(parameter)]
            found[key] = value.clone() if stays else value.to(parameter.device, copy=True)
        found = {key: _move(value, parameter) if isinstance(value, list) else value for key, value in found.items()}
        if found:
            optimiser.state[parameter] = found


def _move(values: Sequence[Any], parameter: Tensor) -> list[Any]:
    return [value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value for value in values]
