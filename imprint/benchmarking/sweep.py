"""How faithful scores are as the settings vary: LDS and LOO against T for several η, and against λ for T = ∞.

On the curvature frozen at a checkpoint a score is Σ_i S(μ_i) (g_q·q_i)(g_b·q_i) and what lies outside the basis: the
products are made once, and every setting is a filter on them. So settings can be swept that the engine refuses, such as
steps so long that they diverge.
"""

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from imprint.benchmarking.bench import Bench
from imprint.data import query_batches
from imprint.errors import MissingExtra
from imprint.evaluation.metrics import lds, loo
from imprint.plan import Settings
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.descent import FullBatch
from imprint.simulation.frozen import FrozenCurvature, freeze_curvature, respond
from imprint.store.files import write
from imprint.task import Parameters
from imprint.tensors.rows import Rows, along, factorable, gradients


@dataclass(frozen=True)
class Filterable:
    """What scores at one checkpoint are made of, for any setting.

    queries, examples: gradients on the basis, (queries, directions) and (examples, directions); `products` of whole
        gradients, (queries, examples).
    """

    frozen: FrozenCurvature
    queries: Tensor
    examples: Tensor
    products: Tensor

    @classmethod
    def at(cls, bench: Bench, state: Parameters, measure: str | None, directions: int) -> "Filterable":
        """Measure curvature and gradients at a state."""
        task, data = bench.protocol.task(measure), bench.protocol.train.examples
        functional, theta = task.at(task.complete(state))
        dtype = next(iter(theta.values())).dtype
        with task.evaluating():
            frozen = freeze_curvature(functional, theta, FullBatch(data, dtype), "gauss-newton", directions)
            few = data.gather(torch.arange(min(4, len(data))))
            layers = factorable(functional, theta, few, min(4, len(data)))
            parts = [
                gradients(functional.losses, theta, batch, len(indices), task, layers)
                for indices, batch in data.batches()
            ]
            own = Rows.joined(parts)
            asked = [
                gradients(functional.measures, theta, batch, count, task, layers)
                for count, batch in query_batches(
                    bench.protocol.queries, device=data.device, batch_size=500, collate_fn=None
                )
            ]
            queries = Rows.joined(asked)
            return cls(
                frozen,
                along(queries, frozen.basis).double(),
                along(own, frozen.basis).double(),
                queries.dots(own, theta).double(),
            )

    def scores(self, settings: Settings, lr: float) -> Tensor:
        """s(b, q) under some settings, (queries, examples)."""
        inside = respond(self.frozen.values, settings, lr).to(self.products)
        outside = self.frozen.outside(settings, lr)
        return -((self.queries * (inside - outside)) @ self.examples.T + outside * self.products)

    def swept(self, steps: int | None, relative: float, damping: float) -> Tensor:
        """The same up to a factor, without which diverged scores would be too large to be correlated.

        relative, damping: η times the largest curvature, and λ in units of it; `steps` is None for T = ∞.
        """
        largest = self.frozen.largest
        lr = relative / largest if steps else 1.0
        found = self.scores(Settings(steps or "infinite", lr, damping * largest, 1.0), lr)
        return found / found.abs().max()


@dataclass(frozen=True)
class Point:
    """One setting and what it reached; `steps` is None for T = ∞, `relative` is ημ and `damping` λ/μ, μ the largest."""

    steps: int | None
    relative: float
    damping: float
    lds: float
    loo: float | None


STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000)
RELATIVE = (0.01, 0.1, 1.0, 2.2)  # of 1/μ: slow, middling, good, unstable
DAMPINGS = tuple(float(value) for value in np.geomspace(1e-4, 1, 9))  # of μ
GRID: tuple[tuple[int | None, float, float], ...] = (
    *((steps, relative, 0.0) for relative in RELATIVE for steps in STEPS),
    *((None, 0.0, damping) for damping in DAMPINGS),
)


def called(checkpoint: int, directions: int, leave_one_out: bool) -> str:
    """The name of a sweep's files, without the ending."""
    return f"sweep-{checkpoint}-{directions}{'-loo' if leave_one_out else ''}"


def sweep(
    bench: Bench,
    checkpoint: int = 0,
    *,
    directions: int = 300,
    leave_one_out: bool = False,
    progress: bool | Advance = True,
) -> list[Point]:
    """Every setting of the grid at one checkpoint (by number) of the first run; kept in the benchmark's folder."""
    place = bench.out / f"{called(checkpoint, directions, leave_one_out)}.json"
    points = [Point(**each) for each in json.loads(place.read_text())] if place.is_file() else []
    if [(point.steps, point.relative, point.damping) for point in points] != list(GRID[: len(points)]):
        points = []  # of another grid
    with closing(Progress("sweeping", len(GRID), "settings", progress)) as bar:
        bar.skip(len(points))
        if len(points) == len(GRID):
            return points
        truths, state = bench.once, bench.states([0])[0][checkpoint]
        margin = Filterable.at(bench, state, "margin", directions)
        loss = Filterable.at(bench, state, None, directions) if leave_one_out else None
        for steps, relative, damping in GRID[len(points) :]:
            found = margin.swept(steps, relative, damping)
            fidelity = float(np.mean([lds(found, truth).estimate.value for truth in truths]))
            single = None
            if loss is not None:
                single = loo(loss.swept(steps, relative, damping), bench.loo_truth).estimate.value
            points.append(Point(steps, relative, damping, fidelity, single))
            text = json.dumps([asdict(point) for point in points], indent=1)
            write(place, lambda path, text=text: path.write_text(text))  # type: ignore[misc]
            bar.advance()
    return points


def draw(points: list[Point], path: str | os.PathLike[str], title: str) -> None:
    """LDS, and LOO where it is known, against T for every η and against λ."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtra("a picture of a sweep", "report") from error
    kinds = ["lds", *(["loo"] if points[0].loo is not None else [])]
    figure, axes = plt.subplots(len(kinds), 2, figsize=(9, 3.4 * len(kinds)), squeeze=False, layout="constrained")
    for row, kind in zip(axes, kinds, strict=True):
        for relative in RELATIVE:
            line = [point for point in points if point.relative == relative and point.steps is not None]
            row[0].plot(
                [p.steps for p in line], [getattr(p, kind) for p in line], "o-", label=f"η = {relative:g}/μ", ms=3
            )
        damped = [point for point in points if point.steps is None]
        row[1].plot([p.damping for p in damped], [getattr(p, kind) for p in damped], "o-", color="0.3", ms=3)
        for axis, label in zip(row, ("T, steps", "λ/μ at T = ∞"), strict=True):
            axis.set_xscale("log")
            axis.set_xlabel(label)
            axis.set_ylabel(kind.upper())
        row[0].legend(fontsize=8)
    figure.suptitle(title)
    write(Path(path), lambda beside: figure.savefig(beside, dpi=140))
    plt.close(figure)
