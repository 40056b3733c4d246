"""The field's methods as dattri has them, for a benchmark to run beside ours: the same models, data and queries.

Settings are those of dattri's published benchmark. Where that takes the best of several, so does this: chosen on the
truth itself, by each measure for itself, which favours the peer.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from imprint.benchmarking.bench import Bench, Method, Runs
from imprint.benchmarking.comparison import Scored
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
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the L2 regularisation that RPS adds
_EXPLICIT = 10_000  # parameters up to which the Hessian is inverted in full
_TEN = 10  # runs whose final models TracIn sums over, as published
_TRAK = 500  # examples in a batch: TRAK's scores do not depend on it
_DATAINF = 50  # queries in a batch: nor do DataInf's, which holds as many copies of the parameters as its square
_PROJECTION = {"proj_dim": 512, "proj_max_batch_size": 32, "proj_seed": 0}


def peers(bench: Bench) -> dict[str, Method]:
    """All of them that a benchmark's model allows, by name."""
    _loaders(bench)  # refuses other data before anything is trained
    size = sum(p.numel() for p in bench.protocol.train.build().parameters())
    explicit: dict[str, Method] = {"IF explicit": _influence(IFAttributorExplicit)} if size <= _EXPLICIT else {}
    return {
        **{f"TRAK-{count}": _trak(count) for count in (1, 10, 50)},
        **explicit,
        "IF-CG": _influence(IFAttributorCG, max_iter=10),
        "IF-LiSSA": _lissa(recursion_depth=100, scaling=50),
        "IF-Arnoldi": _influence(IFAttributorArnoldi, max_iter=50, proj_dim=100),
        "DataInf": _influence(IFAttributorDataInf, _DATAINF),
        "EK-FAC (dattri)": _ekfac(),
        "TracIn": _tracin(_TEN, normalised=False),
        "Grad-Dot": _tracin(1, normalised=False),
        "Grad-Cos": _tracin(1, normalised=True),
        "RPS": _rps(),
    }


class Setting:
    """A task as dattri wants it: functions of (parameters, batch), and loaders of (x, y)."""

    def __init__(self, task: Task) -> None:
        self.task, self.device = task, str(task.device)

    def mean_loss(self, parameters: Parameters, batch: Any) -> Tensor:
        """The loss of a batch, as influence functions want it."""
        functional, _ = self.task.at(self.task.state())
        x, y = batch
        return functional.losses(parameters, (x, y.long()), len(y)).mean()

    def one_loss(self, parameters: Parameters, sample: Any) -> Tensor:
        """The loss of one example without a batch's dimension, as TRAK and TracIn want it."""
        return self.mean_loss(parameters, tuple(part.unsqueeze(0) for part in sample))

    def one_margin(self, parameters: Parameters, sample: Any) -> Tensor:
        """log p − log(1 − p) of one example."""
        logp = -self.one_loss(parameters, sample)
        return logp - torch.log(-torch.expm1(logp))

    def one_probability(self, parameters: Parameters, sample: Any) -> Tensor:
        """p of the right class."""
        return torch.exp(-self.one_loss(parameters, sample))

    def dattri(self, function: Callable[..., Tensor], states: list[Parameters]) -> Any:
        """dattri's description of a task. It reads the name of the function's second argument."""

        def loss_func(params: Parameters, data_target_pair: Any) -> Tensor:
            return function(params, data_target_pair)

        return AttributionTask(loss_func=loss_func, model=self.task.replica, checkpoints=states)

    def trak(self, states: list[Parameters]) -> Any:
        """dattri's TRAK of some models."""
        return TRAKAttributor(
            task=self.dattri(self.one_margin, states),
            correct_probability_func=self.one_probability,
            projector_kwargs={**_PROJECTION, "device": self.device},
            device=self.device,
        )

    def now(self) -> float:
        """The time at which the device has done all that was asked of it."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
        return time.monotonic()


def loader(columns: Batch, batch_size: int | None = None) -> DataLoader[Any]:
    """Of (x, y), by default all in one batch: what dattri averages over batches then has no error."""
    if not (isinstance(columns, tuple | list) and len(columns) == 2 and all(isinstance(c, Tensor) for c in columns)):
        raise DataError("peers run on data of the form (x, y).")
    return DataLoader(TensorDataset(*columns), batch_size=batch_size or len(columns[0]))


def _loaders(bench: Bench, train: int | None = None, queries: int | None = None) -> tuple[Any, Any]:
    """Of the training data and of the queries, in batches of so many."""
    data = bench.protocol.train.examples
    return loader(data.gather(torch.arange(len(data))), train), loader(bench.protocol.queries, queries)


def _trak(count: int) -> Method:
    def score(bench: Bench, runs: Runs) -> Iterator[Scored]:
        setting = Setting(bench.protocol.task())
        train, queries = _loaders(bench, _TRAK, _TRAK)
        attributor = setting.trak([kept[-1] for kept in runs])
        begin = setting.now()
        attributor.cache(train)
        ready = setting.now()
        scores = attributor.attribute(queries)
        yield Scored(scores.detach().T, ready - begin, setting.now() - ready)

    return Method(score, dict(_PROJECTION), count, halves=True)


def _tracin(count: int, normalised: bool) -> Method:
    def score(bench: Bench, runs: Runs) -> Iterator[Scored]:
        setting, states = Setting(bench.protocol.task()), [kept[-1] for kept in runs]
        train, queries = _loaders(bench)
        attributor = TracInAttributor(
            task=setting.dattri(setting.one_loss, states),
            weight_list=torch.full((len(states),), 1e-3),
            normalized_grad=normalised,
            projector_kwargs={**_PROJECTION, "device": setting.device},
            device=setting.device,
        )
        attributor.projector_kwargs = None  # by itself it would project to 512 dimensions
        begin = setting.now()
        scores = attributor.attribute(train, queries)
        yield Scored(scores.T, 0.0, setting.now() - begin)

    return Method(score, {"normalised": normalised}, count)


def _influence(kind: Any, queries_at_once: int | None = None, **options: Any) -> Method:
    def made(setting: Setting, state: Parameters, damping: float) -> Any:
        task = setting.dattri(setting.mean_loss, [state])
        return kind(task=task, device=setting.device, regularization=damping, **options)

    return _varied("λ", DAMPINGS, made, queries_at_once, **options)


def _lissa(**options: Any) -> Method:
    def made(setting: Setting, state: Parameters, batch_size: float) -> Any:
        task = setting.dattri(setting.mean_loss, [state])
        return IFAttributorLiSSA(task=task, device=setting.device, batch_size=int(batch_size), **options)

    return _varied("batch", (100, 50, 10), made, **options)


def _ekfac() -> Method:
    def made(setting: Setting, state: Parameters, damping: float) -> Any:
        return IFAttributorEKFAC(
            task=setting.dattri(setting.mean_loss, [state]), device=setting.device, damping=damping
        )

    return _varied("λ", DAMPINGS, made)


def _rps() -> Method:
    def of_outputs(pre_activations: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(pre_activations, labels)

    def made(setting: Setting, state: Parameters, strength: float) -> Any:
        model = setting.task.replica
        last = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)][-1]
        return RPSAttributor(
            task=AttributionTask(loss_func=of_outputs, model=model, checkpoints=[state]),
            final_linear_layer_name=last,
            normalize_preactivate=True,
            l2_strength=strength,
            device=setting.device,
        )

    return _varied("l2", STRENGTHS, made)


def _varied(
    name: str,
    values: tuple[float, ...],
    made: Callable[[Setting, Parameters, float], Any],
    queries_at_once: int | None = None,
    **key: Any,
) -> Method:
    """A method of the trained model with a setting for which there are several values."""

    def score(bench: Bench, runs: Runs) -> Iterator[Scored]:
        setting = Setting(bench.protocol.task())
        train, queries = _loaders(bench, queries=queries_at_once)
        for value in values:
            found = _timed(made(setting, runs[0][-1], value), setting, train, queries)
            yield replace(found, note=f"{name}={value:g}")

    return Method(score, {name: values, **key})


def _timed(attributor: Any, setting: Setting, train: Any, queries: Any) -> Scored:
    begin = setting.now()
    attributor.cache(train)
    ready = setting.now()
    scores = attributor.attribute(train, queries)
    return Scored(scores.detach().T, ready - begin, setting.now() - ready)
