"""Many trainings at once: the run without each of some sources, as rows of stacked parameters.

The batch is shared, the weights of its examples are a row's own, and the user's optimiser moves the stack. Nothing is
drawn in the stacked pass: random numbers come from a plain forward pass (see `imprint.model.draws`).
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from imprint.compat import math_attention
from imprint.model.draws import capture_draws, substitute_draws
from imprint.model.replica import Host
from imprint.recording.memory import give_memory, stack_memory
from imprint.recording.records import Clipping, MicroBatch, Step, micro_seed
from imprint.recording.seeding import seed_everything
from imprint.runtime.memory import activation_bytes, tensor_bytes
from imprint.simulation.engines.replay.optimisers import make_optimiser, set_settings
from imprint.simulation.engines.replay.training import Repetition, as_recorded, compute_losses
from imprint.sources import Members
from imprint.task import Batch, Parameters


@dataclass(frozen=True)
class Rows:
    """What each row of a stack is: the examples that it goes without, and a name for messages."""

    without: tuple[Members, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def padded(self, count: int) -> "Rows":
        """Return as many rows as are asked for: the first ones, or these and unperturbed ones after them."""
        nothing = np.zeros(0, dtype=np.int64)
        more = max(0, count - len(self))
        without, names = (*self.without, *[nothing] * more), (*self.names, *["the unperturbed run"] * more)
        return Rows(without[:count], names[:count])


def bound_row(repetition: Repetition, start: Parameters) -> int:
    """Return about how many bytes a row takes: parameters, their gradient, what the optimiser remembers and its
    temporaries, and twice the activations of a micro-batch, for the backward pass.
    """
    run, model = repetition.run, repetition.make_model()
    memory = run.optimiser_state(run.checkpoints[-1]).tensors.values()
    largest = max(run.steps[repetition.begin].batches, key=lambda micro: len(micro.examples))
    examples, batch = repetition.gather(largest)
    with as_recorded(run.circumstances):
        activations = activation_bytes(lambda: compute_losses(repetition, model, batch, len(examples)))
    return 4 * tensor_bytes(start) + sum(map(tensor_bytes, memory)) + 2 * activations


class OwnRouteError(RuntimeError):
    """A row sends examples where the recorded run sent none: it moves parameters that the others leave alone."""


class Stack:
    """Trainings that were recorded as one, each without some examples, in one stack of parameters.

    start: rows of the trained parameters where they begin.
    plain_attention: whether attention is computed by plain matrix products, where vmap does not take the user's.
    """

    def __init__(self, repetition: Repetition, rows: Rows, start: Parameters, *, plain_attention: bool = False) -> None:
        run = repetition.run
        self.repetition, self.rows = repetition, rows
        self._model = repetition.make_model()
        self._host = Host(repetition.make_model() if plain_attention else self._model)
        self._plain_attention, self._prepared = plain_attention, ExitStack()
        if plain_attention:
            self._prepared.enter_context(repetition.task.prepare(self._host.model))
        self.parameters: Parameters = {name: nn.Parameter(start[name].clone()) for name in repetition.trained}
        settings = run.steps[repetition.begin].groups
        self.optimiser = make_optimiser(run.optimiser, run.groups, settings, self.parameters)
        shapes = {name: p.shape[1:] for name, p in self.parameters.items()}
        memory = stack_memory(run.optimiser_state(repetition.begin), shapes, len(rows))
        give_memory(self.optimiser, self.parameters, memory)
        self._rows_of: dict[int, list[int]] = defaultdict(list)
        for row, members in enumerate(rows.without):
            for example in members.tolist():
                self._rows_of[example].append(row)
        self._draws = False

    def step(self, number: int) -> Tensor:
        """Make a step of the recorded run with every row; return the loss of each."""
        step = self.repetition.run.steps[number]
        set_settings(self.optimiser, self.repetition.find_settings(number))
        self.optimiser.zero_grad()
        total: Tensor | None = None
        for index, micro in enumerate(step.batches):
            objectives = self._objectives(step, index, micro)
            objectives.sum().backward()
            total = objectives.detach() if total is None else total + objectives.detach()
        assert total is not None
        routes = self.repetition.routes
        withheld, _ = (routes and routes.at(number)) or (step.missing, None)
        for name, p in self.parameters.items():
            if name in step.missing:
                if name not in withheld and p.grad is not None and bool(p.grad.any()):
                    raise OwnRouteError(
                        f"{name} has a gradient without a source at step {number + 1}, and had none in training"
                    )
                p.grad = None
            elif p.grad is None:
                p.grad = torch.zeros_like(p)
        if step.clipping is not None:
            clip_rows_([p.grad for p in self.parameters.values() if p.grad is not None], step.clipping)
        self.optimiser.step()
        return total

    def _objectives(self, step: Step, index: int, micro: MicroBatch) -> Tensor:
        """Return the objective of a micro-batch at every row."""
        _, batch = self.repetition.gather(micro)
        losses = self._losses(batch, len(micro.examples), micro_seed(step.seed, index))
        objectives = (losses * self.weights(micro.examples, losses.dtype)).sum(1) / micro.normaliser
        regulariser = self.repetition.regulariser
        if index == 0 and regulariser is not None:
            objectives = objectives + self._over_rows(lambda model, _: regulariser(model), None)
        return objectives

    def weights(self, examples: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the weight of each example in each row: 0 for those of the row's own source."""
        weights = np.ones((len(self.rows), len(examples)), dtype=np.float32)
        places = [(row, column) for column, example in enumerate(examples) for row in self._rows_of.get(example, ())]
        if places:
            flat = np.fromiter(chain.from_iterable(places), dtype=np.int64).reshape(-1, 2)
            weights[flat[:, 0], flat[:, 1]] = 0
        return torch.from_numpy(weights).to(self.repetition.data.device, dtype)

    def _losses(self, batch: Batch, count: int, seed: int) -> Tensor:
        """Compute the losses of a batch at every row, (rows, count)."""
        refused: RuntimeError | None = None
        if not self._draws:
            seed_everything(seed)
            try:
                return self._over_rows(partial(self._compute, count=count), batch)
            except RuntimeError as error:  # vmap refuses to draw
                refused = error
        seed_everything(seed)
        with torch.no_grad(), capture_draws() as drawn:
            compute_losses(self.repetition, self._model, batch, count)
        if refused is not None and not drawn:
            raise refused
        self._draws = True

        def with_draws(model: nn.Module, batch: Batch) -> Tensor:
            with substitute_draws(drawn) if drawn else nullcontext():
                return self._compute(model, batch, count)

        seed_everything(seed)
        return self._over_rows(with_draws, batch)

    def _compute(self, model: nn.Module, batch: Batch, count: int) -> Tensor:
        with math_attention() if self._plain_attention else nullcontext():
            return compute_losses(self.repetition, model, batch, count, transformed=True)

    def _over_rows(self, function: Callable[[nn.Module, Batch], Tensor], batch: Batch) -> Tensor:
        def at_row(parameters: Parameters) -> Tensor:
            named = {f"model.{name}": tensor for name, tensor in parameters.items()}
            return functional_call(self._host, named, (function, batch))  # type: ignore[no-any-return]

        found: Tensor = vmap(at_row, randomness="same" if self._draws else "error")(self.parameters)
        return found


def clip_rows_(gradients: Sequence[Tensor], clipping: Clipping) -> None:
    """Clip the gradient of each row in place, as torch.nn.utils.clip_grad_norm_ or clip_grad_value_ clips one."""
    if clipping.kind == "value":
        for gradient in gradients:
            gradient.clamp_(-clipping.limit, clipping.limit)
        return
    each = [torch.linalg.vector_norm(g.reshape(len(g), -1), clipping.norm_type, dim=1) for g in gradients]
    norms = torch.linalg.vector_norm(torch.stack(each), clipping.norm_type, dim=0)
    factors = (clipping.limit / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factors.to(gradient.dtype).reshape(-1, *[1] * (gradient.dim() - 1)))
