"""What a simulation will take, from a few of its steps: seconds, peak memory, and the size of its store."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from imprint.batches import leaves
from imprint.errors import StoreError
from imprint.plan import Settings
from imprint.runtime.memory import Peak, tensor_bytes
from imprint.simulation.descent import Descent, FullBatch
from imprint.simulation.engines import sides, simulated, trial_epsilon
from imprint.simulation.frozen import COPIES, layers_of, rows_in_memory, source_gradients, values_of_a_row
from imprint.simulation.frozen import rows_at_once as rows_at_once_frozen
from imprint.simulation.frozen import together_or_alone as together_or_alone_frozen
from imprint.simulation.guards import too_long
from imprint.simulation.inputs import Inputs
from imprint.simulation.settling import advised, rows_at_once, together_or_alone
from imprint.simulation.spectral import Frozen, freeze, imprints, refuse_unstable
from imprint.simulation.step import LOOK_ITERATIONS, LOOKS, curvature_at, starting_curvature
from imprint.simulation.trajectories import choose_epsilon
from imprint.sources import Sources
from imprint.store.files import nearest_folder, write
from imprint.store.reading import DTYPES, coefficients_dtype
from imprint.store.tensorfile import save
from imprint.tensors.rows import Rows, along
from imprint.tensors.vectors import Flat

Result = TypeVar("Result")
_STEPS = 4  # measured, of which the first, which warms up, does not count
_WALKS = 2  # of the path, until an automatic step suits it: one or two in general
_SAMPLE = 256  # sources whose gradients are measured
_WIDE = 64  # directions on which coefficients are measured
_VALUE = 22  # bytes of a curvature, which the file of a basis has as text
_NORM = 10  # bytes of the norm of an imprint, which its file has as text
_WRITTEN = 16 << 20  # bytes written to measure how fast the disk is


@dataclass(frozen=True)
class Estimate:
    """What a simulation will take.

    peak_bytes: the most memory in use at once: of the device, or on the CPU of the process; None where that is unknown.
    disk_bytes: of the store, and while it is made of the state that is kept to go on from.
    rows_at_once: how many sources are simulated together; `one_by_one` says why it is a loop, where it is one.
    """

    seconds: float
    peak_bytes: int | None
    store_bytes: int
    disk_bytes: int
    bytes_per_source: int
    rows_at_once: int
    one_by_one: str | None


def estimate(inputs: Inputs, memory: int | str | None, out: str | os.PathLike[str] | None) -> Estimate:
    """Measure a few steps of a simulation, at its first checkpoint, and count how many there will be.

    What the simulation would warn of there goes to the notices of the inputs.
    """
    if inputs.plan.engine == "spectral":
        return _of_spectral(inputs, memory, out)
    begin, peak = time.monotonic(), Peak(inputs.task.device)
    used = {index: settings for index, settings in enumerate(inputs.settings) if settings.weight > 0}
    state = inputs.state(inputs.first)
    inputs.request()
    preparing = time.monotonic() - begin

    trying, (descent, alone) = _timed(lambda: together_or_alone(inputs.descent(inputs.first, state)))
    seconds, curvature = _timed(lambda: starting_curvature(descent))
    if inputs.settings[inputs.first].lr == "auto":
        descent = replace(descent, lr=curvature.step(descent.shift, descent.plan.momentum))
    descent = advised(descent, curvature)
    fitting, rows = _timed(lambda: rows_at_once(descent, memory, trial_epsilon(descent.plan)))
    chunk = descent.with_sources(inputs.sources.spread(rows))
    settling = len(used) * (trying + seconds + fitting) + sum(_settling(descent, list(used.values())))
    simulating = _step_seconds(chunk) / rows * len(inputs.sources)
    values = sum(p.numel() for p in descent.start.values()) * (2 if inputs.plan.keep_pair else 1)
    each, store = sizes(inputs, values)
    steps = sum(settings.path for settings in used.values())
    total = preparing + settling + steps * simulating + store * _write_seconds(out)
    moving = tensor_bytes(descent.start) * (2 if inputs.plan.momentum else 1)
    snapshot = moving * (1 + rows * sides(inputs.plan))
    inputs.notice(too_long(inputs.first, descent.lr, descent.shift, inputs.plan.momentum, curvature))
    return Estimate(total, peak.bytes, store, store + snapshot, each, rows, alone)


def _of_spectral(inputs: Inputs, memory: int | str | None, out: str | os.PathLike[str] | None) -> Estimate:
    """Measure a few products with the curvature, and the gradients of a few sources."""
    begin, peak = time.monotonic(), Peak(inputs.task.device)
    used, settings = sum(setting.weight > 0 for setting in inputs.settings), inputs.settings[inputs.first]
    state = inputs.state(inputs.first)
    inputs.request()
    preparing = time.monotonic() - begin

    trying, (descent, alone) = _timed(lambda: together_or_alone_frozen(inputs.descent(inputs.first, state)))
    finding, layers = _timed(lambda: layers_of(descent))
    flat = Flat(descent.start)
    directions = min(inputs.plan.directions, flat.size)
    freezing, frozen = _freezing(descent, directions)
    refuse_unstable(frozen, settings, descent.lr if settings.lr != "auto" else 0.0, inputs.first)
    rows = rows_at_once_frozen(descent, directions, layers, memory)
    fit = rows_in_memory(descent, directions, layers, memory)
    few = inputs.sources.spread(min(fit, _SAMPLE))
    each_source = _source_seconds(descent.with_sources(few), directions, layers) / len(few)

    projected = inputs.plan.form == "projected"
    basis = directions * flat.size
    values = directions if projected else values_of_a_row(descent, directions, layers)
    stored = DTYPES[inputs.stored_as]
    kept = basis * stored.itemsize + _VALUE * directions if layers or projected else 0
    wider = directions * (coefficients_dtype(stored).itemsize // stored.itemsize - 1) if layers and not projected else 0
    each, store = sizes(inputs, values + wider, used * kept)
    simulating = trying + finding + freezing + each_source * len(inputs.sources)
    total = preparing + used * simulating + store * _write_seconds(out)
    more = descent.dtype.itemsize * (2 * basis + COPIES * values * (fit - len(few)))  # than was measured
    most = None if peak.bytes is None else peak.bytes + more
    beside = 0 if layers or projected else basis * descent.dtype.itemsize
    return Estimate(total, most, store, store + beside, each, rows, alone)


def _freezing(descent: Descent, directions: int) -> tuple[float, Frozen]:
    """Seconds to measure the curvature on so many directions, and what it is on a few."""
    moments = [time.monotonic()]
    frozen = freeze(
        descent.task,
        descent.start,
        FullBatch(descent.data, descent.dtype),
        descent.plan.seen_curvature,
        min(_STEPS, directions),
        on_product=lambda products: moments.append(time.monotonic()),
    )
    outside = time.monotonic() - moments[-1]
    gaps = [after - before for before, after in pairwise(moments)]
    some = _random_directions(descent, min(_WIDE, directions))
    wide, vector = len(some), some[0].clone()
    once = min(_timed(lambda: (some @ vector) @ some)[0] for _ in range(3))
    turning = min(_timed(lambda: some[:, :wide] @ some)[0] for _ in range(2))
    orthogonal = 2 * once * directions / 2 / wide  # twice, on half of the directions in the mean
    seconds = directions * (median(gaps[1:] or gaps) + orthogonal) + outside + turning * (directions / wide) ** 2
    return seconds, frozen


def _source_seconds(descent: Descent, directions: int, layers: tuple[str, ...]) -> float:
    """Seconds for the gradients of the sources, and for their coefficients on so many directions."""
    source_gradients(descent, layers)  # warms up
    taking, slopes = _timed(lambda: source_gradients(descent, layers))
    some = Flat(descent.start).parameters(_random_directions(descent, min(_WIDE, directions)))

    wide, settings = len(next(iter(some.values()))), Settings(descent.steps, 0.0, 0.0, 1.0)

    def seconds(count: int) -> float:
        part = {name: tensor[:count] for name, tensor in some.items()}
        frozen = Frozen(torch.ones(count), part, rest=1.0, share=1.0)

        def respond() -> Rows:
            found = imprints(frozen, slopes, along(slopes, part), settings, lr=0.0)[0]
            return found if layers else Rows({}, {}, found.multiplied_out(descent.start))

        return min(_timed(respond)[0] for _ in range(2))

    one, many = seconds(1), seconds(wide)
    return taking + many + max(many - one, 0.0) * (directions - wide) / max(wide - 1, 1)


def _random_directions(descent: Descent, count: int) -> torch.Tensor:
    flat = Flat(descent.start)
    return torch.rand(count, flat.size, device=flat.device, dtype=flat.dtype)


def sizes(inputs: Inputs, values: int, beside: int = 0) -> tuple[int, int]:
    """Bytes that each source takes in the store with so many values, and bytes of the whole store.

    beside: bytes of what else it keeps than bases, sources and probes.
    """
    task, used = inputs.task, sum(settings.weight > 0 for settings in inputs.settings)
    each = used * values * DTYPES[inputs.stored_as].itemsize
    beside += used * tensor_bytes(inputs.without_fixed(task.state())) + _labels(inputs.sources) + _probes(inputs)
    return each, (each + used * _NORM) * len(inputs.sources) + beside


def _labels(sources: Sources) -> int:
    """Bytes of the table of sources, with ids, names, sizes and what stands between them."""
    return sum(len(f"{i}{n}{s}") + 12 for i, n, s in zip(sources.ids, sources.names, sources.sizes, strict=True))


def _probes(inputs: Inputs) -> int:
    """Bytes of the examples that are kept to recognise the loss by."""
    batch = inputs.data.gather(torch.tensor(inputs.probes))
    return sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


def _settling(descent: Descent, every: list[Settings]) -> Iterator[float]:
    """Seconds to choose what the plan leaves open at each checkpoint: the step, by walking the path, and ε."""
    if any(settings.lr == "auto" for settings in every):
        parts = next(descent.batches())
        gradient = min(_timed(lambda: descent.base_gradient(descent.start, parts, 0))[0] for _ in range(2))
        look, _ = _timed(lambda: curvature_at(descent, descent.start, parts, LOOK_ITERATIONS))
        for settings in every:
            if settings.lr == "auto":
                yield _WALKS * (settings.path * gradient + min(len(LOOKS), settings.path) * look)
    if descent.plan.engine == "trajectories" and descent.plan.epsilon == "auto":
        few = min(2, descent.steps)
        trial, _ = _timed(lambda: choose_epsilon(replace(descent, steps=few)))
        yield sum(settings.path for settings in every) * trial / few


def _step_seconds(chunk: Descent) -> float:
    """Seconds of one step of a chunk of sources."""
    moments = [time.monotonic()]
    chunk = replace(chunk, steps=min(_STEPS, chunk.steps), on_step=lambda rows: moments.append(time.monotonic()))
    simulated(chunk, trial_epsilon(chunk.plan))
    gaps = [after - before for before, after in pairwise(moments)]
    return median(gaps[1:] or gaps)


def _write_seconds(out: str | os.PathLike[str] | None) -> float:
    """Seconds to write a byte durably and to hash it, where the store will be."""
    place = nearest_folder(out)
    tensors = {"zeros": torch.zeros(_WRITTEN, dtype=torch.uint8)}
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".imprint-") as folder:
            file = Path(folder) / "written.safetensors"
            begin = time.monotonic()
            write(file, lambda path: save(tensors, path, {}))
            return (time.monotonic() - begin) / _WRITTEN
    except OSError as error:
        raise StoreError(f"{place} cannot be written to: {error}") from error


def _timed(call: Callable[[], Result]) -> tuple[float, Result]:
    begin = time.monotonic()
    result = call()
    return time.monotonic() - begin, result
