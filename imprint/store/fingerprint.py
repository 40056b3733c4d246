"""Hashes everything a result depends on, so that a store is never read or continued with other inputs.

Data is hashed in full, or by a sample where the caller asks for that. States and sources are hashed by their values.
What a loss function does cannot be hashed: `imprint.store.probing` recognises it by its values.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.batches import leaves, raw_bytes
from imprint.data import Data, HashData
from imprint.display import strip_addresses
from imprint.errors import ReliabilityWarning
from imprint.sources import Sources
from imprint.task import Batch, Task

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""How data is hashed: every example, 1,024 of them, or not at all, for data that is another one at each reading."""

DataPrint = dict[str, str | None]
"""Two hashes of one dataset: of "all" of it, and "sampled" of 1,024 examples; None for one that was not taken."""

SAMPLED = 1024
MEASURED = 8  # queries whose F is kept
_TOGETHER = 64  # samples collated at once: a hash must not depend on the caller's batch size
_PIECE = 64 << 20  # bytes of a column or tensor that are hashed at once
_AT_ONCE = 8  # tensors that are hashed at the same time, each copied from the GPU by its own thread


def of_data(data: Data, how: HashData = "all") -> DataPrint:
    """Hash a dataset, whether it came as columns or as samples."""
    return {
        "all": _of_all(data) if how == "all" else None,
        "sampled": _of_sample(data) if how != "none" else None,
    }


def _of_all(data: Data) -> str:
    """Hash every example: the bytes of each column by themselves, and how rows are made of them."""
    n, columns = len(data), _Columns()
    if data.stacked is not None:
        columns.add(0, n, data.stacked)
    else:
        for start in range(0, n, _TOGETHER):
            stop = min(start + _TOGETHER, n)
            columns.add(start, stop - start, data.gather(torch.arange(start, stop)))
    return columns.hexdigest(n)


class _Columns:
    """Hashes batches that follow one another as if they were one, wherever they are cut.

    The rows of a tensor go into the hash of its column. Kinds and shapes of rows go into another one, where they
    change; so does every leaf that has no rows.
    """

    def __init__(self) -> None:
        self._columns: list[Any] = []
        self._structure = hashlib.sha256()
        self._last: list[str] = []

    def add(self, start: int, count: int, batch: Batch) -> None:
        every = leaves(batch)
        rows = [isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == count for leaf in every]
        kinds = [_kind(leaf) if row else "" for leaf, row in zip(every, rows, strict=True)]
        if kinds != self._last or not all(rows):
            self._structure.update(repr((start, kinds)).encode())
        self._last = kinds
        for index, (leaf, row) in enumerate(zip(every, rows, strict=True)):
            if not row:
                content = _content(leaf)
                self._structure.update(f"{index}:{len(content)}:".encode() + content)
                continue
            while len(self._columns) <= index:
                self._columns.append(hashlib.sha256())
            at_once = max(1, _PIECE // max(1, leaf[0].nbytes))
            for piece in torch.split(leaf, at_once):
                self._columns[index].update(raw_bytes(piece).data)

    def hexdigest(self, n: int) -> str:
        digests = [column.hexdigest() for column in self._columns]
        return hashlib.sha256(repr((n, self._structure.hexdigest(), digests)).encode()).hexdigest()


def _kind(leaf: Tensor) -> str:
    return f"{leaf.dtype}{tuple(leaf.shape[1:])}"


def _of_sample(data: Data) -> str:
    """Hash 1,024 seeded examples, or all where there are no more."""
    digest = hashlib.sha256(str(len(data)).encode())
    chosen = torch.arange(len(data))
    if len(data) > SAMPLED:
        drawn = np.random.default_rng(0).choice(len(data), SAMPLED, replace=False)
        chosen = torch.from_numpy(np.sort(drawn))
    for piece in torch.split(chosen, _TOGETHER):
        for leaf in leaves(data.gather(piece)):
            digest.update(_content(leaf))
    return digest.hexdigest()


@dataclass(frozen=True)
class Likeness:
    """Whether two fingerprints of data are the `same`, and `by` what part of the data that is known."""

    same: bool
    by: HashData
    n: int

    @property
    def remark(self) -> str:
        """Says in brackets what was not compared; empty where everything was."""
        known = {
            "all": "",
            "sampled": f" (sampled: {SAMPLED:,} of its {self.n:,} examples were compared)",
            "none": " (not compared, nor were losses on it: it was not hashed)",
        }
        return known[self.by]

    def warn(self, what: str = "the training data") -> None:
        """Warn where a part of the data was not compared."""
        if self.by != "all":
            warnings.warn(f"{what} is taken to be the same{self.remark}.", ReliabilityWarning, stacklevel=3)


def compare_data(before: object, now: object, n: int) -> Likeness:
    """Compare two fingerprints of data of n examples."""
    first, second = _both(before), _both(now)
    if first["all"] and second["all"]:
        return Likeness(first["all"] == second["all"], "all", n)
    if first["sampled"] and second["sampled"]:
        return Likeness(first["sampled"] == second["sampled"], "sampled" if n > SAMPLED else "all", n)
    return Likeness(True, "none", n)


def _both(known: object) -> DataPrint:
    """Return both hashes of some data. Ground truth of early versions has the sampled one alone."""
    if isinstance(known, Mapping):
        return {name: known.get(name) for name in ("all", "sampled")}
    return {"all": None, "sampled": known if isinstance(known, str) else None}


def recognise_data(known: object, data: Data) -> Likeness:
    """Compare data with a fingerprint of it; only what that fingerprint has is hashed."""
    return compare_data(known, of_data(data, how_hashed(known)), len(data))


def how_hashed(known: object) -> HashData:
    """Return how the data behind a fingerprint was hashed."""
    prints = _both(known)
    return "all" if prints["all"] else "sampled" if prints["sampled"] else "none"


def partly_hashed(how: HashData, n: int) -> str | None:
    """Return the warning of a store whose data was not hashed in full; None if it was."""
    if how == "none":
        return (
            'the training data was not hashed (hash_data="none"): if it changes, or reads differently each time, this '
            "store and its scores cannot tell."
        )
    if how == "sampled" and n > SAMPLED:
        return (
            f"the training data was hashed by a sample of {SAMPLED:,} of its {n:,} examples: a change in the others "
            'is not noticed. hash_data="all" hashes everything.'
        )
    return None


def of_batches(batches: Iterable[tuple[int, Batch]]) -> str:
    """Hash all samples of (count, batch) pairs, however they are cut into batches."""
    digest = hashlib.sha256()
    for count, batch in batches:
        columns = [part for leaf in leaves(batch) for part in _columns(leaf, count)]
        digest.update(np.concatenate(columns, axis=1).tobytes())
    return digest.hexdigest()


def hash_rows(batch: Batch, count: int) -> list[bytes]:
    """Hash each of the examples of a batch by itself."""
    rows = np.concatenate([part for leaf in leaves(batch) for part in _columns(leaf, count)], axis=1)
    return [hashlib.sha256(row.tobytes()).digest() for row in rows]


def hash_examples(data: Data, indices: Tensor) -> list[bytes]:
    """Hash some examples, each by itself: collated alone where the shape of a batch may depend on the others in it."""
    pieces = torch.split(indices, _TOGETHER if data.stacked is not None else 1)
    return [each for piece in pieces for each in hash_rows(data.gather(piece), len(piece))]


def _columns(leaf: object, count: int) -> Iterator[Bytes]:
    """Return what is hashed of a leaf for each of the rows: its kind and its values, shape (count, bytes)."""
    if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count:
        about, values = _kind(leaf).encode(), raw_bytes(leaf)
        yield np.broadcast_to(np.frombuffer(about, np.uint8), (count, len(about)))
        yield values.reshape(count, len(values) // count)
    else:
        same = np.frombuffer(_content(leaf), np.uint8)
        yield np.broadcast_to(same, (count, len(same)))


def of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Hash names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        for piece in _read_pieces(tensor):
            digest.update(piece.data)
    return digest.hexdigest()


def _read_pieces(tensor: Tensor) -> Iterator[Bytes]:
    """Return the bytes of a tensor; each piece is overwritten by the next.

    From a GPU they come through pinned memory that is used again: copies into fresh memory take longer than the hash,
    and several at once delay each other.
    """
    if tensor.device.type != "cuda":
        yield raw_bytes(tensor)
        return
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    pinned = torch.empty(min(_PIECE, len(values)), dtype=torch.uint8, pin_memory=True)
    for piece in values.split(_PIECE):
        yield pinned[: len(piece)].copy_(piece).numpy()


def of_each(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash each tensor as `of_tensors` hashes it alone, several at once: a large model has gigabytes of them."""
    with ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        return dict(zip(tensors, pool.map(lambda name: of_tensors({name: tensors[name]}), tensors), strict=True))


def sum_of_bits(tensor: Tensor) -> int:
    """Sum a tensor's values read as whole numbers: on its own device, and far faster than a hash."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64))


def of_sources(sources: Sources) -> str:
    """Hash ids, names and members."""
    digest = hashlib.sha256(repr((sources.ids, sources.names, sources.sizes)).encode())
    digest.update(np.concatenate(sources.members).tobytes())
    return digest.hexdigest()


def digest_members(sources: Sources) -> tuple[str, ...]:
    """Hash the members of each source by themselves, by which a store recognises those that it has."""
    return tuple(hashlib.sha256(np.sort(members).tobytes()).hexdigest()[:32] for members in sources.members)


def of_table(ids: Sequence[str], names: Sequence[str], sizes: Sequence[int], digests: Sequence[str]) -> str:
    """Hash ids, names and members, of which only the digests are known."""
    return hashlib.sha256(repr(tuple(map(tuple, (ids, names, sizes, digests)))).encode()).hexdigest()


def of_members(sources: Sources) -> str:
    """Hash the same as `of_sources`, through the digests of members that a store keeps."""
    return of_table(sources.ids, sources.names, sources.sizes, digest_members(sources))


def are_sources(sources: Sources, known: str) -> bool:
    """Tell whether a hash is of these sources, whichever of the two it is."""
    return known in (of_sources(sources), of_members(sources))


def without_adapter(task: Task) -> Task:
    """Return the task of the model itself where an adapter was made for the imprints alone; else the task as it is."""
    plain: Task = getattr(task, "plain", task)
    return plain


@torch.inference_mode(False)
def probe_measures(task: Task, batches: Iterable[tuple[int, Batch]]) -> list[float]:
    """Measure F of the first few queries, where it is finite, at parameters drawn by shape, not at the model's own.

    An adapter that was made for the imprints has no part in it, so that scores can be compared with retraining.
    """
    task = without_adapter(task)
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
            if len(values) >= MEASURED:
                break
    return [value for value in values[:MEASURED] if math.isfinite(value)]


def changed(what: str, before: list[float], now: list[float], tolerance: float = 1e-4) -> str | None:
    """Describe the first of some values that has changed; None if none has.

    What counts as the same is relative to the largest of them: their rounding is of that size. Values that were not
    there before are not compared.
    """
    largest = max(map(abs, before), default=0.0)
    for index, was in enumerate(before):
        value = now[index] if index < len(now) else math.inf
        if not abs(value - was) <= tolerance * largest:
            return f"{what} {index} is {value:.4g}, was {was:.4g}"
    return None


def _content(leaf: object) -> bytes:
    """Return what is hashed of a leaf: kind and values of a tensor, the text of anything else."""
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}".encode() + raw_bytes(leaf).tobytes()
    return strip_addresses(repr(leaf)).encode()
