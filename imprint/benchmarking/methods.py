"""Defines Imprint's own scores as methods of a benchmark."""

import hashlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from imprint.attribution.scoring import attribute
from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.data import length_of
from imprint.errors import ReadoutError
from imprint.plan import Plan
from imprint.simulation.runner import simulate
from imprint.sources import Sources
from imprint.task import Parameters


def imprints(plan: Plan | None = None, *, runs: int = 1) -> Method:
    """Score every example by its imprints at all checkpoints of one or several runs; by default with `Plan.auto`."""

    def score(bench: Bench, kept: Runs) -> Iterator[MethodScores]:
        protocol = bench.protocol
        task, data = protocol.build_task("margin"), protocol.train.examples
        columns, sources = data.gather(torch.arange(len(data))), Sources.per_example(len(data))
        states = [list(run) for run in kept]
        begin = time.monotonic()
        chosen = plan or Plan.auto(task, columns, sources, states, progress=False)
        store = simulate(task, columns, sources, chosen, checkpoints=states, progress=False)
        ready = time.monotonic()
        result = attribute(task, store, protocol.queries, readout="gradient", batch_size=500, progress=False)
        took = time.monotonic() - ready
        yield MethodScores(result.scores, ready - begin, took, bytes=store.bytes, note=_describe_plan(chosen))

    return Method(score, {"plan": plan.to_json() if plan else "auto"}, runs)


def custom(name: str, function: Callable[..., Any], source: bytes) -> Method:
    """Score every example by a function of your own: function(task, data, queries, checkpoints) -> scores.

    task measures the margin of a query, and its model is trained; data and queries are columns; checkpoints are the
    state dicts of one training run, the trained one last. Scores have shape (queries, examples), and are positive where
    more weight of the example would raise the margin of the query.

    source: the text of the function's file: if it changes, scores are computed again. What the file imports is not
        watched.
    """

    def score(bench: Bench, kept: Runs) -> Iterator[MethodScores]:
        protocol = bench.protocol
        task, data = protocol.build_task("margin"), protocol.train.examples
        columns = data.gather(torch.arange(len(data)))
        task.model.eval().load_state_dict(kept[0][-1])
        begin = time.monotonic()
        found = function(task, columns, protocol.queries, [_copy(state) for state in kept[0]])
        took = time.monotonic() - begin
        scores = torch.as_tensor(found).detach().float().cpu()
        wanted = (length_of(protocol.queries), len(data))
        if tuple(scores.shape) != wanted:
            raise ReadoutError(
                f"{name} returned scores of shape {tuple(scores.shape)}, expected {wanted}: (queries, examples)."
            )
        if not bool(scores.isfinite().all()):
            raise ReadoutError(f"{name} returned scores that are not finite.")
        yield MethodScores(scores, 0.0, took, note="preparation and queries together")

    return Method(score, {"method": name, "sha256": hashlib.sha256(source).hexdigest()})


def _copy(state: Parameters) -> Parameters:
    return {name: tensor.clone() for name, tensor in state.items()}


def paths(plan: Plan, checkpoint: int) -> Method:
    """Score the halves themselves along the path from one checkpoint, given by its number.

    The response is linear in the source, so the imprint of a half is the sum of the imprints of its examples.
    """

    def score(bench: Bench, kept: Runs) -> Iterator[MethodScores]:
        protocol = bench.protocol
        task, data = protocol.build_task("margin"), protocol.train.examples
        halves = torch.cat([truth.subsets.membership() for truth in bench.truths])
        sources = Sources.groups({str(index): row.nonzero().flatten().tolist() for index, row in enumerate(halves)})
        begin = time.monotonic()
        store = simulate(
            task,
            data.gather(torch.arange(len(data))),
            sources,
            plan,
            checkpoints=[kept[0][checkpoint]],
            batch_size=len(data),
            progress=False,
        )
        ready = time.monotonic()
        result = attribute(task, store, protocol.queries, readout="gradient", batch_size=500, progress=False)
        took = time.monotonic() - ready
        yield MethodScores(
            result.scores, ready - begin, took, bytes=store.bytes, note=f"{plan.engine}, halves", halves=True
        )

    return Method(score, {"plan": plan.to_json(), "checkpoint": checkpoint})


def _describe_plan(plan: Plan) -> str:
    values = ", ".join(f"{name} {value}" for name, value in plan.to_json().items() if isinstance(value, list))
    return f"{plan.engine}, {values}"
