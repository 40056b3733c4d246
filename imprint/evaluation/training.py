"""Trains many small models as one batched computation.

Each model has its own initialisation, subset of the data, order of mini-batches and dropout, as if it were trained
alone; only the arithmetic is shared. `imprint.evaluation.retraining` uses it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from imprint.batches import leaves, map_tensors
from imprint.compat import has_batch_norm, math_attention
from imprint.data import Data
from imprint.errors import DataError, PlanError, TaskError
from imprint.evaluation.subsets import DROPOUT, derive_seed
from imprint.runtime.memory import activation_bytes, budget
from imprint.task import Batch, Functional, Parameters, Task
from imprint.tensors.batching import attempt, vectorise_or_loop
from imprint.tensors.vectors import over_rows

Optimiser = Literal["sgd", "adam", "adamw"]
Schedule = Literal["constant", "linear", "cosine"]
_CACHE = 16 << 20  # bytes of parameters and optimiser state; beyond that a CPU gains nothing from more models


@dataclass(frozen=True, kw_only=True)
class Training:
    """Gradient descent over mini-batches, as in torch's optimisers.

    optimiser: "sgd" with `momentum`, "adam" (weight decay in the gradient) or "adamw" (decoupled weight decay).
    schedule: of the learning rate, after `warmup` steps of linear growth.
    shuffle: a new order for every epoch; otherwise the examples keep their order.
    drop_last: leave out the last batch of an epoch if it is not full. The gradient of a few examples is noisy, and
        whether there is such a batch depends on the size of the subset, which blurs the effect of a removal.
    """

    epochs: int
    lr: float
    batch_size: int = 64
    optimiser: Optimiser = "sgd"
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name, known in (("optimiser", get_args(Optimiser)), ("schedule", get_args(Schedule))):
            if getattr(self, name) not in known:
                raise PlanError(f"{name} {getattr(self, name)!r} is unknown: use one of {', '.join(known)}.")
        for name, least in (("epochs", 1), ("batch_size", 1), ("lr", 0), ("weight_decay", 0), ("warmup", 0)):
            if not getattr(self, name) >= least:
                raise PlanError(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.momentum and self.optimiser != "sgd":
            raise PlanError(f'momentum= works with "sgd" only; {self.optimiser!r} has betas=.')

    def steps(self, examples: int) -> int:
        """Return the number of steps in an epoch over this many examples."""
        return examples // self.batch_size if self.drop_last else -(-examples // self.batch_size)

    def rate(self, step: Tensor, steps: Tensor) -> Tensor:
        """Return the learning rate at `step` of `steps`, elementwise."""
        growing = ((step + 1) / self.warmup).clamp(max=1) if self.warmup else torch.ones_like(step)
        share = ((step - self.warmup) / (steps - self.warmup).clamp(min=1)).clamp(0, 1)
        if self.schedule == "linear":
            growing = growing * (1 - share)
        elif self.schedule == "cosine":
            growing = growing * (1 + torch.cos(math.pi * share)) / 2
        return self.lr * growing


def train_together(
    build: Callable[[], nn.Module],
    task_of: Callable[[nn.Module], Task],
    data: Data,
    subsets: Sequence[Tensor],
    seeds: Sequence[int],
    training: Training,
    *,
    orders: Sequence[int] | None = None,
    record: Sequence[int] = (),
    on_epoch: Callable[[int], None] = lambda models: None,
) -> dict[int, Parameters]:
    """Train one model for each subset and seed; return the stacked parameters after the recorded epochs and the last.

    build: builds a freshly initialised model from torch's global random state.
    subsets: the indices of the examples that each model is trained on.
    seeds: one for each model, for its initialisation and, without `orders`, its order of examples. If all models have
        the same seed they also share their dropout, as they would if each were trained alone.
    """
    kept: dict[int, Parameters] = {}

    def keep(epoch: int, descent: _Descent) -> None:
        if epoch in record or epoch == training.epochs:
            kept[epoch] = descent.state()
        on_epoch(len(seeds))

    _train(build, task_of, data, subsets, seeds, training, orders, on_epoch=keep)
    return kept


@dataclass(frozen=True)
class Recorded:
    """Stacked models during training: all parameters, and Adam's bias-corrected second moments of the trained ones."""

    state: Parameters
    moments: Parameters

    def pair(self, model: int) -> tuple[Parameters, Parameters]:
        """Return one model as a checkpoint with the moments of its optimiser."""
        state, moments = ({name: t[model].clone() for name, t in stack.items()} for stack in (self.state, self.moments))
        return state, moments


def record_together(
    build: Callable[[], nn.Module],
    task_of: Callable[[nn.Module], Task],
    data: Data,
    subsets: Sequence[Tensor],
    seeds: Sequence[int],
    training: Training,
    steps: Sequence[int],
    *,
    orders: Sequence[int] | None = None,
    on_epoch: Callable[[int], None] = lambda models: None,
) -> dict[int, Recorded]:
    """Train as `train_together` does; return the models after some steps, from 1, with Adam's second moments."""
    if training.optimiser == "sgd":
        raise PlanError('second moments exist for "adam" and "adamw" only, not for "sgd".')
    every = int(_count_steps(subsets, training).max())
    if unknown := [step for step in steps if not 1 <= step <= every]:
        raise PlanError(f"step {unknown[0]} cannot be recorded: the training has steps 1 to {every}.")
    kept: dict[int, Recorded] = {}

    def keep(step: int, descent: _Descent) -> None:
        if step in steps:
            kept[step] = Recorded(descent.state(), descent.moments())

    def advance(epoch: int, descent: _Descent) -> None:
        on_epoch(len(seeds))

    _train(build, task_of, data, subsets, seeds, training, orders, on_epoch=advance, on_step=keep)
    return kept


def _train(
    build: Callable[[], nn.Module],
    task_of: Callable[[nn.Module], Task],
    data: Data,
    subsets: Sequence[Tensor],
    seeds: Sequence[int],
    training: Training,
    orders: Sequence[int] | None,
    *,
    on_epoch: "Callable[[int, _Descent], None]",
    on_step: "Callable[[int, _Descent], None]" = lambda step, descent: None,
) -> None:
    if not len(subsets) == len(seeds) == len(orders or seeds) > 0:
        raise DataError(f"each subset needs one seed, got {len(subsets)} subsets and {len(orders or seeds)} seeds.")
    shortest = min(len(subset) for subset in subsets)
    if training.steps(shortest) < 1:
        raise DataError(
            f"a subset of {shortest} examples is smaller than one batch of {training.batch_size}: use a smaller "
            "batch_size, or drop_last=False."
        )
    models = [initialise(build, seed) for seed in seeds]
    _refuse_unequal(models, task_of, data)
    task = task_of(models[0].to(data.device))
    task.replica.train()  # dropout is active in training
    functional, _ = task.at(task.state())
    persistent = models[0].state_dict().keys()
    tables = [
        {**dict(m.named_parameters()), **{name: b for name, b in m.named_buffers() if name in persistent}}
        for m in models
    ]
    theta = {name: torch.stack([table[name].detach().to(data.device) for table in tables]) for name in tables[0]}
    frozen = {name: theta.pop(name) for name, tensor in tables[0].items() if not tensor.requires_grad}
    same, whole = len(set(seeds)) == 1, _count_steps(subsets, training)
    descent = _Descent(functional, theta, frozen, training, same=same, whole=whole)
    shuffles = [torch.Generator().manual_seed(seed) for seed in orders or seeds]
    dropout, step = derive_seed(seeds[0], DROPOUT), 0
    with _seed_torch(dropout), math_attention():  # fused attention takes one model at a time
        for epoch in range(1, training.epochs + 1):
            examples, weights = _draw_epoch(subsets, shuffles, training, next(iter(theta.values())))
            for chosen, weight in zip(examples, weights, strict=True):
                descent.step(
                    map_tensors(lambda t: t.reshape(len(seeds), -1, *t.shape[1:]), data.gather(chosen.flatten())),
                    weight,
                )
                on_step(step := step + 1, descent)
            on_epoch(epoch, descent)


class _Descent:
    """The stacked parameters of all models during training, with the state of their optimisers.

    frozen: the parameters and buffers that are not trained.
    same: whether all models draw the same random numbers, for dropout.
    whole: the number of steps of each model, shape (models,).
    """

    def __init__(
        self,
        task: Functional,
        theta: Parameters,
        frozen: Parameters,
        training: Training,
        *,
        same: bool,
        whole: Tensor,
    ) -> None:
        self.theta, self._frozen, self._training = theta, frozen, training
        self._whole = whole.to(next(iter(theta.values())))
        self._everyone = bool((whole == whole[0]).all())
        self._taken = torch.zeros_like(self._whole)
        self._first = {name: torch.zeros_like(t) for name, t in theta.items()}  # momentum, or Adam's first moment
        adam = training.optimiser != "sgd"
        self._second = {name: torch.zeros_like(t) for name, t in theta.items()} if adam else {}

        def objective(theta: Parameters, frozen: Parameters, batch: Batch, weights: Tensor) -> Tensor:
            return (weights * task.losses({**theta, **frozen}, batch, len(weights))).sum()

        self._gradients = vmap(grad(objective), randomness="same" if same else "different")

    def step(self, batch: Batch, weights: Tensor) -> None:
        """Take one step of every model with examples in the batch; the others wait for the next epoch."""
        downhill, reason = attempt(lambda: self._gradients(self.theta, self._frozen, batch, weights))
        if downhill is None:
            raise TaskError(
                f"this model cannot be trained together with others ({reason}): give a function "
                "train(subset, seed) that trains one."
            )
        training = self._training
        active = (weights.sum(1) > 0).to(self._taken.dtype)
        rate = training.rate(self._taken, self._whole) * active
        self._taken += active
        unbias = [1 - beta ** self._taken.clamp(min=1) for beta in training.betas]
        for name, theta in self.theta.items():
            shape = (-1, *[1] * (theta.dim() - 1))
            pull, eta = downhill[name], rate.reshape(shape)
            if training.weight_decay and training.optimiser != "adamw":
                pull = pull.add(theta, alpha=training.weight_decay)
            if training.weight_decay and training.optimiser == "adamw":
                theta.mul_(1 - training.weight_decay * eta)
            on = None if self._everyone else active.reshape(shape)
            sgd = training.optimiser == "sgd"
            direction = self._momentum(name, pull, on) if sgd else self._adam(name, pull, on, unbias)
            theta.addcmul_(direction, eta, value=-1)

    def state(self) -> Parameters:
        """Copy all parameters."""
        return {name: tensor.clone() for name, tensor in {**self.theta, **self._frozen}.items()}

    def moments(self) -> Parameters:
        """Return Adam's second moments, bias-corrected."""
        unbias = 1 - self._training.betas[1] ** self._taken.clamp(min=1)
        return {name: t / unbias.reshape(-1, *[1] * (t.dim() - 1)) for name, t in self._second.items()}

    def _momentum(self, name: str, pull: Tensor, on: Tensor | None) -> Tensor:
        if not self._training.momentum:
            return pull
        return _blend(self._first[name], self._training.momentum, pull, 1.0, on)

    def _adam(self, name: str, pull: Tensor, on: Tensor | None, unbias: list[Tensor]) -> Tensor:
        beta1, beta2 = self._training.betas
        unbias1, unbias2 = (each.reshape(-1, *[1] * (pull.dim() - 1)) for each in unbias)
        first = _blend(self._first[name], beta1, pull, 1 - beta1, on) / unbias1
        second = _blend(self._second[name], beta2, pull.square(), 1 - beta2, on) / unbias2
        return first / (second.sqrt() + 1e-8)


def _blend(state: Tensor, keep: float, new: Tensor, share: float, on: Tensor | None) -> Tensor:
    """Update state ← keep·state + share·new in place, for the models that are on."""
    if on is None:
        return state.mul_(keep).add_(new, alpha=share)
    return state.add_(on * ((keep - 1) * state + share * new))


def measure_stack(task: Task, stacked: Parameters, batch: Batch, count: int) -> Tensor:
    """Measure F of the queries under every model of a stack, shape (models, queries)."""
    functional, _ = task.at(task.state())

    def measure(vectorise: bool) -> Tensor:
        return over_rows(lambda theta: functional.measures(theta, batch, count), stacked, vectorise=vectorise)  # type: ignore[no-any-return]

    with torch.no_grad(), task.evaluating():
        return vectorise_or_loop(measure)[0]


def models_at_once(
    build: Callable[[], nn.Module],
    task_of: Callable[[nn.Module], Task],
    data: Data,
    training: Training,
    memory: int | str | None = None,
) -> int:
    """Choose how many models to train together: as many as fit the memory of a GPU, or the caches of a CPU."""
    model = initialise(build, 0)
    _refuse_unequal([model], task_of, data)
    task = task_of(model.to(data.device))
    functional, theta = task.at(task.state())
    count = min(training.batch_size, len(data))
    batch = data.gather(torch.arange(count))
    with _seed_torch(0):
        activations = activation_bytes(lambda: functional.losses(theta, batch, count))
    state = sum(tensor.nbytes for tensor in theta.values()) * (3 if training.optimiser == "sgd" else 4)
    rows = sum(leaf.nbytes for leaf in leaves(batch) if isinstance(leaf, Tensor))
    fit = budget(memory, data.device) // (2 * state + 4 * activations + 2 * rows)
    return max(1, fit if data.device.type == "cuda" else min(fit, _CACHE // state))


def _refuse_unequal(models: Sequence[nn.Module], task_of: Callable[[nn.Module], Task], data: Data) -> None:
    """Refuse models that would train differently together than alone.

    Buffers that are the same in every model and do not change, such as rotary frequencies and causal masks, are shared.
    """
    model = models[0]
    alike = not has_batch_norm(model)
    if alike and (before := {name: buffer.detach().clone() for name, buffer in model.named_buffers()}):
        alike = all(_equal(before, dict(other.named_buffers())) for other in models[1:])
        with _seed_torch(0), torch.no_grad():
            task_of(model.to(data.device)).loss(model, data.gather(torch.arange(min(2, len(data)))))
        alike = alike and _equal(before, dict(model.named_buffers()))
    if not alike:
        raise TaskError(
            "models with batch norm, or with buffers that depend on training or on the seed, cannot be trained "
            "together: give a function train(subset, seed) that trains one."
        )


def _equal(buffers: Parameters, others: Parameters) -> bool:
    return buffers.keys() == others.keys() and all(
        buffer.shape == others[name].shape and bool((buffer == others[name].to(buffer.device)).all())
        for name, buffer in buffers.items()
    )


def _seed(seed: int) -> None:
    """Seed torch; `torch.manual_seed` would spend longer on absent devices than a small model on a step."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def initialise(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build a model from a seed, in training mode."""
    with _seed_torch(seed):
        return build().train()


@contextmanager
def _seed_torch(seed: int) -> Iterator[None]:
    """Seed torch, and restore the caller's random state afterwards."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        _seed(seed)
        yield


def _count_steps(subsets: Sequence[Tensor], training: Training) -> Tensor:
    return torch.tensor([training.epochs * training.steps(len(subset)) for subset in subsets])


def _draw_epoch(
    subsets: Sequence[Tensor], shuffles: Sequence[torch.Generator], training: Training, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw the mini-batches of every model, shape (steps, models, size), and weights that average over each batch.

    A short batch is filled up with an example of its own subset at weight 0.
    """
    size = training.batch_size
    steps = max(training.steps(len(subset)) for subset in subsets)
    examples = torch.stack([subset[:1].expand(steps * size) for subset in subsets])
    present = torch.zeros(len(subsets), steps * size, dtype=like.dtype)
    for model, (subset, shuffle) in enumerate(zip(subsets, shuffles, strict=True)):
        seen = min(len(subset), training.steps(len(subset)) * size)
        order = torch.randperm(len(subset), generator=shuffle) if training.shuffle else torch.arange(len(subset))
        examples[model, :seen] = subset[order[:seen]]
        present[model, :seen] = 1
    examples = examples.reshape(len(subsets), steps, size).transpose(0, 1)
    present = present.reshape(len(subsets), steps, size).transpose(0, 1)
    weights = present / present.sum(2, keepdim=True).clamp(min=1)
    return examples.to(like.device), weights.to(like.device)
