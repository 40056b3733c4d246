"""Defines Imprint's own scores as methods of a benchmark."""

import time
from collections.abc import Iterator

import torch

from imprint.attribution.scoring import attribute
from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.plan import Plan
from imprint.simulation.runner import simulate
from imprint.sources import Sources


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
