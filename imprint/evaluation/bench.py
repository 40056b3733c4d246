"""The benchmark: scores of several methods against the same truths, with intervals, time and memory.

A protocol fixes what is trained and with which seeds: `DRAWS` of random halves, each retrained once, and training runs
that attribution starts from. Everything is kept in a folder, so that a benchmark that was interrupted goes on.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from imprint.attribution import attribute
from imprint.errors import MissingExtra, StoreError
from imprint.evaluation.metrics import lds, loo, predicted_lds
from imprint.evaluation.retraining import Together, retrain
from imprint.evaluation.statistics import Array, Estimate, ceiling, mean_estimate, ranks
from imprint.evaluation.subsets import ORDER, Subsets, derived
from imprint.evaluation.training import train_together
from imprint.evaluation.truth import Truth
from imprint.files import Lock, nearest_folder, write
from imprint.memory import Peak
from imprint.progress import Advance
from imprint.simulation.plan import Plan
from imprint.simulation.run import simulate
from imprint.sources import Sources
from imprint.task import Batch, Parameters, Task

DRAWS = (1, 2, 3)  # seeds of halves and of their retraining; whatever was tuned was tuned on seeds from 100 on
RUNS = 31_000  # seeds of the training runs begin here


@dataclass(frozen=True)
class Protocol:
    """What a benchmark trains and measures.

    checkpoints: epochs after which a training run is kept, the last one besides.
    halves: how many random halves in each draw; `runs` of each half tell the noise, only the first is compared with.
    path: the plan of the path from the first checkpoint, where one was settled.
    """

    name: str
    train: Together
    queries: Batch
    checkpoints: tuple[int, ...]
    draws: tuple[int, ...] = DRAWS
    halves: int = 100
    runs: int = 2
    path: Plan | None = None

    @property
    def epochs(self) -> list[int]:
        """After which a training run is kept."""
        return sorted({*self.checkpoints, self.train.training.epochs})

    def task(self, measure: str | None = None) -> Task:
        """The task of a fresh model, on the device of the data."""
        made = self.train.task_of(self.train.build().to(self.train.examples.device))
        return Task(
            made.model,
            outputs=made.outputs,
            output_loss=made.output_loss,
            regulariser=made.regulariser,
            measure=measure,
        )


@dataclass(frozen=True)
class Scored:
    """Scores of every training example on every query, (queries, examples), where positive helps; and what they took.

    halves: the scores are of the halves of all draws instead, (queries, draws × halves): a half is a source too.
    prepare: seconds before any query is known; `query` seconds for all queries. bytes: what is kept in between.
    """

    scores: Tensor
    prepare: float
    query: float
    peak_bytes: int | None = None
    bytes: int = 0
    note: str = ""
    halves: bool = False


Kind = Literal["lds", "loo"]
_KINDS: tuple[Kind, ...] = ("lds", "loo")
Method = Callable[["Bench", int], Scored]
"""scores from training run number i, and where it wants more runs from those after it."""


class Bench:
    """The folder of a benchmark."""

    def __init__(self, protocol: Protocol, out: str | os.PathLike[str], progress: bool | Advance = True) -> None:
        self.protocol, self.out, self._progress = protocol, Path(out), progress
        nearest_folder(out)  # refuses a file
        self.out.mkdir(parents=True, exist_ok=True)
        about = json.dumps(
            {
                "protocol": protocol.name,
                "draws": protocol.draws,
                "halves": protocol.halves,
                "epochs": protocol.epochs,
                "path": protocol.path and protocol.path.to_json(),
            }
        )
        place = self.out / "bench.json"
        if place.is_file() and place.read_text() != about:
            raise StoreError(f"{self.out} holds another benchmark: give a new folder.")
        write(place, lambda path: path.write_text(about))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other process in the folder for a while."""
        lock = Lock(self.out)
        try:
            yield
        finally:
            lock.release()

    @cached_property
    def truths(self) -> list[Truth]:
        """One for each draw of halves; F is the margin, whose ranks are those of the loss."""
        p, n = self.protocol, len(self.protocol.train.examples)
        return [
            retrain(
                p.train,
                p.task("margin"),
                p.queries,
                Subsets.halves(n, p.halves, seed=draw),
                runs=p.runs,
                seed=draw,
                out=self.out / f"truth-{draw}",
                progress=self._progress,
            )
            for draw in p.draws
        ]

    @property
    def once(self) -> list[Truth]:
        """The truths with the first retraining of each half alone: what scores are compared with."""
        return [replace(truth, values=truth.values[:1]) for truth in self.truths]

    @cached_property
    def loo_truth(self) -> Truth:
        """Without each example, all models from one seed and without shuffling; F is the loss."""
        p = self.protocol
        train = replace(p.train, training=replace(p.train.training, shuffle=False))
        subsets = Subsets.without_each(len(p.train.examples))
        return retrain(train, p.task(), p.queries, subsets, seed=0, out=self.out / "loo", progress=self._progress)

    def states(self, runs: Sequence[int], halves: bool = False) -> list[list[Parameters]]:
        """The checkpoints of training runs, the last being the trained model; `halves` trains on random halves."""
        missing = [run for run in runs if not self._state(run, halves).is_file()]
        if missing:
            self._train(missing, halves)
        found = []
        for run in runs:
            tensors = load_file(self._state(run, halves), str(self.protocol.train.examples.device))
            found.append([_below(f"{epoch}/", tensors) for epoch in self.protocol.epochs])
        return found

    def _train(self, runs: list[int], halves: bool) -> None:
        p, n = self.protocol, len(self.protocol.train.examples)
        seeds = [derived(RUNS + run, int(halves)) for run in runs]
        everyone = torch.arange(n)
        subsets = [self._half(seed, n) if halves else everyone for seed in seeds]
        kept = train_together(
            p.train.build,
            p.train.task_of,
            p.train.examples,
            subsets,
            seeds,
            p.train.training,
            orders=[derived(seed, ORDER) for seed in seeds],
            record=p.checkpoints,
        )
        for index, run in enumerate(runs):
            tensors = {f"{epoch}/{name}": t[index].cpu() for epoch, stack in kept.items() for name, t in stack.items()}
            write(self._state(run, halves), lambda path, tensors=tensors: save_file(tensors, path))  # type: ignore[misc]

    def _half(self, seed: int, n: int) -> Tensor:
        return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(n, n // 2, replace=False)))

    def _state(self, run: int, halves: bool) -> Path:
        return self.out / "runs" / f"{'half' if halves else 'full'}-{run:03}.safetensors"

    def scored(self, name: str, method: Method, run: int) -> Scored:
        """The scores of a method from one training run, as kept or made now."""
        place = self.out / "scores" / f"{name}-{run}.safetensors"
        if place.is_file():
            with safe_open(place, framework="pt") as file:
                return Scored(file.get_tensor("scores"), **json.loads(file.metadata()["imprint"]))
        peak = Peak(self.protocol.train.examples.device)
        found = method(self, run)
        found = replace(
            found, scores=found.scores.float().cpu().contiguous(), peak_bytes=found.peak_bytes or peak.bytes
        )
        about = {key: value for key, value in asdict(replace(found, scores=torch.empty(0))).items() if key != "scores"}
        metadata = {"imprint": json.dumps(about)}
        write(place, lambda path: save_file({"scores": found.scores}, path, metadata))
        return found

    def compared(self, methods: dict[str, Method], runs: Sequence[int], leave_one_out: bool = False) -> "Comparison":
        """Every method from every run against every truth."""
        scored = {name: [self.scored(name, method, run) for run in runs] for name, method in methods.items()}
        values = {name: np.concatenate([self._lds(each) for each in found]) for name, found in scored.items()}
        singles = {}
        if leave_one_out:  # positive helps, that is, lowers the loss
            singles = {
                name: np.stack([loo(-each.scores.double(), self.loo_truth).per_query for each in found])
                for name, found in scored.items()
                if not any(each.halves for each in found)
            }
        limits = [ceiling(ranks(truth.values.transpose(1, 2).numpy()), 1) for truth in self.truths]
        costs = {name: [replace(each, scores=torch.empty(0)) for each in found] for name, found in scored.items()}
        return Comparison(self.protocol.name, values, singles, costs, float(np.mean(limits)))

    def _lds(self, scored: Scored) -> Array:
        """Against the first retraining of each half, shape (draws, queries)."""
        if not scored.halves:
            return np.stack([lds(scored.scores.double(), truth).per_query for truth in self.once])
        predicted = torch.split(scored.scores.double(), self.protocol.halves, dim=1)
        return np.stack(
            [predicted_lds(each, truth).per_query for each, truth in zip(predicted, self.once, strict=True)]
        )


@dataclass(frozen=True)
class Comparison:
    """What a benchmark found: correlations of each method, (runs × draws, queries), and what its scores took."""

    name: str
    lds: dict[str, Array]
    loo: dict[str, Array]
    costs: dict[str, list[Scored]]
    ceiling: float

    @property
    def first(self) -> str:
        """The method that the others are held against."""
        return next(iter(self.lds))

    def estimate(self, method: str, kind: Kind = "lds") -> Estimate:
        """The mean over runs and draws, with an interval over queries."""
        return mean_estimate(_over_runs(getattr(self, kind)[method]))

    def ahead(self, method: str, other: str, kind: Kind = "lds") -> Estimate:
        """By how much a method is ahead of another: the mean difference on the same queries."""
        table = getattr(self, kind)
        return mean_estimate(_over_runs(table[method]) - _over_runs(table[other]))

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, None for what is undefined."""
        methods = {}
        for name, costs in self.costs.items():
            found: dict[str, Any] = {"lds": _plain(self.estimate(name))}
            if name in self.loo:
                found["loo"] = _plain(self.estimate(name, "loo"))
            if name != self.first:
                found["behind"] = {
                    kind: _plain(self.ahead(self.first, name, kind))
                    for kind in _KINDS
                    if name in getattr(self, kind) and self.first in getattr(self, kind)
                }
            found |= {
                key: [getattr(cost, key) for cost in costs] for key in ("prepare", "query", "peak_bytes", "bytes")
            }
            methods[name] = {**found, "notes": sorted({cost.note for cost in costs if cost.note})}
        limit = None if np.isnan(self.ceiling) else self.ceiling
        return {"benchmark": self.name, "ceiling": limit, "methods": methods}

    def markdown(self) -> str:
        """As a table, the best first: of each correlation also how far it is behind the first method's."""
        head = ["method", "LDS", "behind", *(["LOO", "behind"] if self.loo else [])]
        lines = [
            f"| {' | '.join(head)} | before queries | all queries | peak memory | kept |",
            f"|{'---|' * len(head)}---:|---:|---:|---:|",
        ]
        for name in _best_first({name: self.estimate(name) for name in self.lds}):
            costs = self.costs[name]
            found = [*self._cells(name, "lds", 3), *(self._cells(name, "loo", 4) if self.loo else [])]
            seconds = [f"{np.median([getattr(cost, key) for cost in costs]):.3g} s" for key in ("prepare", "query")]
            sizes = [
                f"{max(getattr(cost, key) or 0 for cost in costs) / 1e6:,.0f} MB" for key in ("peak_bytes", "bytes")
            ]
            lines.append(f"| {' | '.join([name, *found, *seconds, *sizes])} |")
        if not np.isnan(self.ceiling):
            lines.append(
                f"\nA perfect predictor would reach an LDS of about {self.ceiling:.2f} against one retraining."
            )
        return "\n".join(lines)

    def _cells(self, name: str, kind: Kind, digits: int) -> list[str]:
        """A correlation with its interval, and how far it is behind the first method's on the same queries."""
        table = getattr(self, kind)
        if name not in table:
            return ["", ""]
        own = _shown(self.estimate(name, kind), digits)
        if name == self.first or self.first not in table:
            return [own, ""]
        return [own, _shown(self.ahead(self.first, name, kind), digits)]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Bars with their intervals, as a picture."""
        try:
            from matplotlib import pyplot as plt
        except ImportError as error:
            raise MissingExtra("plot", "report") from error
        kinds = _KINDS if self.loo else _KINDS[:1]
        figure, axes = plt.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 0.4 * len(self.lds) + 1.4), squeeze=False)
        for axis, kind in zip(axes[0], kinds, strict=True):
            every = {name: self.estimate(name, kind) for name in getattr(self, kind)}
            names = _best_first(every)[::-1]
            found = [every[name] for name in names]
            away = np.array([[e.value - e.low for e in found], [e.high - e.value for e in found]])
            colours = ["#2a6f97" if name.startswith("Imprint") else "0.7" for name in names]
            axis.barh(names, [e.value for e in found], xerr=away, color=colours, error_kw={"elinewidth": 1})
            axis.set_xlabel(kind.upper())
            if kind == "lds" and not np.isnan(self.ceiling):
                axis.axvline(self.ceiling, color="#c8553d", linestyle="--", linewidth=1)
                axis.annotate("ceiling", (self.ceiling, -0.4), color="#c8553d", ha="right", fontsize=8)
        figure.tight_layout()
        figure.savefig(path, dpi=140)
        plt.close(figure)


def _over_runs(values: Array) -> Array:
    """The mean of each query over runs and draws, NaN where none is defined."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0.0).sum(0) / there.sum(0))


def _best_first(found: dict[str, Estimate]) -> list[str]:
    """Names by value; what is undefined comes last."""
    return sorted(found, key=lambda name: -np.nan_to_num(found[name].value, nan=-np.inf))


def _plain(found: Estimate) -> dict[str, float | None]:
    return {key: None if np.isnan(value) else value for key, value in asdict(found).items()}


def _shown(found: Estimate, digits: int) -> str:
    if np.isnan(found.value):
        return "undefined"
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def _below(prefix: str, tensors: Parameters) -> Parameters:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def imprints(plan: Plan | None = None, *, runs: int = 1) -> Method:
    """Our own scores: imprints of every example at all checkpoints of one or several runs; by default `Plan.auto`."""

    def method(bench: Bench, run: int) -> Scored:
        protocol = bench.protocol
        task, data = protocol.task("margin"), protocol.train.examples
        columns, sources = data.gather(torch.arange(len(data))), Sources.per_example(len(data))
        states = [state for kept in bench.states(range(run * runs, (run + 1) * runs)) for state in kept]
        begin = time.monotonic()
        chosen = plan or Plan.auto(task, columns, sources, states, progress=False)
        store = simulate(task, columns, sources, chosen, checkpoints=states, progress=False)
        ready = time.monotonic()
        result = attribute(task, store, protocol.queries, readout="gradient", batch_size=500, progress=False)
        return Scored(result.scores, ready - begin, time.monotonic() - ready, bytes=store.bytes, note=_told(chosen))

    return method


def paths(plan: Plan, checkpoint: int) -> Method:
    """Our path engines at one checkpoint (by number), the halves themselves being the sources: the response is linear
    in the source, so that the imprint of a half is the sum of its examples'.
    """

    def method(bench: Bench, run: int) -> Scored:
        protocol = bench.protocol
        task, data = protocol.task("margin"), protocol.train.examples
        kept = torch.cat([truth.subsets.kept() for truth in bench.truths])
        sources = Sources.groups({str(index): row.nonzero().flatten().tolist() for index, row in enumerate(kept)})
        begin = time.monotonic()
        store = simulate(
            task,
            data.gather(torch.arange(len(data))),
            sources,
            plan,
            checkpoints=[bench.states([run])[0][checkpoint]],
            batch_size=len(data),
            progress=False,
        )
        ready = time.monotonic()
        result = attribute(task, store, protocol.queries, readout="gradient", batch_size=500, progress=False)
        took = time.monotonic() - ready
        return Scored(result.scores, ready - begin, took, bytes=store.bytes, note=f"{plan.engine}, halves", halves=True)

    return method


def _told(plan: Plan) -> str:
    values = ", ".join(f"{name} {value}" for name, value in plan.to_json().items() if isinstance(value, list))
    return f"{plan.engine}, {values}"
