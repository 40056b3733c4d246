"""What can be known of the inputs of a simulation, so that a store is never read or continued with others.

Data: its length and a hash of all samples, or of a seeded choice of them. Losses: their values on a few probe examples,
which catch a changed loss function. States and sources: hashes of their values.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.data import Data, leaves
from imprint.sources import Sources
from imprint.task import Batch, Functional, Parameters, Task

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
SAMPLED = 1024
PROBES = 8
REGULARISERS = 3


def of_data(data: Data) -> str:
    """A hash of all samples, or of 1,024 seeded ones."""
    digest = hashlib.sha256(str(len(data)).encode())
    chosen = torch.arange(len(data))
    if len(data) > SAMPLED:
        drawn = np.random.default_rng(0).choice(len(data), SAMPLED, replace=False)
        chosen = torch.from_numpy(np.sort(drawn))
    for piece in torch.split(chosen, 64):  # small pieces: a hash must not depend on the caller's batch size
        for leaf in leaves(data.gather(piece)):
            _add(digest, leaf)
    return digest.hexdigest()


def of_batches(batches: Iterable[tuple[int, Batch]]) -> str:
    """A hash of all samples of (count, batch) pairs, however they are cut into batches."""
    digest = hashlib.sha256()
    for count, batch in batches:
        columns = [part for leaf in leaves(batch) for part in _columns(leaf, count)]
        digest.update(np.concatenate(columns, axis=1).tobytes())
    return digest.hexdigest()


def _columns(leaf: object, count: int) -> Iterator[Bytes]:
    """What is hashed of a leaf for each of the rows: its kind and its values, shape (count, bytes)."""
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count:
        about, values = f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode(), _bytes(leaf)
        yield np.broadcast_to(np.frombuffer(about, np.uint8), (count, len(about)))
        yield values.reshape(count, len(values) // count)
    else:
        same = np.frombuffer(_content(leaf), np.uint8)
        yield np.broadcast_to(same, (count, len(same)))


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        _add(digest, tensors[name])
    return digest.hexdigest()


def sum_of_bits(tensor: Tensor) -> int:
    """The sum of a tensor's values read as whole numbers: where it is, and far quicker than a hash."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))


def of_sources(sources: Sources) -> str:
    """A hash of ids, names and members."""
    digest = hashlib.sha256(repr((sources.ids, sources.names, sources.sizes)).encode())
    digest.update(np.concatenate(sources.members).tobytes())
    return digest.hexdigest()


def probe_examples(n: int) -> Tensor:
    """The indices of the examples whose losses are kept: spread over the data."""
    return torch.from_numpy(np.unique(np.linspace(0, n - 1, min(PROBES, n)).round().astype(np.int64)))


def probe_losses(task: Functional, theta: Parameters, data: Data) -> list[float]:
    """ℓ(θ; i) of the probe examples."""
    examples = probe_examples(len(data))
    with torch.no_grad():
        values: list[float] = task.losses(theta, data.gather(examples), len(examples)).double().tolist()
    return values


def regulariser_values(task: Functional, theta: Parameters) -> list[float]:
    """r at θ and at places around it, where a pull towards θ shows too; zeros where there is no regulariser."""
    if task.task.regulariser is None:
        return [0.0] * REGULARISERS
    generator = torch.Generator().manual_seed(0)
    values = []
    for distance in np.linspace(0, 1, REGULARISERS):
        moved = {
            name: p + distance * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
            for name, p in theta.items()
        }
        with torch.no_grad():
            values.append(float(task.regulariser(moved)))
    return values


@torch.inference_mode(False)
def probe_measures(task: Task, batches: Iterable[tuple[int, Batch]]) -> list[float]:
    """F of the first few queries, where it is finite, at parameters drawn by shape, whatever the model's own are."""
    generator = torch.Generator().manual_seed(0)
    parameters, state = dict(task.model.named_parameters()), task.state()
    for name, tensor in state.items():
        if tensor.is_floating_point():  # a buffer may be a variance, which is positive
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 10
            state[name] = (drawn if name in parameters else torch.ones_like(drawn)).to(tensor)
    functional, theta = task.at(state)
    values: list[float] = []
    with torch.no_grad(), task.evaluating():
        for count, batch in batches:
            values += functional.measures(theta, batch, count).double().tolist()
            if len(values) >= PROBES:
                break
    return [value for value in values[:PROBES] if math.isfinite(value)]


def changed_loss(before: list[float], now: list[float], tolerance: float = 1e-4) -> str | None:
    """The first probe whose loss is another one now, in words; None if all are the same."""
    return changed("loss on probe example", before, now, tolerance)


def changed(what: str, before: list[float], now: list[float], tolerance: float = 1e-4) -> str | None:
    """The first of some values that is another one now, in words; None if all are the same."""
    for index, (was, value) in enumerate(zip_longest(before, now, fillvalue=math.inf)):
        if not abs(value - was) <= tolerance * max(1.0, abs(was)):
            return f"{what} {index} is {value:.4g}, was {was:.4g}"
    return None


def _add(digest: Any, leaf: object) -> None:
    digest.update(_content(leaf))


def _content(leaf: object) -> bytes:
    """What is hashed of a leaf: kind and values of a tensor, the text of anything else."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode() + _bytes(leaf).tobytes()
    return repr(leaf).encode()


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
