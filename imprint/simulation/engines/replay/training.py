"""A recorded training run again, step by step, plainly, on a private copy of the model.

The unperturbed replay is one; where rows cannot be stacked, the run without each source is another.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from imprint.batches import is_columnar, map_tensors, own_containers
from imprint.compat import trains_batch_norm, users_attention
from imprint.data import Data
from imprint.errors import ImprintError, SimulationError, TaskError, first_line
from imprint.model.draws import UncapturableDraws, capture_draws, substitute_draws
from imprint.model.measures import require_one_each
from imprint.model.replica import make_private
from imprint.recording.memory import give_memory
from imprint.recording.records import Circumstances, MicroBatch, Run, Settings, micro_seed
from imprint.recording.seeding import keep_random_state, seed_everything
from imprint.recording.settings import describe_groups, find_changes
from imprint.simulation.engines.replay.optimisers import make_optimiser, set_settings
from imprint.simulation.engines.replay.routes import Names, Routes
from imprint.task import Batch, Parameters, Task
from imprint.tensors.vectors import total_norm

logger = logging.getLogger(__name__)
Excluded = np.ndarray[tuple[int], np.dtype[np.bool_]]
"""For each training example, whether the run goes without it."""


@dataclass(frozen=True)
class Repetition:
    """A recorded run, with the task and the data that it is repeated on, from the checkpoint at step `begin` on.

    regularised: whether the loss of the run contained the task's regulariser (see `find_regularised`).
    routes: which gradients are missing in every run, where one without a source may miss others than the recorded one
        did, such as those of experts; by default the recorded ones.
    """

    task: Task
    data: Data
    run: Run
    begin: int = 0
    regularised: bool = True
    routes: Routes | None = None

    @property
    def steps(self) -> range:
        """The numbers of the steps that are repeated."""
        return range(self.begin, len(self.run.steps))

    def describe_step(self, number: int) -> str:
        """Say the how manieth of the repeated steps one is."""
        return f"step {number + 1 - self.begin:,} of {len(self.steps):,}"

    @property
    def regulariser(self) -> Callable[[nn.Module], Tensor] | None:
        """What the run added to its losses."""
        return self.task.regulariser if self.regularised else None

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the parameters that the optimiser moves."""
        return tuple(name for group in self.run.groups for name in group)

    def find_settings(self, number: int) -> Sequence[Settings]:
        """Return the settings of each parameter group that a step of the run began with and its optimiser did not set.

        What the optimiser itself has left in its groups, such as a step size that it adapts, is a part of its memory:
        each row keeps its own.
        """
        steps = self.run.steps
        before = steps[number - 1] if number > self.begin else None
        if before is None or before.left is None:
            return steps[number].groups
        changes = before.left or ({},) * len(before.groups)
        left = [{**given, **changed} for given, changed in zip(before.groups, changes, strict=True)]
        return find_changes(left, steps[number].groups)

    def find_highest_rate(self) -> float | None:
        """Return the highest learning rate of a group that trains something; None if the optimiser has no rates.

        The first rate says little: a warm-up begins at 0.
        """
        groups = (pair for n in self.steps for pair in zip(self.run.groups, self.run.steps[n].groups, strict=True))
        rates = [settings.get("lr") for names, settings in groups if names]
        return max((float(rate) for rate in rates if isinstance(rate, int | float)), default=None)

    def start(self) -> Parameters:
        """Load the trained parameters and the buffers where the repetition begins, on the device of the data."""
        return {name: tensor.to(self.data.device) for name, tensor in self.run.state(self.begin).items()}

    def gather(self, batch: MicroBatch) -> tuple[Tensor, Batch]:
        """Return the examples of a micro-batch, by index and as the batch that the loss is given."""
        examples = torch.tensor(batch.examples)
        return examples, self.data.gather(examples)

    def make_model(self) -> nn.Module:
        """Make a private copy of the model, as it was at the beginning and in the modes of training."""
        model = make_private(self.task.model)
        for name, module in model.named_modules():
            module.training = name not in self.run.circumstances.evaluating
        load_tensors(model, self.start())
        return model


def load_tensors(model: nn.Module, state: Parameters) -> None:
    """Copy tensors into the parameters and buffers of a model."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


@contextmanager
def as_recorded(circumstances: Circumstances) -> Iterator[None]:
    """Run forward passes as in the recorded training: its attention kernels and precision of matrix products.

    Every step is seeded; the user's own random numbers go on afterwards as if nothing had been drawn.
    """
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(circumstances.matmul_precision)
        with keep_random_state(), users_attention(), torch.enable_grad(), torch.inference_mode(False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def _autocast(
    circumstances: Circumstances, device: torch.device, *, transformed: bool
) -> torch.autocast | nullcontext[None]:
    """Return the autocasting of the recorded forward passes; casts are not kept where they would outlive `vmap`."""
    if circumstances.autocast is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, circumstances.autocast), cache_enabled=not transformed)


def compute_losses(
    repetition: Repetition, model: nn.Module, batch: Batch, count: int, *, transformed: bool = False
) -> Tensor:
    """Compute the loss of each example of a batch, as in training; `transformed` says whether within `vmap`."""
    with _autocast(repetition.run.circumstances, repetition.data.device, transformed=transformed):
        values = repetition.task.loss(model, own_containers(batch))
    return require_one_each(values, count, "loss", "example")


@dataclass(frozen=True)
class Seen:
    """What a step of a training shows: its loss, and the norm of its gradient, None where it is not asked for.

    missing: the parameters that its loss has no gradient of.
    """

    loss: Tensor
    gradient_norm: Tensor | None = None
    missing: Names = frozenset()


class Training:
    """A training run as it was recorded, but without some examples.

    leaves_out: whether those are left out of batches, for models where examples of a batch see each other; otherwise
        they have weight 0.
    fresh_draws: why the other examples of a batch got other random numbers than in training; None if they did not.
    """

    def __init__(self, repetition: Repetition, excluded: Excluded | None = None, *, leaves_out: bool = False) -> None:
        self.repetition, self._excluded, self._leaves_out = repetition, excluded, leaves_out
        self.fresh_draws: str | None = None
        run = repetition.run
        self.model = repetition.make_model()
        own = dict(self.model.named_parameters())
        self.parameters = {name: own[name] for name in repetition.trained}
        settings = run.steps[repetition.begin].groups
        self.optimiser = make_optimiser(run.optimiser, run.groups, settings, self.parameters)
        give_memory(self.optimiser, self.parameters, run.optimiser_state(repetition.begin))

    def measure_first(self) -> tuple[float, float]:
        """Return the loss and the norm of the gradient where the repetition begins."""
        seen = self._backward(self.repetition.begin, measure=True)
        assert seen.gradient_norm is not None
        return float(seen.loss), float(seen.gradient_norm)

    def state(self) -> Parameters:
        """Return the trained parameters and all buffers, not copied."""
        parameters = {name: p.detach() for name, p in self.parameters.items()}
        return {**parameters, **dict(self.model.named_buffers())}

    def step(self, number: int, *, measure: bool = False) -> Seen:
        """Make a step of the recorded run; `measure` asks for the norm of the gradient."""
        step = self.repetition.run.steps[number]
        set_settings(self.optimiser, self.repetition.find_settings(number))
        before = describe_groups(self.optimiser) if measure and step.left is None else None
        if step.closure:
            seen = self._step_with_closure(number)
        else:
            seen = self._backward(number, measure=measure)
            self.optimiser.step()
        if before is not None:
            _refuse_own_settings(type(self.optimiser), find_changes(before, describe_groups(self.optimiser)))
        return seen

    def _step_with_closure(self, number: int) -> Seen:
        """Let the optimiser evaluate the loss itself, as often as it wants; the first value is what was recorded."""
        losses: list[Tensor] = []

        def closure() -> Tensor:
            with torch.enable_grad():
                losses.append(self._backward(number, measure=False, seeds=not losses).loss)
            return losses[-1]

        self.optimiser.step(closure)  # type: ignore[arg-type]
        return Seen(losses[0])

    def _backward(self, number: int, *, measure: bool, seeds: bool = True) -> Seen:
        """Leave the gradient of a step, clipped, in the parameters; return what it shows, its norm before clipping.

        seeds: whether micro-batches are seeded, as they are once in a step.
        """
        step = self.repetition.run.steps[number]
        self.model.zero_grad()
        loss: Tensor = torch.zeros((), device=self.repetition.data.device)
        emptied = True
        for index, micro in enumerate(step.batches):
            objective = self._objective(micro, micro_seed(step.seed, index) if seeds else None)
            if index == 0 and self.repetition.regulariser is not None:
                objective = objective + self.repetition.regulariser(self.model)
            if objective.requires_grad:
                objective.backward()
                emptied = False
            loss = loss + objective.detach()
        parameters = list(self.parameters.values())
        missing = frozenset(name for name, p in self.parameters.items() if p.grad is None)
        self._settle_missing(number, emptied)
        norm = total_norm([p.grad for p in parameters if p.grad is not None]) if measure else None
        if step.clipping is not None and step.clipping.kind == "norm":
            clip_grad_norm_(parameters, step.clipping.limit, step.clipping.norm_type)
        elif step.clipping is not None:
            clip_grad_value_(parameters, step.clipping.limit)
        return Seen(loss, norm, missing)

    def _settle_missing(self, number: int, emptied: bool) -> None:
        """Have the gradients missing that are missing in every run; `emptied` if no example is left in the step."""
        step, routes = self.repetition.run.steps[number], self.repetition.routes
        found = None if routes is None or emptied else routes.at(number)
        withheld, filled = found or (step.missing, self.parameters.keys() - step.missing)
        for name, p in self.parameters.items():
            if name in withheld:
                p.grad = None
            elif p.grad is None and name in filled:
                p.grad = torch.zeros_like(p)

    def _objective(self, micro: MicroBatch, seed: int | None) -> Tensor:
        """Return the objective of a micro-batch: the sum of its losses, divided by the recorded normaliser."""
        examples, batch = self.repetition.gather(micro)
        without = None if self._excluded is None else torch.from_numpy(self._excluded[examples.numpy()])
        if seed is not None:
            seed_everything(seed)
        if without is None or not bool(without.any()):
            return self._losses(batch, len(examples)).sum() / micro.normaliser
        if not self._leaves_out:
            losses = self._losses(batch, len(examples))
            return (losses * (~without).to(losses.device, losses.dtype)).sum() / micro.normaliser
        kept = (~without).nonzero().flatten()
        if len(kept) == 0:
            return torch.zeros((), device=self.repetition.data.device)
        if len(kept) > 1 or not trains_batch_norm(self.model):
            return self._losses_without(batch, examples, kept, seed).sum() / micro.normaliser
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            return self._losses_without(batch, examples, kept, seed).sum() / micro.normaliser
        except TaskError as error:
            _warn_of_single(first_line(error.__cause__ or error))
            load_tensors(self.model, before)
            return torch.zeros((), device=self.repetition.data.device)

    def _losses(self, batch: Batch, count: int) -> Tensor:
        try:
            return compute_losses(self.repetition, self.model, batch, count)
        except (ImprintError, UncapturableDraws, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise TaskError(f"the loss function failed in the modes of training: {first_line(error)}.") from error

    def _losses_without(self, batch: Batch, examples: Tensor, kept: Tensor, seed: int | None) -> Tensor:
        """Compute the losses of some examples of a batch, without the others but with the same random numbers."""
        few = self._select(batch, examples, kept)
        if seed is None:
            return self._losses(few, len(kept))
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        drawn: list[Tensor] = []
        try:
            with torch.no_grad(), capture_draws() as drawn:
                self._losses(batch, len(examples))
            load_tensors(self.model, before)
            seed_everything(seed)
            with substitute_draws(drawn, kept, len(examples)) if drawn else nullcontext():
                return self._losses(few, len(kept))
        except UncapturableDraws as reason:
            self.fresh_draws = str(reason)
        load_tensors(self.model, before)
        seed_everything(seed)
        return self._losses(few, len(kept))

    def _select(self, batch: Batch, examples: Tensor, kept: Tensor) -> Batch:
        """Return a batch of some of its examples: its own rows where it has rows, so that padding stays."""
        if is_columnar(batch, len(examples)):
            return map_tensors(lambda t: t[kept.to(t.device)], batch)
        return self.repetition.data.gather(examples[kept])


def find_regularised(repetition: Repetition) -> bool:
    """Tell whether the run's loss contained the task's regulariser, from its first loss and gradient.

    A regulariser that stands for the weight decay of the optimiser did not: the optimiser adds it by itself.
    """
    step = repetition.run.steps[repetition.begin]
    if repetition.task.regulariser is None:
        return False
    losses = [micro.loss for micro in step.batches if micro.loss is not None]
    recorded = sum(losses) if len(losses) == len(step.batches) else None, step.gradient_norm

    def miss(regularised: bool) -> float:
        with as_recorded(repetition.run.circumstances):
            found = Training(replace(repetition, regularised=regularised)).measure_first()
        return sum(abs(now - then) / abs(then) for now, then in zip(found, recorded, strict=True) if then)

    with_it, without_it = miss(True), miss(False)
    if with_it == without_it:  # nothing was recorded to compare with, or it is 0 at the start
        return not any(group.get("weight_decay") for group in step.groups)
    return with_it < without_it


def _refuse_own_settings(kind: type[Optimizer], changed: Sequence[Settings]) -> None:
    """Refuse an optimiser that changes its own settings, where the recording does not tell which these are."""
    if names := sorted({repr(name) for group in changed for name in group}):
        raise SimulationError(
            f"{kind.__name__} changes {', '.join(names)} of its parameter groups in its own steps, and the recording "
            "is of a version that did not tell this from a schedule: record the run again."
        )


@functools.cache
def _warn_of_single(reason: str) -> None:
    logger.warning(
        "without a source, an example is alone in its batch, where batch normalisation has no statistics: it counts "
        "for nothing there (%s)",
        reason,
    )
