"""Measures the constants of a device that need no whole operation: rates, dispatch, memory, recorder and disk."""

import copy
import datetime
import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cost_clock import Clock
from cost_models import Trial, build, private_task, tokens
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import imprint
from imprint.advice.devices import Constant, Device
from imprint.advice.shapes import Shape
from imprint.data import Data
from imprint.readout.kernels import forward_only, jvp_scores
from imprint.simulation.engines.replay.rows import Lineup
from imprint.simulation.engines.replay.stack import Stack
from imprint.simulation.engines.replay.training import Repetition, Training, as_recorded
from imprint.sources import Sources
from imprint.tensors.vectors import repeated

TINY = Shape(layers=2, width=32, vocabulary=64, length=8)
Sizes = dict[str, Any]
CPU: Sizes = {"widths": (64, 128, 256, 512), "batch": 16, "length": 32, "dtype": torch.float32, "values": 2**24}
CUDA: Sizes = {
    "widths": (512, 1024, 2048, 4096, 8192), "batch": 8, "length": 1024, "dtype": torch.bfloat16, "values": 2**28,
}  # fmt: skip

SMALL: Sizes = {**CPU, "widths": (32, 64), "batch": 2, "length": 8, "values": 2**16}


class Counting(TorchDispatchMode):
    """Counts the operations that a call starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> int:
    """Count operations, without those that only look at a tensor in another way."""
    counting = Counting()
    with counting:
        call()
    return counting.count


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits.float(), batch["input_ids"][:, 1:].flatten())


def _forward(model: Any, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        _loss(model, batch)


def _train(model: Any, batch: dict[str, Tensor]) -> None:
    model.zero_grad()
    _loss(model, batch).backward()


PASSES = {"forward": _forward, "training": _train}


def measure_rates(
    clock: Clock, sizes: Sizes, repeats: int
) -> tuple[dict[str, list[tuple[float, float]]], dict[str, float]]:
    """Return FLOP/s of a block by width, forwards and in training, and the operations of each and their seconds.

    A block is the difference of a model with three and one with one, so that embeddings and head drop out.
    """
    cpu = torch.device("cpu")
    shapes = {layers: Shape(layers, TINY.width, TINY.vocabulary, TINY.length) for layers in (1, 3)}
    models = {layers: build(shape, cpu) for layers, shape in shapes.items()}
    counts: dict[str, float] = {}
    for name, run in PASSES.items():
        each = {n: count_operations(partial(run, models[n], tokens(TINY, 1, cpu))) for n in models}
        counts[name] = (each[3] - each[1]) / 2
    small = _seconds_of_block(clock, shapes, 1, torch.float32, 4 * repeats)
    counts["dispatch"] = small["forward"] / counts["forward"]
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in PASSES}
    for width in sizes["widths"]:
        shapes = {n: Shape(n, width, TINY.vocabulary, sizes["length"]) for n in (1, 3)}
        taken = _seconds_of_block(clock, shapes, sizes["batch"], sizes["dtype"], repeats)
        flops = shapes[1].block_flops(sizes["batch"] * sizes["length"])
        for name in PASSES:
            started = 0.0 if clock.device.type == "cuda" else counts[name] * counts["dispatch"]
            rates[name].append((width, flops * (3 if name == "training" else 1) / max(taken[name] - started, 1e-9)))
    return rates, counts


def _seconds_of_block(
    clock: Clock, shapes: dict[int, Shape], batch: int, dtype: torch.dtype, repeats: int
) -> dict[str, float]:
    models = {n: build(shape, clock.device).to(dtype) for n, shape in shapes.items()}
    given = tokens(shapes[1], batch, clock.device)
    calls = {f"{name} {n}": partial(run, model, given) for n, model in models.items() for name, run in PASSES.items()}
    taken = clock.interleaved(calls, repeats)
    return {name: (taken[f"{name} 3"] - taken[f"{name} 1"]) / 2 for name in PASSES}


def measure_memory(clock: Clock, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Return the bytes per second of reading imprints, and what a step of Adam moves, in bytes per value."""
    values = sizes["values"]
    imprints = torch.randn(16, values // 16, device=clock.device)
    parameters = [torch.nn.Parameter(torch.randn(values // 16 // 8, device=clock.device)) for _ in range(8)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    optimiser = torch.optim.AdamW(parameters, lr=1e-4)
    taken = clock.interleaved({"read": imprints.sum, "adam": optimiser.step}, repeats)
    bandwidth = 4 * values / taken["read"]
    return {"bandwidth": bandwidth, "optimiser bytes": taken["adam"] * bandwidth / (values // 16)}


def measure_recorder(clock: Clock, bandwidth: float, repeats: int) -> dict[str, float]:
    """Return what recording adds to a step: seconds, and bytes per value for the norm of the gradient."""
    added, values = [], []
    for width in (32, 384):
        shape = Shape(2, width, 64, 8)
        model = build(shape, clock.device)
        trial = Trial(shape, 4, 1, 40 if width == 32 else 20, clock.device)
        with tempfile.TemporaryDirectory() as folder:
            task, count = private_task(model), iter(range(1000))

            def recorded(folder: str = folder, count: Any = count, trial: Trial = trial, model: Any = model) -> None:
                own = copy.deepcopy(model)
                trial.train(private_task(model), own, Path(folder) / str(next(count)))

            def plain(trial: Trial = trial, model: Any = model, task: imprint.Task = task) -> None:
                trial.train(task, copy.deepcopy(model))

            few = Trial(shape, 4, 1, 1, clock.device)
            calls: dict[str, Callable[[], object]] = {
                "recorded": recorded,
                "plain": plain,
                "recorded, one": partial(recorded, trial=few),
                "plain, one": partial(plain, trial=few),
            }
            taken = clock.interleaved(calls, repeats)
        long, short = (taken[f"recorded{end}"] - taken[f"plain{end}"] for end in ("", ", one"))
        added.append((long - short) / (trial.steps - 1))
        values.append(shape.total)
    slope = max(0.0, (added[1] - added[0]) / (values[1] - values[0]))
    return {"recording": max(0.0, added[0] - slope * values[0]), "recording bytes": slope * bandwidth}


def measure_overheads(clock: Clock, repeats: int) -> dict[str, float]:
    """Return what whole operations start beside a plain step or forward pass, on a model that computes nothing."""
    model, batch = build(TINY, clock.device), tokens(TINY, 1, clock.device)
    task = private_task(model)
    functional, theta = task.at(task.state())
    imprints = {name: torch.randn(1, *p.shape, device=clock.device) for name, p in theta.items()}

    def measure(theta: Any) -> Tensor:
        return functional.measures(theta, batch, 1)

    with forward_only(task):
        calls = {"plain": partial(measure, theta), "jvp": partial(jvp_scores, measure, theta, imprints, vectorise=True)}
        read = clock.interleaved(calls, 5 * repeats)
    trial = Trial(TINY, 4, 1, 4, clock.device)
    with tempfile.TemporaryDirectory() as folder:
        recording = trial.train(task, model, Path(folder) / "run")
        assert recording is not None
        data = Data(tokens(TINY, 4, clock.device), device=clock.device)
        repetition = Repetition(task, data, recording)
        rows = Lineup(Sources.by_label([0, 1, 2, 3])).rows
        stack = Stack(repetition, rows, repeated(repetition.start(), len(rows)), plain_attention=True)
        plain = Training(repetition)
        with as_recorded(recording.circumstances):
            taken = clock.interleaved({"stack": partial(stack.step, 0), "plain": partial(plain.step, 0)}, 3 * repeats)
        whole = partial(
            imprint.simulate, task, tokens(TINY, 4, clock.device),
            Sources.by_label([0, 1, 0, 1]), imprint.Plan(engine="replay", stacked=False), run=recording, progress=False,
        )  # fmt: skip
        prepared = clock.interleaved({"simulate": whole}, max(2, repeats // 2))["simulate"]
    steps = 4 * 5 * taken["plain"]  # the run as it was, two sources and two perturbed starts
    return {
        "jvp operations": read["jvp"] / read["plain"],
        "stacked operations": taken["stack"] / taken["plain"],
        "preparation": max(0.0, prepared - steps),
    }


def measure_disk(clock: Clock, repeats: int) -> dict[str, float]:
    """Return the bytes per second at which a file of tensors is written and hashed."""
    tensor = {"rows": torch.randn(2**22)}

    def write() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.safetensors"
            save_file(tensor, path)
            with path.open("rb+") as file:
                hashlib.sha256(file.read()).hexdigest()
                os.fsync(file.fileno())

    return {"disk": 2**24 / clock.interleaved({"write": write}, repeats)["write"]}


def describe(clock: Clock) -> str:
    """Say which device it is."""
    if clock.device.type == "cuda":
        return f"{torch.cuda.get_device_name(clock.device)}, torch {torch.__version__}"
    return f"{torch.get_num_threads()} CPU thread, torch {torch.__version__}, float32, {clock.name}"


def measure_constants(clock: Clock, command: str, repeats: int, *, small: bool = False) -> Device:
    """Measure all constants that need no whole operation."""
    sizes = SMALL if small else CUDA if clock.device.type == "cuda" else CPU
    rates, counts = measure_rates(clock, sizes, repeats)
    memory = measure_memory(clock, sizes, repeats)
    found = {
        "dispatch": counts["dispatch"],
        "block operations, forward": counts["forward"],
        "block operations, training": counts["training"],
        **memory,
        **measure_recorder(clock, memory["bandwidth"], repeats),
        **measure_overheads(clock, repeats),
        **measure_disk(clock, repeats),
    }
    source = f"{command}, {datetime.date.today().isoformat()}"
    return Device(
        describe(clock), clock.device.type == "cuda", {name: Constant(value, source) for name, value in found.items()},
        rates["forward"], rates["training"], source,
    )  # fmt: skip
