"""Measures whole operations of small models, fits what a device's constants leave open, and checks the rest.

Points of three shapes are fitted; points of other widths, depths, numbers of sources and ranks are held out.
"""

import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cost_clock import Clock
from cost_models import Trial, build, private_task, tokens
from torch import Tensor

import imprint
from imprint import language
from imprint.advice import stages
from imprint.advice.devices import Constant, Device
from imprint.advice.shapes import Carrier, Shape
from imprint.readout.kernels import forward_only, jvp_scores


@dataclass(frozen=True)
class Case:
    """A small model and what is asked of it.

    short, long: steps of a path, or directions of a curvature.
    """

    shape: Shape
    sources: int
    examples: int
    batch: int
    steps: int
    path: int
    directions: int
    carriers: tuple[str, ...]
    queries: int
    fits: bool


def cases(device: str) -> list[Case]:
    """List the cases: three that are fitted, and others of other shapes that are held out.

    The last two were added when the form of the model was settled, and say what it is worth on shapes it never saw.
    """
    if device == "cuda":
        return [
            Case(Shape(4, 512, 4096, 256), 8, 128, 32, 12, 4, 10, ("last:1", "lora:8"), 8, True),
            Case(Shape(8, 768, 4096, 256), 12, 96, 16, 12, 6, 20, ("last:2", "lora:4"), 8, True),
            Case(Shape(4, 1024, 4096, 256), 16, 64, 16, 12, 4, 15, ("last:1", "lora:16"), 16, True),
            Case(Shape(6, 640, 8192, 256), 24, 96, 24, 12, 5, 12, ("last:3", "lora:12"), 4, False),
            Case(Shape(12, 512, 4096, 256), 10, 80, 16, 10, 3, 16, ("last:4", "lora:2"), 12, False),
            Case(Shape(3, 1280, 4096, 256), 20, 60, 12, 10, 4, 24, ("last:2", "lora:6"), 8, False),
            Case(Shape(5, 896, 4096, 256), 14, 70, 14, 10, 6, 8, ("last:5", "lora:3"), 16, False),
        ]
    return [
        Case(Shape(2, 128, 512, 32), 8, 16, 16, 6, 2, 8, ("last:1", "lora:8"), 16, True),
        Case(Shape(4, 96, 256, 32), 6, 18, 18, 6, 4, 12, ("last:2", "lora:4"), 16, True),
        Case(Shape(2, 192, 512, 32), 12, 12, 12, 6, 3, 20, ("last:1", "lora:16"), 32, True),
        Case(Shape(3, 160, 512, 32), 16, 16, 16, 6, 5, 16, ("last:2", "lora:12"), 16, False),
        Case(Shape(6, 96, 256, 32), 10, 20, 20, 6, 3, 10, ("last:4", "lora:2"), 24, False),
        Case(Shape(2, 256, 768, 32), 7, 14, 14, 5, 2, 6, ("last:1", "lora:6"), 32, False),
        Case(Shape(3, 128, 256, 48), 11, 11, 11, 5, 6, 14, ("last:3", "lora:3"), 12, False),
        Case(Shape(4, 224, 512, 32), 9, 18, 9, 6, 3, 12, ("last:3", "lora:5"), 20, False),
        Case(Shape(5, 64, 256, 48), 13, 13, 13, 6, 4, 18, ("last:2", "lora:10"), 16, False),
    ]


def small_cases() -> list[Case]:
    """Cases of seconds, to see that everything runs."""
    carriers = ("last:1", "lora:2")
    return [
        Case(Shape(1, 32, 64, 8), 2, 4, 2, 4, 1, 2, carriers, 1, True),
        Case(Shape(2, 32, 64, 8), 3, 6, 3, 4, 1, 3, carriers, 2, False),
    ]


@dataclass(frozen=True)
class Point:
    """A measured operation, and whether it is fitted or held out; seconds, and bytes on the disk where it has some."""

    operation: str
    case: Case
    carrier: str
    seconds: float
    stored: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Point":
        case = dict(content["case"])
        case["shape"], case["carriers"] = Shape(**case["shape"]), tuple(case["carriers"])
        return cls(**{**content, "case": Case(**case)})


def predict(device: Device, point: Point) -> stages.Stage:
    """Predict a point."""
    case, shape = point.case, point.case.shape
    model = stages.Model(shape, Carrier("all"), itemsize=4)
    run = stages.Run(case.steps * case.batch * shape.length, case.batch * shape.length, compared=case.examples)
    carrier, every = Carrier.read(point.carrier), case.examples * shape.length
    match point.operation:
        case "training":
            return stages.train(device, model, run)
        case "recorded training":
            plain, added = stages.train(device, model, run), stages.record(device, model, run)
            return replace(added, seconds=plain.seconds + added.seconds)
        case "replay, stacked" | "replay, in turn":
            return stages.replay(device, model, run, case.sources, stacked=point.operation.endswith("stacked"))
        case "tangent":
            return stages.tangent(device, model, carrier, case.sources, steps=case.path, tokens=every)
        case "spectral":
            return stages.spectral(device, model, carrier, case.sources, directions=case.directions, tokens=every)
    return stages.readout(device, model, carrier, case.sources, queries=case.queries)


def measure(clock: Clock, listed: Sequence[Case], repeats: int, say: Callable[[str], None]) -> list[Point]:
    """Measure all points of all cases; the cases take turns, and every figure is a median."""
    found: dict[tuple[str, int, str], list[tuple[float, float | None]]] = {}
    for repeat in range(repeats + 1):
        for index, case in enumerate(listed):
            say(f"points: round {repeat} of {repeats}, case {index + 1} of {len(listed)}")
            for operation, carrier, seconds, stored in _measure_case(clock, case):
                if repeat:  # the first round warms up
                    found.setdefault((operation, index, carrier), []).append((seconds, stored))
    return [
        Point(operation, listed[index], carrier, median(seconds for seconds, _ in taken), taken[0][1])
        for (operation, index, carrier), taken in found.items()
    ]


def _measure_case(clock: Clock, case: Case) -> Iterator[tuple[str, str, float, float | None]]:
    shape, device = case.shape, clock.device
    model, batch = build(shape, device), tokens(shape, case.examples, device)
    trial = Trial(shape, case.examples, case.batch, case.steps, device)
    sources = imprint.Sources.by_label([example % case.sources for example in range(case.examples)])
    simulate = partial(imprint.simulate, data=batch, sources=sources, progress=False)
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder, task = Path(name), private_task(model)
        yield "training", "all", clock.once(partial(trial.train, task, private_task(model).model)), None
        task = private_task(model)
        taken = clock.once(partial(trial.train, task, task.model, folder / "run"))
        yield "recorded training", "all", taken, _size(folder / "run")
        for how in ("stacked", "in turn"):
            plan, out = imprint.Plan(engine="replay", stacked=how == "stacked"), folder / how
            taken = clock.once(partial(simulate, task, plan=plan, run=folder / "run", out=out))
            yield f"replay, {how}", "all", taken, _size(out)
        for carrier in case.carriers:
            own = language.task(model, parameters=carrier)
            plans = {
                "tangent": imprint.Plan(steps=case.path, lr=1e-4),
                "spectral": imprint.Plan(engine="spectral", steps=5, lr=1e-4, directions=case.directions),
            }
            for operation, plan in plans.items():
                if operation == "spectral" and carrier.startswith("lora"):
                    continue
                out = folder / f"{operation}-{carrier.replace(':', '-')}"
                taken = clock.once(partial(simulate, own, plan=plan, out=out))
                yield operation, carrier, taken, _size(out) if operation == "tangent" else None
            yield "readout", carrier, _time_readout(clock, own, case), None


def _size(folder: Path) -> float:
    return float(sum(file.stat().st_size for file in folder.rglob("*.safetensors")))


def _time_readout(clock: Clock, task: imprint.Task, case: Case) -> float:
    functional, theta = task.at(task.state())
    batch = tokens(case.shape, case.queries, clock.device)
    imprints = {name: torch.randn(case.sources, *p.shape, device=clock.device) for name, p in theta.items()}

    def measure(theta: Any) -> Tensor:
        return functional.measures(theta, batch, case.queries)

    def read() -> Tensor:
        return jvp_scores(measure, theta, imprints, vectorise=True)

    with forward_only(task):
        return clock.interleaved({"read": read}, 3)["read"]


GROUPS = (
    ("replay, stacked", "all", ("stacked work",)),
    ("readout", "last", ("jvp",)),
    ("readout", "lora", ("jvp, adapter",)),
    ("tangent", "last", ("settling", "response")),
    ("tangent", "lora", ("settling, adapter", "response, adapter")),
    ("spectral", "last", ("settling, spectral", "product")),
)
"""Which operation, with which kind of parameters, which constants are fitted to."""


def fit(device: Device, points: Sequence[Point], source: str) -> Device:
    """Fit what a few constants leave open, each to the points that it matters for.

    A prediction is linear in such a constant, so two predictions give its column; relative errors are least squares.
    """
    names = [name for _, _, group in GROUPS for name in group]
    known = replace(device, constants={**device.constants, **{name: Constant(0.0, source) for name in names}})
    fitting = [point for point in points if point.case.fits]
    for operation, kind, group in GROUPS:
        chosen = [p for p in fitting if p.operation == operation and p.carrier.startswith(kind)]
        rest = [predict(known, point).seconds for point in chosen]
        columns = [
            [
                predict(_with(known, name, 1.0), point).seconds - without
                for point, without in zip(chosen, rest, strict=True)
            ]
            for name in group
        ]
        scale = torch.tensor([1 / point.seconds for point in chosen], dtype=torch.float64)
        matrix = torch.tensor(columns, dtype=torch.float64).T * scale[:, None]
        missing = 1 - torch.tensor(rest, dtype=torch.float64) * scale
        for name, value in zip(group, torch.linalg.lstsq(matrix, missing).solution.tolist(), strict=True):
            known = _with(known, name, value, source)
    if bad := [name for name in names if known.constants[name].value <= 0]:
        warnings.warn(
            f"fitted constants are not positive, so the points are too noisy or too small: {bad}", stacklevel=2
        )
    return known


def _with(device: Device, name: str, value: float, source: str = "trial") -> Device:
    return replace(device, constants={**device.constants, name: Constant(value, source)})
