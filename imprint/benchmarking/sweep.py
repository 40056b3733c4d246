"""Measures how faithful scores are as settings vary: LDS and LOO against steps for several lr, and against damping.

With the curvature frozen at a checkpoint a score is Σ_i S(μ_i) (g_q·q_i)(g_b·q_i) plus a part outside the basis. The
products are computed once, and every setting is a filter S on them. A sweep therefore includes settings that the engine
refuses, such as steps so long that they diverge.
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
from imprint.plan import Question, Settings
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.descent import FullBatch
from imprint.simulation.frozen import FrozenCurvature, freeze_curvature, respond
from imprint.store.files import write
from imprint.task import Parameters
from imprint.tensors.rows import Rows, along, factorable, gradients


@dataclass(frozen=True)
class ScoreParts:
    """The parts from which scores at one checkpoint can be computed under any settings.

    queries, examples: gradients projected onto the basis, (queries, directions) and (examples, directions).
    products: dot products of full gradients, (queries, examples).
    """

    frozen: FrozenCurvature
    queries: Tensor
    examples: Tensor
    products: Tensor

    @classmethod
    def at(cls, bench: Bench, state: Parameters, measure: str | None, directions: int) -> "ScoreParts":
        """Measure curvature and gradients at a state."""
        task, data = bench.protocol.build_task(measure), bench.protocol.train.examples
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
        """Return s(b, q) under some settings, (queries, examples)."""
        inside = respond(self.frozen.values, settings, lr).to(self.products)
        outside = self.frozen.outside(settings, lr)
        return -((self.queries * (inside - outside)) @ self.examples.T + outside * self.products)

    def normalised_scores(self, steps: int | None, relative: float, damping: float) -> Tensor:
        """Return scores scaled to at most 1: diverged scores would be too large to correlate.

        steps: None for infinitely many. relative: lr times the largest curvature; `damping` is in units of it.
        """
        largest = self.frozen.largest
        lr = relative / largest if steps else 1.0
        found = self.scores(Settings(steps or "infinite", lr, damping * largest, 1.0), lr)
        return found / found.abs().max()


@dataclass(frozen=True)
class SweepResult:
    """The settings of one simulation, as in `ScoreParts.normalised_scores`, and the correlations they reach.

    question: which one the ground truth answers.
    """

    steps: int | None
    relative: float
    damping: float
    lds: float
    loo: float | None
    question: Question = "expected"


STEPS = (1, 3, 10, 30, 100, 300, 1000, 3000)
RELATIVE = (0.01, 0.1, 1.0, 2.2)  # lr times the largest curvature: slow, moderate, good, unstable
DAMPINGS = tuple(float(value) for value in np.geomspace(1e-4, 1, 9))  # in units of the largest curvature
GRID: tuple[tuple[int | None, float, float], ...] = (
    *((steps, relative, 0.0) for relative in RELATIVE for steps in STEPS),
    *((None, 0.0, damping) for damping in DAMPINGS),
)


def name_sweep(checkpoint: int, directions: int, leave_one_out: bool) -> str:
    """Return the name of a sweep's files, without the extension."""
    return f"sweep-{checkpoint}-{directions}{'-loo' if leave_one_out else ''}"


def sweep(
    bench: Bench,
    checkpoint: int = 0,
    *,
    directions: int = 300,
    leave_one_out: bool = False,
    progress: bool | Advance = True,
) -> list[SweepResult]:
    """Score all settings of the grid at one checkpoint of the first run, and keep results in the benchmark's folder."""
    place = bench.out / f"{name_sweep(checkpoint, directions, leave_one_out)}.json"
    results = [SweepResult(**each) for each in json.loads(place.read_text())] if place.is_file() else []
    if [(result.steps, result.relative, result.damping) for result in results] != list(GRID[: len(results)]):
        results = []  # the file is of another grid
    with closing(Progress("sweeping", len(GRID), "settings", progress)) as bar:
        bar.skip(len(results))
        if len(results) == len(GRID):
            return results
        truths, state = bench.first_runs, bench.states([0])[0][checkpoint]
        margin = ScoreParts.at(bench, state, "margin", directions)
        loss = ScoreParts.at(bench, state, None, directions) if leave_one_out else None
        for steps, relative, damping in GRID[len(results) :]:
            found = margin.normalised_scores(steps, relative, damping)
            fidelity = float(np.mean([lds(found, truth).estimate.value for truth in truths]))
            single = None
            if loss is not None:
                single = loo(loss.normalised_scores(steps, relative, damping), bench.loo_truth).estimate.value
            results.append(SweepResult(steps, relative, damping, fidelity, single, truths[0].question))
            text = json.dumps([asdict(result) for result in results], indent=1)
            write(place, lambda path, text=text: path.write_text(text))  # type: ignore[misc]
            bar.advance()
    return results


def plot_sweep(results: list[SweepResult], path: str | os.PathLike[str], title: str) -> None:
    """Draw LDS, and LOO where it is known, against the steps for each lr, and against damping."""
    try:
        from matplotlib import pyplot as plt
    except ImportError as error:
        raise MissingExtra("plotting a sweep", "report") from error
    statistics = ["lds", *(["loo"] if results[0].loo is not None else [])]
    figure, axes = plt.subplots(
        len(statistics), 2, figsize=(9, 3.4 * len(statistics)), squeeze=False, layout="constrained"
    )
    for row, statistic in zip(axes, statistics, strict=True):
        for relative in RELATIVE:
            line = [result for result in results if result.relative == relative and result.steps is not None]
            row[0].plot(
                [p.steps for p in line], [getattr(p, statistic) for p in line], "o-", label=f"lr = {relative:g}/μ", ms=3
            )
        damped = [result for result in results if result.steps is None]
        row[1].plot([p.damping for p in damped], [getattr(p, statistic) for p in damped], "o-", color="0.3", ms=3)
        for axis, label in zip(row, ("steps", "damping/μ, infinite steps"), strict=True):
            axis.set_xscale("log")
            axis.set_xlabel(label)
            axis.set_ylabel(statistic.upper())
        row[0].legend(fontsize=8)
    figure.suptitle(title)
    write(Path(path), lambda beside: figure.savefig(beside, dpi=140))
    plt.close(figure)
