"""The checkpoints of a recording: trained parameters, buffers, and what the optimiser remembers, as safetensors."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from imprint.errors import StoreError, first_line
from imprint.recorder import moments_beside, second_moments
from imprint.recording.header import Header, Kept
from imprint.recording.memory import pack_memory, take_memory, unpack_memory
from imprint.recording.records import OptimiserState
from imprint.store.checkpoint import File
from imprint.store.files import refuse_unreadable, sha256, write_tensors
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
    tensors, about = pack_memory(take_memory(optimiser, trained))
    beside = folder / f"checkpoint-{step:06}.optimiser.safetensors"
    known = second_moments(model, optimiser) if _has_moments(optimiser) else {}
    if moments := {name: moment for name, moment in known.items() if name in trained}:
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
    return unpack_memory(tensors, about, header.trained, folder / kept.optimiser.path)


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
