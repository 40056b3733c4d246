"""The benchmark: scores of several methods against the same truths, with intervals, time and memory.

A protocol fixes what is trained and with which seeds: `DRAWS` of random halves, each retrained once, and training runs
that attribution starts from. Everything is kept in a folder, so that a benchmark that was interrupted goes on.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from imprint.benchmarking.comparison import Comparison, Scored, over_queries
from imprint.data import query_batches
from imprint.errors import StoreError
from imprint.evaluation.metrics import lds, loo, predicted_lds
from imprint.evaluation.retraining import Together, retrain
from imprint.evaluation.statistics import Array, ceiling, ranks
from imprint.evaluation.subsets import ORDER, Subsets, derived
from imprint.evaluation.training import initialised, train_together
from imprint.evaluation.truth import Truth
from imprint.plan import Plan
from imprint.runtime.memory import Peak
from imprint.runtime.progress import Advance
from imprint.store.files import write, write_tensors
from imprint.store.fingerprint import compare_data, of_batches, of_data, of_tensors
from imprint.store.folder import locked, make_folder
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

    def to_json(self) -> dict[str, Any]:
        """What it is, in plain JSON values: whatever is kept of another one cannot be used."""
        train, data = self.train, self.train.examples
        queries = query_batches(self.queries, device=data.device, batch_size=500, collate_fn=None)
        return {
            **{"protocol": self.name, "draws": self.draws, "halves": self.halves, "epochs": self.epochs},
            "path": self.path and self.path.to_json(),
            "training": asdict(train.training),
            "model": of_tensors(initialised(train.build, 0).state_dict()),
            **{"n": len(data), "data": of_data(data)},
            "queries": of_batches(queries),
        }


Runs = list[list[Parameters]]
"""The checkpoints of each training run."""


@dataclass(frozen=True)
class Method:
    """How examples are scored.

    score: gives scores from training runs, under one setting or several, of which the best counts.
    key: what scores depend on beside the benchmark, in plain JSON values: under another key they are made anew.
    runs: from how many training runs; `halves`: of models that were trained on random halves of the data.
    """

    score: Callable[["Bench", Runs], Iterable[Scored]]
    key: dict[str, Any]
    runs: int = 1
    halves: bool = False

    def told(self) -> str:
        """Its key as a text."""
        return json.dumps({**self.key, "runs": self.runs, "halves": self.halves}, sort_keys=True)


class Bench:
    """The folder of a benchmark."""

    def __init__(self, protocol: Protocol, out: str | os.PathLike[str], progress: bool | Advance = True) -> None:
        self.protocol, self.out, self._progress = protocol, Path(out), progress
        make_folder(self.out, "the benchmark", "bench.json")
        about = protocol.to_json()
        place = self.out / "bench.json"
        if place.is_file() and (different := _find_difference(place.read_text(), about)):
            raise StoreError(f"{self.out} holds another benchmark: {different}. Give a new folder.")
        write(place, lambda path: path.write_text(json.dumps(about)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes out of the folder for a while."""
        with locked(self.out):
            yield

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
            write_tensors(self._state(run, halves), tensors)

    def _half(self, seed: int, n: int) -> Tensor:
        return torch.from_numpy(np.sort(np.random.default_rng(seed).choice(n, n // 2, replace=False)))

    def _state(self, run: int, halves: bool) -> Path:
        return self.out / "runs" / f"{'half' if halves else 'full'}-{run:03}.safetensors"

    def score(self, method: Method, run: int, leave_one_out: bool = False) -> Scored:
        """Scores of a method, made now; where it takes several training runs, every number has its own."""
        states = self.states(range(run * method.runs, (run + 1) * method.runs), method.halves)
        peak = Peak(self.protocol.train.examples.device)
        found = [replace(each, scores=each.scores.cpu()) for each in method.score(self, states)]
        peak_bytes = peak.bytes
        return replace(self._best(found, leave_one_out), peak_bytes=peak_bytes)

    def _best(self, found: list[Scored], leave_one_out: bool) -> Scored:
        """The best by LDS and, apart from it, by LOO; scores that are not finite do not count."""
        finite = [each for each in found if bool(each.scores.isfinite().all())]
        if not finite:
            blind = torch.zeros_like(found[0].scores)
            single_blind = blind if leave_one_out else None
            return replace(found[0], scores=blind, note="not finite", tried=len(found), loo_scores=single_blind)
        if len(found) == 1:
            return found[0]
        best = max(finite, key=lambda each: _height(self._lds(each)))
        if not leave_one_out:
            return replace(best, note=f"{best.note}, the best of {len(finite)}", tried=len(found))
        single = max(finite, key=lambda each: _height(self._loo(each)))
        note = f"{best.note} by LDS and {single.note} by LOO, the best of {len(finite)}"
        return replace(best, note=note, tried=len(found), loo_scores=single.scores)

    def scored(self, name: str, method: Method, run: int, leave_one_out: bool = False) -> Scored:
        """The scores of a method from one training run, as kept or made now."""
        place = self.out / "scores" / f"{name}-{run}.safetensors"
        kept = _kept(place, method) if place.is_file() else None
        if kept and (kept.tried == 1 or not leave_one_out or kept.loo_scores is not None):
            return kept
        found = self.score(method, run, leave_one_out)
        tensors = {"scores": _single(found.scores)}
        if found.loo_scores is not None:
            tensors["loo_scores"] = _single(found.loo_scores)
        about = {key: value for key, value in vars(found).items() if key not in ("scores", "loo_scores")}
        metadata = {"imprint": json.dumps(about), "method": method.told()}
        write_tensors(place, tensors, metadata)
        return replace(found, scores=tensors["scores"], loo_scores=tensors.get("loo_scores"))

    def compared(self, methods: dict[str, Method], runs: Sequence[int], leave_one_out: bool = False) -> Comparison:
        """Every method from every run against every truth."""
        limits = [ceiling(ranks(truth.values.transpose(1, 2).numpy()), 1) for truth in self.truths]
        scored = {
            name: [self.scored(name, method, run, leave_one_out) for run in runs] for name, method in methods.items()
        }
        values = {name: np.concatenate([self._lds(each) for each in found]) for name, found in scored.items()}
        singles = {}
        if leave_one_out:
            singles = {
                name: np.concatenate([self._loo(each) for each in found])
                for name, found in scored.items()
                if not any(each.halves for each in found)
            }
        costs = {
            name: [replace(each, scores=torch.empty(0), loo_scores=None) for each in found]
            for name, found in scored.items()
        }
        return Comparison(self.protocol.name, values, singles, costs, float(np.mean(limits)))

    def _loo(self, scored: Scored) -> Array:
        """Against models without each example, shape (1, queries): positive helps, that is, lowers the loss."""
        scores = scored.scores if scored.loo_scores is None else scored.loo_scores
        return loo(-scores.double(), self.loo_truth).per_query[None]

    def _lds(self, scored: Scored) -> Array:
        """Against the first retraining of each half, shape (draws, queries)."""
        if not scored.halves:
            return np.stack([lds(scored.scores.double(), truth).per_query for truth in self.once])
        predicted = torch.split(scored.scores.double(), self.protocol.halves, dim=1)
        return np.stack(
            [predicted_lds(each, truth).per_query for each, truth in zip(predicted, self.once, strict=True)]
        )


def _height(values: Array) -> float:
    """By which settings are compared: the mean over queries, the lowest of all where it is undefined."""
    return float(np.nan_to_num(over_queries(values).value, nan=-np.inf))


def _find_difference(text: str, about: dict[str, Any]) -> str | None:
    """Name what a kept description has otherwise; earlier versions hashed a sample of the data."""
    try:
        kept = json.loads(text)
        data = compare_data(kept.pop("data"), about["data"], about["n"])
    except (ValueError, KeyError, AttributeError):
        return "its bench.json is no description of one"
    if not data.same:
        return f"the data changed{data.remark}"
    now = json.loads(json.dumps(about))
    for name, was in kept.items():
        if now.get(name) != was:
            return f"its {name} changed"
    data.warn()
    return None


def _single(scores: Tensor) -> Tensor:
    """A copy as it is kept: in single precision, with memory of its own."""
    return scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _kept(place: Path, method: Method) -> Scored | None:
    """The scores in a file, if they are of this method."""
    with safe_open(place, framework="pt") as file:
        about = file.metadata()
        if about.get("method") != method.told():
            return None
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    return Scored(**tensors, **json.loads(about["imprint"]))


def _below(prefix: str, tensors: Parameters) -> Parameters:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
