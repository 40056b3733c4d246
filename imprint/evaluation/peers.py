"""The field's methods as dattri has them, for a benchmark to run beside ours: the same models, data and queries.

Settings are those of dattri's published benchmark. Where that takes the best of several, so does this: chosen on the
truth itself, which favours the peer.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from imprint.data import leaves
from imprint.errors import DataError, MissingExtra
from imprint.evaluation.bench import Bench, Method, Scored
from imprint.evaluation.metrics import lds
from imprint.task import Parameters

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
    raise MissingExtra("a benchmark with peers", "peers") from error

DAMPINGS = (1.0, 0.1, 0.01, 5e-3, 1e-3, 1e-4, 1e-5)
STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)  # of the L2 regularisation that RPS adds
_EXPLICIT = 10_000  # parameters up to which the Hessian is inverted in full
_TEN = 10  # runs whose final models TracIn sums over, as published


def peers(bench: Bench) -> dict[str, Method]:
    """All of them that a benchmark's model allows, by name."""
    size = sum(p.numel() for p in bench.protocol.train.build().parameters())
    explicit: dict[str, Method] = {"IF explicit": _influence(IFAttributorExplicit)} if size <= _EXPLICIT else {}
    return {
        **{f"TRAK-{count}": _trak(count) for count in (1, 10, 50)},
        **explicit,
        "IF-CG": _influence(IFAttributorCG, max_iter=10),
        "IF-LiSSA": _lissa,
        "IF-Arnoldi": _influence(IFAttributorArnoldi, max_iter=50, proj_dim=100),
        "DataInf": _influence(IFAttributorDataInf),
        "EK-FAC (dattri)": _ekfac,
        "TracIn": _tracin(_TEN, normalised=False),
        "Grad-Dot": _tracin(1, normalised=False),
        "Grad-Cos": _tracin(1, normalised=True),
        "RPS": _rps,
    }


class _Setting:
    """A benchmark as dattri wants it: loaders, and functions of (parameters, batch)."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.task = bench, bench.protocol.task()
        self.task.model.eval()
        data = bench.protocol.train.examples
        self.device = str(data.device)
        train, queries = data.gather(torch.arange(len(data))), bench.protocol.queries
        if not all(isinstance(leaf, Tensor) for leaf in (*leaves(train), *leaves(queries))) or len(train) != 2:
            raise DataError("peers run on data of the form (x, y).")
        self.train, self.queries = _loader(train), _loader(queries)

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

        return AttributionTask(loss_func=loss_func, model=self.task.model, checkpoints=states)


def _loader(columns: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*columns), batch_size=len(columns[0]))


def _projector(setting: _Setting) -> dict[str, Any]:
    return {"proj_dim": 512, "proj_max_batch_size": 32, "proj_seed": 0, "device": setting.device}


def _trak(count: int) -> Method:
    def method(bench: Bench, run: int) -> Scored:
        setting = _Setting(bench)
        states = [kept[-1] for kept in bench.states(range(run * count, (run + 1) * count), halves=True)]
        attributor = TRAKAttributor(
            task=setting.dattri(setting.one_margin, states),
            correct_probability_func=setting.one_probability,
            projector_kwargs=_projector(setting),
            device=setting.device,
        )
        return _timed(attributor, setting, lambda: attributor.attribute(setting.queries))

    return method


def _influence(kind: Any, **options: Any) -> Method:
    def method(bench: Bench, run: int) -> Scored:
        setting = _Setting(bench)

        def tried(damping: float) -> Scored:
            task = setting.dattri(setting.mean_loss, [bench.states([run])[0][-1]])
            attributor = kind(task=task, device=setting.device, regularization=damping, **options)
            return _timed(attributor, setting)

        return _best(bench, "λ", DAMPINGS, tried)

    return method


def _lissa(bench: Bench, run: int) -> Scored:
    setting = _Setting(bench)

    def tried(batch_size: float) -> Scored:
        attributor = IFAttributorLiSSA(
            task=setting.dattri(setting.mean_loss, [bench.states([run])[0][-1]]),
            device=setting.device,
            batch_size=int(batch_size),
            recursion_depth=100,
            scaling=50,
        )
        return _timed(attributor, setting)

    return _best(bench, "batch", (100, 50, 10), tried)


def _ekfac(bench: Bench, run: int) -> Scored:
    setting = _Setting(bench)

    def tried(damping: float) -> Scored:
        attributor = IFAttributorEKFAC(
            task=setting.dattri(setting.mean_loss, [bench.states([run])[0][-1]]), device=setting.device, damping=damping
        )
        with torch.enable_grad():
            return _timed(attributor, setting)

    return _best(bench, "λ", DAMPINGS, tried)


def _tracin(runs: int, normalised: bool) -> Method:
    def method(bench: Bench, run: int) -> Scored:
        setting = _Setting(bench)
        states = [kept[-1] for kept in bench.states(range(run * runs, (run + 1) * runs))]
        attributor = TracInAttributor(
            task=setting.dattri(setting.one_loss, states),
            weight_list=torch.full((len(states),), 1e-3),
            normalized_grad=normalised,
            projector_kwargs=_projector(setting),
            device=setting.device,
        )
        attributor.projector_kwargs = None  # by itself it would project to 512 dimensions
        begin = _now(setting)
        scores = attributor.attribute(setting.train, setting.queries)
        return Scored(scores.T, 0.0, _now(setting) - begin)

    return method


def _rps(bench: Bench, run: int) -> Scored:
    setting = _Setting(bench)
    last = [name for name, module in setting.task.model.named_modules() if isinstance(module, torch.nn.Linear)][-1]

    def of_outputs(pre_activations: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(pre_activations, labels)

    def tried(strength: float) -> Scored:
        task = AttributionTask(loss_func=of_outputs, model=setting.task.model, checkpoints=[bench.states([run])[0][-1]])
        attributor = RPSAttributor(
            task=task,
            final_linear_layer_name=last,
            normalize_preactivate=True,
            l2_strength=strength,
            device=setting.device,
        )
        return _timed(attributor, setting)

    return _best(bench, "l2", STRENGTHS, tried)


def _timed(attributor: Any, setting: _Setting, attribute: Callable[[], Tensor] | None = None) -> Scored:
    begin = _now(setting)
    attributor.cache(setting.train)
    ready = _now(setting)
    scores = attribute() if attribute else attributor.attribute(setting.train, setting.queries)
    return Scored(scores.detach().T, ready - begin, _now(setting) - ready)


def _now(setting: _Setting) -> float:
    """The time at which the device has done all that was asked of it."""
    if setting.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.monotonic()


def _best(bench: Bench, name: str, values: Iterable[float], tried: Callable[[float], Scored]) -> Scored:
    """The setting with the best LDS over all truths; those whose scores are not finite do not count."""
    found = list(_finite(values, tried))
    if not found:
        return Scored(
            torch.zeros(bench.truths[0].values.shape[2], len(bench.protocol.train.examples)), 0, 0, note="not finite"
        )
    quality = [
        np.mean([lds(scored.scores.double().cpu(), truth).estimate.value for truth in bench.once])
        for _, scored in found
    ]
    value, scored = found[int(np.argmax(quality))]
    return Scored(scored.scores, scored.prepare, scored.query, note=f"{name}={value:g}, the best of {len(found)}")


def _finite(values: Iterable[float], tried: Callable[[float], Scored]) -> Iterator[tuple[float, Scored]]:
    for value in values:
        scored = tried(value)
        if bool(scored.scores.isfinite().all()):
            yield value, scored
