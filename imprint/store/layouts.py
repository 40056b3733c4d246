"""Which tensors the files of a store must hold: their names, shapes and dtypes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from imprint.store.manifest import Manifest
from imprint.store.request import DTYPES
from imprint.tensors.rows import parameters_of

_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
}
_WORDS: dict[str | None, str] = {name: str(dtype) for dtype, name in _NAMES.items()}

Layout = dict[str, tuple[tuple[int, ...], str | None]]
"""Shapes of tensors by name, and what safetensors calls their dtypes; None for any."""


def layout(tensors: Mapping[str, Tensor], rows: int | None = None, dtype: torch.dtype | None = None) -> Layout:
    """Return how a file holds some tensors, or stacks of so many rows of them, in their own or another dtype."""
    stacked = () if rows is None else (rows,)
    return {name: ((*stacked, *t.shape), _NAMES.get(dtype or t.dtype)) for name, t in tensors.items()}


def find_misfit(file: Any, expected: Layout, *, others: bool = False) -> str | None:
    """Describe how an opened file differs from what it should hold; None if it does not.

    others: whether it may hold more.
    """
    names = set(file.keys())
    if not others and (extra := sorted(names - expected.keys())):
        return f"tensor {extra[0]!r} has no place in it"
    for name, (shape, dtype) in expected.items():
        if name not in names:
            return f"tensor {name!r} is missing"
        piece = file.get_slice(name)
        if tuple(piece.get_shape()) != shape or (dtype is not None and piece.get_dtype() != dtype):
            was, wanted = (_WORDS.get(each, "another dtype") for each in (piece.get_dtype(), dtype))
            return f"tensor {name!r} is {tuple(piece.get_shape())} of {was}, not {shape} of {wanted}"
    return None


def coefficients_dtype(stored: torch.dtype) -> torch.dtype:
    """Return the dtype of coefficients beside factors: what both have along a sharp direction cancels."""
    return torch.promote_types(stored, torch.float32)


def base_layout(manifest: Manifest) -> Layout:
    """Return what the base of a checkpoint must hold; buffers may come with it."""
    return {name: (about.shape, _NAMES[about.torch_dtype]) for name, about in manifest.request.displaced.items()}


def _stacked_layout(manifest: Manifest, rows: int) -> Layout:
    dtype = _NAMES[DTYPES[manifest.dtype]]
    return {name: ((rows, *about.shape), dtype) for name, about in manifest.request.displaced.items()}


def basis_layout(manifest: Manifest, checkpoint: int) -> Layout:
    """Return what the basis of a checkpoint must hold."""
    return _stacked_layout(manifest, manifest.checkpoints[checkpoint].choices.directions or 0)


def noise_layout(manifest: Manifest, checkpoint: int) -> Layout:
    """Return what the file of runs with a perturbed start must hold."""
    return _stacked_layout(manifest, manifest.checkpoints[checkpoint].choices.noise_rows)


def imprints_layout(manifest: Manifest, checkpoint: int, rows: int) -> Layout:
    """Return what a file of imprints or midpoints of so many sources must hold."""
    about, stored = manifest.checkpoints[checkpoint], DTYPES[manifest.dtype]
    if about.basis is None:
        return _stacked_layout(manifest, rows)
    directions, dtype = about.choices.directions or 0, _NAMES[stored]
    if manifest.plan.form == "projected":
        return {"coefficients": ((rows, directions), dtype)}
    found: Layout = {"coefficients": ((rows, directions), _NAMES[coefficients_dtype(stored)])}
    covered: set[str] = set()
    for layer in about.choices.layers:
        outputs, inputs = manifest.parameters[parameters_of(layer)[0]].shape
        found[f"inputs/{layer}"], found[f"outputs/{layer}"] = ((rows, inputs), dtype), ((rows, outputs), dtype)
        covered |= set(parameters_of(layer))
    dense = {f"dense/{name}": each for name, each in _stacked_layout(manifest, rows).items() if name not in covered}
    return found | dense
