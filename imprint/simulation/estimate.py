"""What a simulation will take, from a small part of it: seconds, peak memory, and the size of its store."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from imprint.batches import leaves
from imprint.errors import StoreError
from imprint.runtime.memory import Peak, tensor_bytes
from imprint.simulation import engines
from imprint.simulation.inputs import Inputs
from imprint.sources import Sources
from imprint.store.files import find_nearest_folder, sha256, write_tensors
from imprint.store.request import DTYPES
from imprint.store.table import DIGEST

_NORM = 10  # bytes of the norm of an imprint, which its file has as text
_WRITTEN = 16 << 20  # bytes written to measure how fast the disk is


@dataclass(frozen=True)
class Estimate:
    """What a simulation will take.

    peak_bytes: the most memory in use at once: of the device, or on the CPU of the process; None where that is unknown.
    disk_bytes: of the store, and while it is made of the state that is kept to go on from.
    rows_at_once: how many sources are simulated together; `one_by_one` says why it is a loop, where it is one.
    training_seconds, training_bytes: what one plain training takes, where a recorded run tells.
    """

    seconds: float
    peak_bytes: int | None
    store_bytes: int
    disk_bytes: int
    bytes_per_source: int
    rows_at_once: int
    one_by_one: str | None
    training_seconds: float | None = None
    training_bytes: int | None = None


def estimate(inputs: Inputs, memory: int | str | None, out: str | os.PathLike[str] | None) -> Estimate:
    """Measure a part of a simulation, at its first checkpoint, and count how much of it there will be.

    What the simulation would warn of there goes to the notices of the inputs.
    """
    begin, peak = time.monotonic(), Peak(inputs.task.device)
    used = [settings for settings in inputs.settings if settings.weight > 0]
    state = inputs.state(inputs.first)
    inputs.request()
    preparing = time.monotonic() - begin
    engine = engines.at_checkpoint(inputs, inputs.first, state, memory)
    cost = engine.cost(used)
    engine.warn(inputs.notices.add)
    each = len(used) * cost.values * DTYPES[inputs.stored_as].itemsize
    beside = tensor_bytes(inputs.without_fixed(inputs.task.tensors())) + cost.shared + _NORM * len(inputs.sources)
    store = each * len(inputs.sources) + len(used) * beside + _count_labels(inputs.sources) + _count_probes(inputs)
    return Estimate(
        seconds=preparing + cost.seconds + store * _write_seconds(out),
        peak_bytes=None if peak.bytes is None else peak.bytes + cost.memory,
        store_bytes=store,
        disk_bytes=store + cost.scratch,
        bytes_per_source=each,
        rows_at_once=cost.rows_at_once,
        one_by_one=engine.measured.one_by_one,
        training_seconds=cost.training_seconds,
        training_bytes=cost.training_bytes,
    )


def _count_labels(sources: Sources) -> int:
    """Count the bytes of the table of sources: ids, names, sizes, digests, and what stands between them."""
    between = DIGEST + 16
    return sum(len(f"{i}{n}{s}") + between for i, n, s in zip(sources.ids, sources.names, sources.sizes, strict=True))


def _count_probes(inputs: Inputs) -> int:
    """Count the bytes of the examples that are kept to recognise the loss by."""
    batch = inputs.data.gather(torch.tensor(inputs.probes))
    return sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def _write_seconds(out: str | os.PathLike[str] | None) -> float:
    """Measure how long it takes to write a byte durably and to hash it, where the store will be."""
    place = find_nearest_folder(out)
    tensors = {"zeros": torch.zeros(_WRITTEN, dtype=torch.uint8)}
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".imprint-") as folder:
            file = Path(folder) / "written.safetensors"
            begin = time.monotonic()
            write_tensors(file, tensors)
            sha256(file)
            return (time.monotonic() - begin) / _WRITTEN
    except OSError as error:
        raise StoreError(f"{place} cannot be written to: {error}") from error
