"""Runs benchmarks: scores of several methods against the same ground truth, with intervals, time and memory.

A protocol fixes what is trained and with which seeds: `DRAWS` of random halves, each retrained, and the training runs
that are attributed. Everything is kept in a folder, so an interrupted benchmark resumes.
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

from imprint.benchmarking.comparison import Comparison, MethodScores, average_queries
from imprint.data import query_batches
from imprint.errors import StoreError
from imprint.evaluation.metrics import lds, loo, predicted_lds
from imprint.evaluation.retraining import retrain
from imprint.evaluation.subsets import ORDER, Subsets, derive_seed
from imprint.evaluation.together import Together
from imprint.evaluation.training import initialise, train_together
from imprint.evaluation.truth import Truth
from imprint.plan import Plan
from imprint.runtime.memory import Peak
from imprint.runtime.progress import Advance
from imprint.statistics import Array, ceiling, ranks
from imprint.store.files import write, write_tensors
from imprint.store.fingerprint import compare_data, of_batches, of_data, of_tensors
from imprint.store.folder import locked, make_folder
from imprint.task import Batch, Parameters, Task

DRAWS = (1, 2, 3)  # seeds of halves and of their retraining; tuning used seeds from 100 on
RUNS = 31_000  # the first seed of the training runs


@dataclass(frozen=True)
class Protocol:
    """What a benchmark trains and measures.

    checkpoints: the epochs after which checkpoints are kept, besides the last.
    halves: how many random halves each draw has. Of the `runs` of each half, the first is compared with and the others
        show the noise.
    path: the plan of a path from the first checkpoint, if there is one.
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
        """The epochs after which checkpoints are kept."""
        return sorted({*self.checkpoints, self.train.training.epochs})

    def build_task(self, measure: str | None = None) -> Task:
        """Build the task of a fresh model, on the device of the data."""
        made = self.train.task_of(self.train.build().to(self.train.examples.device))
        return Task(
            made.model,
            outputs=made.outputs,
            output_loss=made.output_loss,
            regulariser=made.regulariser,
            measure=measure,
        )

    def to_json(self) -> dict[str, Any]:
        """Describe the protocol in plain JSON values; results of another protocol cannot be reused."""
        train, data = self.train, self.train.examples
        queries = query_batches(self.queries, device=data.device, batch_size=500, collate_fn=None)
        return {
            **{"protocol": self.name, "draws": self.draws, "halves": self.halves, "epochs": self.epochs},
            "path": self.path and self.path.to_json(),
            "training": asdict(train.training),
            "model": of_tensors(initialise(train.build, 0).state_dict()),
            **{"n": len(data), "data": of_data(data)},
            "queries": of_batches(queries),
        }


Runs = list[list[Parameters]]
"""The checkpoints of each training run."""


@dataclass(frozen=True)
class Method:
    """A way to score examples.

    score: returns scores from training runs, in one variant or several, of which the best counts.
    key: what scores depend on besides the benchmark, in plain JSON values; scores under another key are recomputed.
    runs: how many training runs it takes; with `halves`, of models trained on random halves of the data.
    """

    score: Callable[["Bench", Runs], Iterable[MethodScores]]
    key: dict[str, Any]
    runs: int = 1
    halves: bool = False

    def key_text(self) -> str:
        """Return the key as a string."""
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
        """Keep other processes out of the folder."""
        with locked(self.out):
            yield

    @cached_property
    def truths(self) -> list[Truth]:
        """The ground truth of each draw of halves; F is the margin, whose ranks are those of the loss."""
        p, n = self.protocol, len(self.protocol.train.examples)
        return [
            retrain(
                p.train,
                p.build_task("margin"),
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
    def first_runs(self) -> list[Truth]:
        """The ground truth with only the first retraining of each half, which scores are compared with."""
        return [replace(truth, values=truth.values[:1]) for truth in self.truths]

    @cached_property
    def loo_truth(self) -> Truth:
        """The ground truth without each example, all models trained from one seed without shuffling; F is the loss."""
        p = self.protocol
        train = replace(p.train, training=replace(p.train.training, shuffle=False))
        subsets = Subsets.without_each(len(p.train.examples))
        return retrain(train, p.build_task(), p.queries, subsets, seed=0, out=self.out / "loo", progress=self._progress)

    def states(self, runs: Sequence[int], halves: bool = False) -> list[list[Parameters]]:
        """Load the checkpoints of training runs, training them if needed; `halves` trains on random halves."""
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
        seeds = [derive_seed(RUNS + run, int(halves)) for run in runs]
        subsets = [torch.arange(n)] * len(seeds)
        if halves:
            chosen = (np.random.default_rng(seed).choice(n, n // 2, replace=False) for seed in seeds)
            subsets = [torch.from_numpy(np.sort(half)) for half in chosen]
        kept = train_together(
            p.train.build,
            p.train.task_of,
            p.train.examples,
            subsets,
            seeds,
            p.train.training,
            orders=[derive_seed(seed, ORDER) for seed in seeds],
            record=p.checkpoints,
        )
        for index, run in enumerate(runs):
            tensors = {f"{epoch}/{name}": t[index].cpu() for epoch, stack in kept.items() for name, t in stack.items()}
            write_tensors(self._state(run, halves), tensors)

    def _state(self, run: int, halves: bool) -> Path:
        return self.out / "runs" / f"{'half' if halves else 'full'}-{run:03}.safetensors"

    def score(self, method: Method, run: int, leave_one_out: bool = False) -> MethodScores:
        """Compute the scores of a method; run number `run` has its own training runs where the method takes several."""
        states = self.states(range(run * method.runs, (run + 1) * method.runs), method.halves)
        peak = Peak(self.protocol.train.examples.device)
        found = [replace(each, scores=each.scores.cpu()) for each in method.score(self, states)]
        peak_bytes = peak.bytes
        return replace(self._choose_best(found, leave_one_out), peak_bytes=peak_bytes)

    def _choose_best(self, found: list[MethodScores], leave_one_out: bool) -> MethodScores:
        """Choose the best variant by LDS, and another by LOO; ignore scores that are not finite."""
        finite = [each for each in found if bool(each.scores.isfinite().all())]
        if not finite:
            blind = torch.zeros_like(found[0].scores)
            single_blind = blind if leave_one_out else None
            return replace(found[0], scores=blind, note="not finite", tried=len(found), loo_scores=single_blind)
        if len(found) == 1:
            return found[0]
        best = max(finite, key=lambda each: _mean_or_lowest(self._measure_lds(each)))
        if not leave_one_out:
            return replace(best, note=f"{best.note}, the best of {len(finite)}", tried=len(found))
        single = max(finite, key=lambda each: _mean_or_lowest(self._measure_loo(each)))
        note = f"{best.note} by LDS and {single.note} by LOO, the best of {len(finite)}"
        return replace(best, note=note, tried=len(found), loo_scores=single.scores)

    def scored(self, name: str, method: Method, run: int, leave_one_out: bool = False) -> MethodScores:
        """Load the scores of a method from one training run, or compute them."""
        place = self.out / "scores" / f"{name}-{run}.safetensors"
        kept = _load_scores(place, method) if place.is_file() else None
        if kept and (kept.tried == 1 or not leave_one_out or kept.loo_scores is not None):
            return kept
        found = self.score(method, run, leave_one_out)
        tensors = {"scores": _to_float32(found.scores)}
        if found.loo_scores is not None:
            tensors["loo_scores"] = _to_float32(found.loo_scores)
        about = {key: value for key, value in vars(found).items() if key not in ("scores", "loo_scores")}
        metadata = {"imprint": json.dumps(about), "method": method.key_text()}
        write_tensors(place, tensors, metadata)
        return replace(found, scores=tensors["scores"], loo_scores=tensors.get("loo_scores"))

    def compare(self, methods: dict[str, Method], runs: Sequence[int], leave_one_out: bool = False) -> Comparison:
        """Compare every method, from every run, with every ground truth."""
        limits = [ceiling(ranks(truth.values.transpose(1, 2).numpy()), 1) for truth in self.truths]
        scored = {
            name: [self.scored(name, method, run, leave_one_out) for run in runs] for name, method in methods.items()
        }
        values = {name: np.concatenate([self._measure_lds(each) for each in found]) for name, found in scored.items()}
        singles = {}
        if leave_one_out:
            singles = {
                name: np.concatenate([self._measure_loo(each) for each in found])
                for name, found in scored.items()
                if not any(each.halves for each in found)
            }
        costs = {
            name: [replace(each, scores=torch.empty(0), loo_scores=None) for each in found]
            for name, found in scored.items()
        }
        question = self.truths[0].question
        return Comparison(self.protocol.name, values, singles, costs, float(np.mean(limits)), question)

    def _measure_loo(self, scored: MethodScores) -> Array:
        """Correlate with leave-one-out retraining, shape (1, queries); a positive score means a lower loss."""
        scores = scored.scores if scored.loo_scores is None else scored.loo_scores
        return loo(-scores.double(), self.loo_truth).per_query[None]

    def _measure_lds(self, scored: MethodScores) -> Array:
        """Correlate with the first retraining of each half, shape (draws, queries)."""
        if not scored.halves:
            return np.stack([lds(scored.scores.double(), truth).per_query for truth in self.first_runs])
        predicted = torch.split(scored.scores.double(), self.protocol.halves, dim=1)
        return np.stack(
            [predicted_lds(each, truth).per_query for each, truth in zip(predicted, self.first_runs, strict=True)]
        )


def _mean_or_lowest(values: Array) -> float:
    """Return the mean over queries by which variants are compared; −∞ where it is undefined."""
    return float(np.nan_to_num(average_queries(values).value, nan=-np.inf))


def _find_difference(text: str, about: dict[str, Any]) -> str | None:
    """Name the first field of a saved description that differs; None if it is of the same benchmark."""
    try:
        kept = json.loads(text)
        data = compare_data(kept.pop("data"), about["data"], about["n"])
    except (ValueError, KeyError, AttributeError):
        return "its bench.json describes none"
    if not data.same:
        return f"the data changed{data.remark}"
    now = json.loads(json.dumps(about))
    for name, was in kept.items():
        if now.get(name) != was:
            return f"its {name} changed"
    data.warn()
    return None


def _to_float32(scores: Tensor) -> Tensor:
    """Copy scores to single precision."""
    return scores.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _load_scores(place: Path, method: Method) -> MethodScores | None:
    """Load the scores in a file if they belong to this method."""
    with safe_open(place, framework="pt") as file:
        about = file.metadata()
        if about.get("method") != method.key_text():
            return None
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dictionary)
    return MethodScores(**tensors, **json.loads(about["imprint"]))


def _below(prefix: str, tensors: Parameters) -> Parameters:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
