"""A training run made by hand, and an engine of a dozen lines that repeats it without each source."""

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Task
from imprint.plan import EngineRules
from imprint.recording.records import Circumstances, MicroBatch, OptimiserState, Step
from imprint.simulation.descent import Descent
from imprint.simulation.engines import Chunk, Engine, register, unregister
from imprint.simulation.path import Hooks
from imprint.task import Parameters

N, STEPS, LR = 24, 5, 0.2
SOURCES = Sources.groups({"ann": [0, 1, 2, 3], "bob": [4, 5], "cid": [6, 7, 8], "dan": [20, 21, 22, 23]})
PLAN_ENGINE = "removing"


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (N,), generator=generator)


def copy_state(model: nn.Module) -> Parameters:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(model: nn.Module, start: Parameters, without: tuple[int, ...] = ()) -> Parameters:
    """Train by full batches; the examples `without` have weight 0 and stay in the statistics of batch norm."""
    model = copy.deepcopy(model)
    model.load_state_dict(start, strict=False)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    x, y = make_data()
    weights = torch.ones(N, dtype=torch.float64)
    weights[list(without)] = 0
    for _ in range(STEPS):
        model.train()
        optimiser.zero_grad()
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        ((weights * losses).sum() / N).backward()
        optimiser.step()
    return copy_state(model)


@dataclass(frozen=True)
class HandMadeRun:
    """A run of full batches of plain gradient descent."""

    model: nn.Module
    n: int = N
    states: dict[int, Parameters] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    optimiser: type[torch.optim.Optimizer] = torch.optim.SGD
    circumstances: Circumstances = field(default_factory=lambda: Circumstances("cpu"))
    data: Any = None
    seconds: float = 0.0

    @classmethod
    def of(cls, model: nn.Module) -> "HandMadeRun":
        start = copy_state(model)
        names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        return cls(copy.deepcopy(model), states={0: start, STEPS: train(model, start)}, groups=(names,))

    @property
    def steps(self) -> tuple[Step, ...]:
        step = Step((MicroBatch(tuple(range(N)), N),), 0, ({"lr": LR},))
        return (step,) * STEPS

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(self.states)

    @property
    def sha256(self) -> str:
        text = repr([(k, {n: t.tolist() for n, t in s.items()}) for k, s in self.states.items()])
        return hashlib.sha256(text.encode()).hexdigest()

    def state(self, step: int) -> Parameters:
        return self.states[step]

    def optimiser_state(self, step: int) -> OptimiserState:
        return OptimiserState({}, {})


class Removing(Engine):
    """u_b = N(θ − θ₋b) by training again without each source."""

    name = PLAN_ENGINE
    rules = EngineRules(frozenset({"start"}), second_order=False, question="this_run", removes=True)

    def settle(self) -> None:
        super().settle()
        self.decided = replace(self.choices, noise_rows=2)

    def choose_vectorised(self) -> str | None:
        return None

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        run = self.work.run
        assert isinstance(run, HandMadeRun)
        end, members = descent.start, descent.sources.members
        rows = [self._displace(end, train(run.model, run.state(0), tuple(each))) for each in members]
        noise = [self._displace(end, train(run.model, _perturb(run.state(0), seed))) for seed in range(2)]
        chunk = Chunk(end, _stack(rows), effects=[self._effect(end, row) for row in rows])
        if not hooks.first:
            return chunk
        moved = [self._effect(end, row) for row in noise]
        rms = (sum(each**2 for each in moved) / len(moved)) ** 0.5
        return replace(chunk, noise=_stack(noise), noise_effect=rms, deviation=0.0)

    def _displace(self, end: Parameters, other: Parameters) -> Parameters:
        return {name: self.descent.n * (tensor - other[name]) for name, tensor in end.items()}

    def _effect(self, end: Parameters, row: Parameters) -> float:
        batch = self.descent.data.gather(torch.arange(self.descent.n))
        moved = {name: tensor - row[name] / self.descent.n for name, tensor in end.items()}
        values = [self.descent.task.measures(theta, batch, self.descent.n) for theta in (end, moved)]
        return float((values[0] - values[1]).square().mean().sqrt())


def _stack(rows: list[Parameters]) -> Parameters:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def _perturb(state: Parameters, seed: int) -> Parameters:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: t * (1 + 1e-3 * torch.randn(t.shape, generator=generator, dtype=t.dtype)) if t.is_floating_point() else t
        for name, t in state.items()
    }


@contextmanager
def removing_engine() -> Iterator[None]:
    """Register the engine."""
    register(Removing)
    try:
        yield
    finally:
        unregister(Removing)


def make_task(model: nn.Module | None = None, **options: Any) -> Task:
    return Task.classifier(make_model() if model is None else model, **options)


def make_plan(**fields: Any) -> Plan:
    return Plan(engine=PLAN_ENGINE, **fields)
