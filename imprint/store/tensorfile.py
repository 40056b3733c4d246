"""Writes safetensors files as fast as the disk takes them: the tensors go to the file from where they are.

The package's own `save_file` first makes a copy of everything, at less than half the speed of a disk in a data centre.
Reading is left to the package, which so checks in every test that what is written here is its format.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}
_PIECE = 8 << 20

Layout = dict[str, tuple[tuple[int, ...], str | None]]
"""Shapes of tensors by name, and what their dtypes are called in a file."""


def layout(tensors: Mapping[str, Tensor], rows: int | None = None, dtype: torch.dtype | None = None) -> Layout:
    """How a file has some tensors, or stacks of so many rows of them, in their own or another dtype."""
    stacked = () if rows is None else (rows,)
    return {name: ((*stacked, *t.shape), _NAMES.get(dtype or t.dtype)) for name, t in tensors.items()}


def misfit(file: Any, expected: Layout) -> str | None:
    """How an opened file differs from what it should hold, in words."""
    names = set(file.keys())
    for name in sorted(names ^ expected.keys()):
        return f"tensor {name!r} {'has no place in it' if name in names else 'is missing'}"
    for name, (shape, dtype) in expected.items():
        piece = file.get_slice(name)
        if tuple(piece.get_shape()) != shape or (dtype is not None and piece.get_dtype() != dtype):
            return f"tensor {name!r} is {tuple(piece.get_shape())} of {piece.get_dtype()}, not {shape} of {dtype}"
    return None


def save(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> str | None:
    """Write contiguous tensors on the CPU; the checksum of the file, unless the package had to write it."""
    if any(tensor.dtype not in _NAMES for tensor in tensors.values()):
        apart = {name: tensor.clone() for name, tensor in tensors.items()}  # the package takes none that share memory
        save_file(apart, path, dict(metadata))
        return None
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1) as beside:
        hashed = None
        for piece in _pieces(tensors, metadata):
            previous, hashed = hashed, beside.submit(digest.update, piece)  # hashing goes on while the disk works
            file.write(piece)
            if previous is not None:
                previous.result()
    return digest.hexdigest()


def _pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Length of the header, header, and the values of every tensor; the widest first, so that all are aligned."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        about = {"dtype": _NAMES[tensors[name].dtype], "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
        header[name] = about
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in ordered:
        values = tensors[name].reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(values), _PIECE):
            yield values[start : start + _PIECE]
