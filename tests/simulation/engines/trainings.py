"""Training loops written by hand, and the recordings of them that a replay reads."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from imprint import Task
from imprint.data import Data
from imprint.recording.records import Circumstances, Clipping, MicroBatch, OptimiserState, Step, micro_seed
from imprint.recording.seeding import seed_everything
from imprint.recording.settings import find_changes
from imprint.simulation.engines.replay.training import Repetition
from imprint.store.fingerprint import DataPrint
from imprint.task import Parameters

Losses = Callable[[nn.Module, Any], Tensor]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@dataclass(frozen=True)
class MemoryRun:
    """A recorded run that is kept in memory."""

    n: int
    steps: tuple[Step, ...]
    optimiser: type[Optimizer]
    groups: tuple[tuple[str, ...], ...]
    circumstances: Circumstances
    states: dict[int, Parameters]
    optimiser_states: dict[int, OptimiserState]
    sha256: str = "0" * 64
    data: DataPrint | None = None
    seconds: float = 0.0

    @property
    def checkpoints(self) -> tuple[int, ...]:
        return tuple(sorted(self.states))

    def state(self, step: int) -> Parameters:
        return self.states[step]

    def optimiser_state(self, step: int) -> OptimiserState:
        return self.optimiser_states[step]


@dataclass(frozen=True)
class Training:
    """A training run by hand: everything that a user's loop would have in it.

    schedule: the factor of the learning rate at each step.
    frozen: parameters that the loop freezes, each with the first and the last step of that.
    leaves_out: whether examples that a run goes without are left out of batches, or have weight 0.
    """

    model: nn.Module
    data: tuple[Tensor, ...]
    optimiser: type[Optimizer] = torch.optim.SGD
    settings: dict[str, Any] = field(default_factory=lambda: {"lr": 0.2})
    steps: int = 6
    batch: int = 8
    accumulate: int = 1
    schedule: Callable[[int], float] = lambda step: 1.0
    clipping: Clipping | None = None
    losses: Losses = cross_entropy
    regulariser: Callable[[nn.Module], Tensor] | None = None
    keep: tuple[int, ...] = ()
    leaves_out: bool = False
    fixed_batches: tuple[tuple[list[int], ...], ...] = ()
    frozen: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def task(self) -> Task:
        return Task(self.model, loss=self.losses, regulariser=self.regulariser)

    @property
    def n(self) -> int:
        return len(self.data[0])

    def repetition(self, run: MemoryRun, begin: int = 0) -> Repetition:
        return Repetition(self.task(), Data(self.data, device=self.data[0].device), run, begin)

    def batches(self) -> list[list[list[int]]]:
        """The micro-batches of every step."""
        if self.fixed_batches:
            return [list(micros) for micros in self.fixed_batches]
        generator = torch.Generator().manual_seed(5)
        found: list[list[list[int]]] = []
        for _ in range(self.steps):
            order = torch.randperm(self.n, generator=generator).tolist()
            found.append([order[k * self.batch : (k + 1) * self.batch] for k in range(self.accumulate)])
        return found

    def run(self, without: Sequence[int] = (), start: Parameters | None = None) -> tuple[Parameters, MemoryRun]:
        """Train without some examples; return the end, and the recording."""
        model = copy.deepcopy(self.model)
        model.train()
        if start is not None:
            model.load_state_dict(start, strict=False)
        named: Parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimiser = self.optimiser(list(named.values()), **self.settings)
        states, memories, steps = {}, {}, []
        base = self.settings["lr"]
        for number, micros in enumerate(self.batches()):
            if number in (0, *self.keep):
                states[number], memories[number] = copy_state(model), remember(optimiser, named)
            optimiser.param_groups[0]["lr"] = base * self.schedule(number)
            for name, (first, last) in self.frozen.items():
                named[name].requires_grad_(not first <= number <= last)
            step = self._step(model, optimiser, named, micros, 100 + number, without)
            steps.append(step)
        end = copy_state(model)
        states[len(steps)], memories[len(steps)] = end, remember(optimiser, named)
        groups = (tuple(named),)
        return end, MemoryRun(self.n, tuple(steps), self.optimiser, groups, Circumstances("cpu"), states, memories)

    def _step(
        self,
        model: nn.Module,
        optimiser: Optimizer,
        named: Parameters,
        micros: list[list[int]],
        seed: int,
        without: Any,
    ) -> Step:
        normaliser = float(sum(map(len, micros)))
        if self.optimiser is torch.optim.LBFGS:
            return self._step_with_closure(model, optimiser, micros[0], seed, without)
        reported: list[MicroBatch] = []
        optimiser.zero_grad()
        for index, examples in enumerate(micros):
            seed_everything(micro_seed(seed, index))
            kept = [e for e in examples if not (self.leaves_out and e in without)]
            if not kept:
                continue
            batch = tuple(column[kept] for column in self.data)
            losses = self.losses(model, batch)
            weights = torch.tensor([float(e not in without) for e in kept], dtype=losses.dtype)
            objective = (weights * losses).sum() / normaliser
            if index == 0 and self.regulariser is not None:
                objective = objective + self.regulariser(model)
            objective.backward()
            reported.append(MicroBatch(tuple(examples), normaliser, float(objective.detach())))
        for p in named.values():  # an emptied batch has zeros, so that the optimiser moves as it would
            if p.grad is None and not reported:
                p.grad = torch.zeros_like(p)
        slopes = [p.grad for p in named.values() if p.grad is not None]
        norm = float(torch.stack([g.norm() for g in slopes]).norm())
        missing = frozenset(name for name, p in named.items() if p.grad is None)
        if self.clipping is not None and self.clipping.kind == "norm":
            nn.utils.clip_grad_norm_(list(named.values()), self.clipping.limit, self.clipping.norm_type)
        elif self.clipping is not None:
            nn.utils.clip_grad_value_(list(named.values()), self.clipping.limit)
        settings = copy_settings(optimiser)
        optimiser.step()
        left = find_changes((settings,), (copy_settings(optimiser),))
        return Step(tuple(reported), seed, (settings,), norm, self.clipping, missing, left=left)

    def _step_with_closure(
        self, model: nn.Module, optimiser: Optimizer, examples: list[int], seed: int, without: Any
    ) -> Step:
        batch = tuple(column[examples] for column in self.data)
        weights = torch.tensor([float(e not in without) for e in examples], dtype=torch.float64)
        seen: list[float] = []

        def closure() -> Tensor:
            optimiser.zero_grad()
            objective = (weights * self.losses(model, batch)).sum() / len(examples)
            objective.backward()
            seen.append(float(objective.detach()))
            return objective

        settings = copy_settings(optimiser)
        optimiser.step(closure)  # type: ignore[arg-type]
        micro = MicroBatch(tuple(examples), len(examples), seen[0])
        return Step((micro,), seed, (settings,), closure=True)


class Adapting(torch.optim.SGD):
    """Divides by a running norm of the gradients that it keeps in its parameter group, as Prodigy keeps its step."""

    def __init__(self, params: Any, lr: float = 0.1, d: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group.setdefault("d", d)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            squares = sum(float(p.grad.square().sum()) for p in group["params"] if p.grad is not None)
            group["d"] = 0.7 * group["d"] + 0.3 * float(squares) ** 0.5
            for p in group["params"]:
                p.grad.div_(group["d"])
        super().step(closure)


class Decaying(torch.optim.SGD):
    """Counts its steps in its parameter group, and makes them shorter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                p.grad.div_(group["k"] ** 0.5)
        super().step(closure)


class Counted(torch.optim.SGD):
    """Counts its steps in an attribute of its own, and makes them shorter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.made: Any = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.made = self.made + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(float(self.made) ** 0.5)
        super().step(closure)


class CountedByTensor(Counted):
    """Does the same with a tensor, which a snapshot does not keep."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.made = torch.zeros(())


def copy_settings(optimiser: Optimizer) -> dict[str, Any]:
    """Copy the settings of the one parameter group."""
    return {name: value for name, value in optimiser.param_groups[0].items() if name != "params"}


def copy_state(model: nn.Module) -> Parameters:
    """Copy the parameters and buffers of a model, tied ones once."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def remember(optimiser: Optimizer, named: Parameters) -> OptimiserState:
    """Copy what an optimiser remembers of each parameter."""
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, p in named.items():
        state = optimiser.state.get(p, {})
        tensors[name] = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
        numbers[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    return OptimiserState(tensors, numbers)


def classification(n: int = 40, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, classes, (n,), generator=generator)


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), *between, nn.Linear(6, 3)).double()
