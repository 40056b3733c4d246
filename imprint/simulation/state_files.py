"""Reads checkpoints from disk: safetensors, files of torch.save, and folders of a Trainer.

Files of torch.save that hold only tensors and plain values are read; others could execute code.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from imprint.display import name_some
from imprint.errors import TaskError, first_line

PICKLED = (".pt", ".pth", ".bin", ".ckpt")  # how files of torch.save are named
WEIGHTS = (".safetensors", *PICKLED)
_IN_FOLDER = (  # what a Trainer of transformers, or save_pretrained, writes to a folder
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
)
_AROUND = ("state_dict", "model_state_dict", "model")  # under which training scripts keep a state dict


def load_state(place: str | os.PathLike[str], what: str = "checkpoint") -> dict[str, Tensor]:
    """Load the tensors of a file, or those of the model in a folder."""
    path = Path(place)
    if path.is_dir():
        path = find_weights(path)
    if not path.is_file():
        raise TaskError(f"{what} file {path} does not exist.")
    if path.name.endswith(".index.json"):
        return _load_shards(path)
    return _unwrap(load_pickled(path, what), path) if path.suffix in PICKLED else _load_safetensors(path, what)


def holds_weights(folder: Path) -> bool:
    """Tell whether a folder has the model or the adapter that a Trainer writes."""
    return any((folder / name).is_file() for name in _IN_FOLDER)


def find_weights(folder: Path) -> Path:
    """Find the file, or the index of files, that holds the model or the adapter in a folder of a Trainer."""
    found = [folder / name for name in _IN_FOLDER if (folder / name).is_file()]
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise TaskError(f"checkpoint {folder} is a folder with several models ({names}): give the file of one.")
    inside = sorted(path.name for path in folder.glob("*.safetensors"))
    hint = f" Give a file in it, such as {folder / inside[0]}." if inside else ""
    if any(folder.glob("global_step*")) or any(folder.glob("*fsdp*")) or any(folder.rglob("*.distcp")):
        hint = " It holds the shards of a distributed training: gather them into a model, and save that."
    raise TaskError(
        f"checkpoint {folder} is a folder without model.safetensors, adapter_model.safetensors or another model that a "
        f"Trainer of transformers writes.{hint}"
    )


def load_pickled(path: Path, what: str) -> Any:
    """Load a file of torch.save, unless it needs more than tensors and plain values: pickle can execute code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise TaskError(
            f"{what} file {path} holds more than tensors and plain values, or is damaged: reading it could execute "
            "code. Save model.state_dict() alone; or, if you trust the file, load it yourself with "
            "torch.load(path, weights_only=False) and give the state dict."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise TaskError(f"{what} file {path} cannot be read by torch.load: {first_line(error)}.") from error


def _load_safetensors(path: Path, what: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise TaskError(f"{what} file {path} cannot be read as safetensors: {error}.") from error


def _unwrap(found: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in what a training script has saved: that itself, or a dictionary around it."""
    if isinstance(found, Mapping):
        inner = [name for name in _AROUND if _has_tensors(found.get(name))]
        if len(inner) == 1:
            return dict(found[inner[0]])
        if _has_tensors(found) and not any(map(_has_tensors, found.values())):
            return dict(found)
    held = (
        f"a dictionary of {name_some(list(map(str, found)), 6)}" if isinstance(found, Mapping) else type(found).__name__
    )
    raise TaskError(f"checkpoint file {path} holds {held}, and no state dict: load it, and give the state dict in it.")


def _has_tensors(found: Any) -> bool:
    return isinstance(found, Mapping) and any(isinstance(value, Tensor) for value in found.values())


def _load_shards(index: Path) -> dict[str, Tensor]:
    """Load a model that is spread over several files, as its index says."""
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"checkpoint file {index} is no index of files: {first_line(error)}.") from error
    state: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name or Path(name).suffix not in WEIGHTS:
            raise TaskError(f"checkpoint file {index} names {name!r}, which is no file of weights beside it.")
        state |= load_state(index.with_name(name))
    if lacking := sorted(places.keys() - state.keys()):
        raise TaskError(f"the files of checkpoint {index} lack {name_some(lacking)}, which the index says they hold.")
    return state
