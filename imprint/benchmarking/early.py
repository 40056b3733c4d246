"""Runs dattri's methods at early checkpoints of the same training runs.

TRAK averages over as many models as it is given, so it also gets those of all epochs together, and so do influence
functions. TracIn is a sum over checkpoints by definition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from imprint.benchmarking import peers as trained
from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.benchmarking.peers import DattriTask
from imprint.benchmarking.variants import EPOCHS, add_costs, at_epoch, early_epochs, name_epochs, try_epochs

Epochs = tuple[int, ...]


def early_peers(bench: Bench, epochs: Sequence[int] = EPOCHS) -> dict[str, Method]:
    """Return the methods at early checkpoints, by name; none if the benchmark keeps none of these epochs."""
    kept = early_epochs(bench.protocol, epochs)
    if not kept:
        return {}
    return {
        **{f"TRAK-{count}, early": _trak(count, kept, halves=True) for count in (1, 10, 50)},
        "TRAK, one run, early": _trak(1, kept, halves=False),
        "IF-CG, early": _influence(kept),
        "TracIn, one run, early": _tracin(kept),
        "Grad-Dot, early": _products(kept, normalised=False),
        "Grad-Cos, early": _products(kept, normalised=True),
    }


def _trak(count: int, epochs: Epochs, halves: bool) -> Method:
    """Define TRAK of several models at each epoch, and of all models of all epochs together."""

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        wrapped = DattriTask(bench.protocol.build_task())
        train, queries = trained.make_loaders(bench, trained.TRAK_BATCH, trained.TRAK_BATCH)
        found, kernels, weights = [], [], []
        for index, epoch in enumerate(epochs):
            attributor = wrapped.trak(at_epoch(bench.protocol, runs, epoch), first=index * count)
            begin = wrapped.now()
            attributor.cache(train)
            ready = wrapped.now()
            weight, attributor.Q = attributor.Q, torch.ones_like(attributor.Q)  # TRAK multiplies by it in the end
            kernel = attributor.attribute(queries).detach().T
            found.append(MethodScores(kernel * weight, ready - begin, wrapped.now() - ready))
            kernels.append(kernel)
            weights.append(weight)
            yield name_epochs(found[-1], [epoch])
        if len(epochs) > 1:
            together = torch.stack(kernels).mean(0) * torch.stack(weights).mean(0)
            yield name_epochs(add_costs(together, found), epochs)

    return Method(score, {**trained.PROJECTION, "epochs": epochs}, count, halves=halves)


def _influence(epochs: Epochs) -> Method:
    """Define influence functions by conjugate gradients, with the dampings that are tried at the trained model."""
    dampings = trained.DAMPINGS

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        wrapped = DattriTask(bench.protocol.build_task())
        train, queries = trained.make_loaders(bench, queries=trained.CG_BATCH)

        def score_at(damping: float, epoch: int) -> MethodScores:
            attributor = wrapped.influence(at_epoch(bench.protocol, runs, epoch), damping)
            return replace(trained.run_timed(attributor, wrapped, train, queries), note=f"λ={damping:g}")

        for damping in dampings:
            yield from try_epochs(epochs, partial(score_at, damping))

    return Method(score, {"λ": dampings, "epochs": epochs, **trained.CG})


def _tracin(epochs: Epochs) -> Method:
    """Define TracIn as published: the sum over checkpoints of a run, all trained with the same learning rate."""

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        states = [at_epoch(bench.protocol, runs, epoch)[0] for epoch in epochs]
        found = trained.score_by_tracin(bench, states, normalised=False)
        yield replace(found, note=f"sum of epochs {', '.join(map(str, epochs))}")

    return Method(score, {"normalised": False, "epochs": epochs, "sum": True})


def _products(epochs: Epochs, normalised: bool) -> Method:
    """Define products of gradients at single checkpoints."""

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        for epoch in epochs:
            states = at_epoch(bench.protocol, runs, epoch)
            yield name_epochs(trained.score_by_tracin(bench, states, normalised), [epoch])

    return Method(score, {"normalised": normalised, "epochs": epochs})
