"""Keeps where the unperturbed path of a checkpoint ended, in a few numbers, by which parts are compared.

All sources share that path, so parts of one simulation end at the same point within rounding. Parts that read other
data, or drew other dropout, do not, and their imprints cannot be read side by side.

What is kept of the displacement d is S d, with a random sign for each value, summed in 64 buckets: ‖S(d − d')‖² is
‖d − d'‖² on average over the signs.
"""

import math
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from imprint.errors import StoreError, first_line
from imprint.task import Parameters

END = "end"  # the name of the files, beside those of imprints
_BUCKETS = 64
_BLOCK = 1 << 20  # values that are summed at once; a multiple of the buckets
_ROUNDINGS = 8  # how often the rounding of a parameter may add up along a path
_CLOSE, _CLOSE_IN_DOUBLE = 1e-2, 1e-6  # of the length of the path: what rounding may grow to


def summarise_end(start: Parameters, end: Parameters) -> Parameters:
    """Return what is kept of a path: `moved`, its `length`, and how far off another may end that is the same."""
    moved, length, rounding, close = torch.zeros(_BUCKETS, dtype=torch.float64), 0.0, 0.0, _CLOSE_IN_DOUBLE
    for name, tensor in end.items():
        if not tensor.is_floating_point() or torch.equal(tensor, start[name]):
            continue
        eps = torch.finfo(tensor.dtype).eps
        close = _CLOSE if eps > torch.finfo(torch.float64).eps else close
        rounding += (_ROUNDINGS * eps * float(tensor.double().norm())) ** 2
        signs = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        for now, before in zip(
            tensor.flatten().split(_BLOCK), start[name].to(tensor).flatten().split(_BLOCK), strict=True
        ):
            away = now.double().cpu() - before.double().cpu()
            length += float(away.square().sum())
            away *= 2 * torch.randint(2, away.shape, generator=signs) - 1
            moved += torch.nn.functional.pad(away, (0, -len(away) % _BUCKETS)).reshape(-1, _BUCKETS).sum(0)
    allowed = math.sqrt(rounding) + close * math.sqrt(length)
    sizes = torch.tensor([math.sqrt(length), allowed], dtype=torch.float64)
    return {"moved": moved, "length": sizes[0], "allowed": sizes[1]}


def compare_ends(one: Parameters, two: Parameters) -> float | None:
    """Return how far apart two paths ended, as a share of their length; None where rounding explains it."""
    apart = float((one["moved"] - two["moved"]).norm())
    if apart <= max(float(one["allowed"]), float(two["allowed"])):
        return None
    return apart / max(float(one["length"]), float(two["length"]))


def read_end(place: Path) -> Parameters | None:
    """Read what was kept of a path; None where nothing was."""
    if not place.exists():
        return None
    try:
        found: dict[str, Tensor] = load_file(place)
    except (OSError, SafetensorError, MemoryError) as error:
        raise StoreError(f"{place} cannot be read: {first_line(error)}.") from error
    expected = {"moved": (_BUCKETS,), "length": (), "allowed": ()}
    if {name: tuple(tensor.shape) for name, tensor in found.items()} != expected:
        raise StoreError(f"{place} cannot be read: it does not say where a path ended.")
    return found
