"""Runs dattri's implementations of published methods on the same trained models, data and queries as Imprint.

`early.py` runs some of them at early checkpoints too. Settings are those of dattri's published benchmark. Where it
takes the best of several values, so do we: the best on the ground truth itself, separately for each statistic, which
favours the peer.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import MethodScores
from imprint.errors import DataError, MissingExtra
from imprint.task import Batch, Parameters, Task

try:
    from dattri.algorithm.influence_function import (
        IFAttributorArnoldi,
        IFAttributorCG,
        IFAttributorDataInf,
        IFAttributorEKFAC,
        IFAttributorExplicit,
        IFAttributorLiSSA,
    )
    from dattri.algorithm.rps import RPSAttributor
    from dattri.algorithm.tracin import TracInAttributor
    from dattri.algorithm.trak import TRAKAttributor
    from dattri.task import AttributionTask
except ImportError as error:
    raise MissingExtra("a benchmark with peers", "bench") from error

DAMPINGS = (1.0, 0.1, 0.01, 5e-3, 1e-3, 1e-4, 1e-5)
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the L2 regularisation in RPS
_EXPLICIT = 10_000  # parameters; the Hessian of larger models is not inverted
_TEN = 10  # runs over whose final models TracIn sums, as published
TRAK_BATCH = 500  # examples; the scores do not depend on it
CG_BATCH = 50  # queries, for each of which there are the activations of all examples; the scores do not depend on it
CG = {"max_iter": 10}
_DATAINF = 50  # queries in a batch; DataInf holds its square as many copies of the parameters
_NEXT_PROJECTION = 100_000  # dattri's step of the seed from one model to the next
PROJECTION = {"proj_dim": 512, "proj_max_batch_size": 32, "proj_seed": 0}


def peers(bench: Bench) -> dict[str, Method]:
    """Return the methods that a benchmark's model allows, by name."""
    make_loaders(bench)  # refuses unsuitable data before anything is trained
    size = sum(p.numel() for p in bench.protocol.train.build().parameters())
    explicit: dict[str, Method] = {"IF explicit": _influence(IFAttributorExplicit)} if size <= _EXPLICIT else {}
    return {
        **{f"TRAK-{count}": _trak(count) for count in (1, 10, 50)},
        **explicit,
        "IF-CG": _influence(IFAttributorCG, CG_BATCH, **CG),
        "IF-LiSSA": _lissa(recursion_depth=100, scaling=50),
        "IF-Arnoldi": _influence(IFAttributorArnoldi, max_iter=50, proj_dim=100),
        "DataInf": _influence(IFAttributorDataInf, _DATAINF),
        "EK-FAC (dattri)": _ekfac(),
        "TracIn": _tracin(_TEN, normalised=False),
        "Grad-Dot": _tracin(1, normalised=False),
        "Grad-Cos": _tracin(1, normalised=True),
        "RPS": _rps(),
    }


class DattriTask:
    """A task in dattri's form: functions of (parameters, batch)."""

    def __init__(self, task: Task) -> None:
        self.task, self.device = task, str(task.device)

    def mean_loss(self, parameters: Parameters, batch: Any) -> Tensor:
        """Return the mean loss of a batch, for influence functions."""
        functional, _ = self.task.at(self.task.state())
        x, y = batch
        return functional.losses(parameters, (x, y.long()), len(y)).mean()

    def one_loss(self, parameters: Parameters, sample: Any) -> Tensor:
        """Return the loss of one example without a batch dimension, for TRAK and TracIn."""
        return self.mean_loss(parameters, tuple(part.unsqueeze(0) for part in sample))

    def one_margin(self, parameters: Parameters, sample: Any) -> Tensor:
        """Return log p − log(1 − p) of one example."""
        logp = -self.one_loss(parameters, sample)
        return logp - torch.log(-torch.expm1(logp))

    def one_probability(self, parameters: Parameters, sample: Any) -> Tensor:
        """Return p of the right class."""
        return torch.exp(-self.one_loss(parameters, sample))

    def dattri(self, function: Callable[..., Tensor], states: list[Parameters]) -> Any:
        """Build dattri's description of a task. dattri looks at the name of the function's second argument."""

        def loss_func(params: Parameters, data_target_pair: Any) -> Tensor:
            return function(params, data_target_pair)

        return AttributionTask(loss_func=loss_func, model=self.task.replica, checkpoints=states)

    def trak(self, states: list[Parameters], first: int = 0) -> Any:
        """Build dattri's TRAK attributor of some models; the projections are those of models from number `first` on."""
        seed = PROJECTION["proj_seed"] + _NEXT_PROJECTION * first
        return TRAKAttributor(
            task=self.dattri(self.one_margin, states),
            correct_probability_func=self.one_probability,
            projector_kwargs={**PROJECTION, "proj_seed": seed, "device": self.device},
            device=self.device,
        )

    def influence(self, states: list[Parameters], damping: float) -> Any:
        """Build dattri's influence function by conjugate gradients, which averages over models."""
        task = self.dattri(self.mean_loss, states)
        return IFAttributorCG(task=task, device=self.device, regularization=damping, **CG)

    def now(self) -> float:
        """Return the time after the device has finished its work."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.monotonic()


def make_loader(columns: Batch, batch_size: int | None = None) -> DataLoader[Any]:
    """Build a loader of (x, y), by default of one batch, so that averages over batches are exact."""
    if not (isinstance(columns, tuple | list) and len(columns) == 2 and all(isinstance(c, Tensor) for c in columns)):
        raise DataError("peers need data of the form (x, y).")
    return DataLoader(TensorDataset(*columns), batch_size=batch_size or len(columns[0]))


def make_loaders(bench: Bench, train: int | None = None, queries: int | None = None) -> tuple[Any, Any]:
    """Build loaders of the training data and of the queries, with these batch sizes."""
    data = bench.protocol.train.examples
    return make_loader(data.gather(torch.arange(len(data))), train), make_loader(bench.protocol.queries, queries)


def _trak(count: int) -> Method:
    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        wrapped = DattriTask(bench.protocol.build_task())
        train, queries = make_loaders(bench, TRAK_BATCH, TRAK_BATCH)
        attributor = wrapped.trak([kept[-1] for kept in runs])
        begin = wrapped.now()
        attributor.cache(train)
        ready = wrapped.now()
        scores = attributor.attribute(queries)
        yield MethodScores(scores.detach().T, ready - begin, wrapped.now() - ready)

    return Method(score, dict(PROJECTION), count, halves=True)


def _tracin(count: int, normalised: bool) -> Method:
    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        yield score_by_tracin(bench, [kept[-1] for kept in runs], normalised)

    return Method(score, {"normalised": normalised}, count)


def score_by_tracin(bench: Bench, states: list[Parameters], normalised: bool) -> MethodScores:
    """Multiply the gradients of queries and examples, summed over some models."""
    wrapped = DattriTask(bench.protocol.build_task())
    train, queries = make_loaders(bench)
    attributor = TracInAttributor(
        task=wrapped.dattri(wrapped.one_loss, states),
        weight_list=torch.full((len(states),), 1e-3),
        normalized_grad=normalised,
        projector_kwargs={**PROJECTION, "device": wrapped.device},
        device=wrapped.device,
    )
    attributor.projector_kwargs = None  # otherwise it would project to 512 dimensions
    begin = wrapped.now()
    scores = attributor.attribute(train, queries)
    return MethodScores(scores.T, 0.0, wrapped.now() - begin)


def _influence(kind: Any, queries_at_once: int | None = None, **options: Any) -> Method:
    def build(wrapped: DattriTask, state: Parameters, damping: float) -> Any:
        task = wrapped.dattri(wrapped.mean_loss, [state])
        return kind(task=task, device=wrapped.device, regularization=damping, **options)

    return _try_values("λ", DAMPINGS, build, queries_at_once, **options)


def _lissa(**options: Any) -> Method:
    def build(wrapped: DattriTask, state: Parameters, batch_size: float) -> Any:
        task = wrapped.dattri(wrapped.mean_loss, [state])
        return IFAttributorLiSSA(task=task, device=wrapped.device, batch_size=int(batch_size), **options)

    return _try_values("batch", (100, 50, 10), build, **options)


def _ekfac() -> Method:
    def build(wrapped: DattriTask, state: Parameters, damping: float) -> Any:
        return IFAttributorEKFAC(
            task=wrapped.dattri(wrapped.mean_loss, [state]), device=wrapped.device, damping=damping
        )

    return _try_values("λ", DAMPINGS, build)


def _rps() -> Method:
    def of_outputs(pre_activations: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(pre_activations, labels)

    def build(wrapped: DattriTask, state: Parameters, strength: float) -> Any:
        model = wrapped.task.replica
        last = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][-1]
        return RPSAttributor(
            task=AttributionTask(loss_func=of_outputs, model=model, checkpoints=[state]),
            final_linear_layer_name=last,
            normalize_preactivate=True,
            l2_strength=strength,
            device=wrapped.device,
        )

    return _try_values("l2", STRENGTHS, build)


def _try_values(
    name: str,
    values: tuple[float, ...],
    build: Callable[[DattriTask, Parameters, float], Any],
    queries_at_once: int | None = None,
    **key: Any,
) -> Method:
    """Define a method of the trained model that has a parameter with several values to try."""

    def score(bench: Bench, runs: Runs) -> Iterator[MethodScores]:
        wrapped = DattriTask(bench.protocol.build_task())
        train, queries = make_loaders(bench, queries=queries_at_once)
        for value in values:
            found = run_timed(build(wrapped, runs[0][-1], value), wrapped, train, queries)
            yield replace(found, note=f"{name}={value:g}")

    return Method(score, {name: values, **key})


def run_timed(attributor: Any, wrapped: DattriTask, train: Any, queries: Any) -> MethodScores:
    """Let an attributor of dattri prepare and score, and take the time."""
    begin = wrapped.now()
    attributor.cache(train)
    ready = wrapped.now()
    scores = attributor.attribute(train, queries)
    return MethodScores(scores.detach().T, ready - begin, wrapped.now() - ready)
