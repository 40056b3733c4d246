"""Retraining many small models as one batched computation: the ground truth of removal effects.

Each model has its own initialisation, its own subset of the data and its own order of mini-batches, as if it had been
trained alone; only the arithmetic is shared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from imprint.data import Data, map_tensors
from imprint.errors import DataError, TaskError
from imprint.progress import Progress
from imprint.task import Batch, Parameters, Task


@dataclass(frozen=True, kw_only=True)
class Training:
    """Stochastic gradient descent with momentum and weight decay over shuffled mini-batches.

    drop_last: leave out an epoch's last batch if it is not full. A batch of a few examples has a noisy gradient of full
        length, and whether there is one depends on the size of the subset: it blurs what a removal does.
    """

    epochs: int
    lr: float
    batch_size: int = 64
    momentum: float = 0.0
    weight_decay: float = 0.0
    drop_last: bool = False


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
    progress: Progress | None = None,
) -> dict[int, Parameters]:
    """Train one model for each subset and seed; the stacked parameters after the recorded epochs and the last.

    build: makes a freshly initialised model from torch's global random state.
    subsets: indices of the examples each model is trained on.
    seeds: one for each model, for its initialisation and, unless `orders` gives others, its order of examples.
    """
    models = [_initial(build, seed) for seed in seeds]
    _refuse(models[0], subsets, training)
    functional, _ = task_of(models[0]).at(task_of(models[0]).state())
    theta = {
        name: torch.stack([dict(m.named_parameters())[name].detach() for m in models]).to(data.device)
        for name, _ in models[0].named_parameters()
    }
    velocity = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    shuffles = [torch.Generator().manual_seed(seed) for seed in orders or seeds]
    kept: dict[int, Parameters] = {}

    def objective(theta: Parameters, batch: Batch, weights: Tensor) -> Tensor:
        return (weights * functional.losses(theta, batch, len(weights))).sum()

    gradients = vmap(grad_and_value(objective))
    for epoch in range(1, training.epochs + 1):
        examples, weights = _epoch(subsets, shuffles, training, next(iter(theta.values())))
        for chosen, weight in zip(examples, weights, strict=True):
            batch = map_tensors(partial(_per_model, len(seeds)), data.gather(chosen.flatten()))
            downhill, _ = gradients(theta, batch, weight)
            active = weight.sum(1) > 0  # a model whose subset is through waits for the next epoch
            for name, tensor in theta.items():
                on = active.reshape(-1, *[1] * (tensor.dim() - 1))
                pull = downhill[name] + training.weight_decay * tensor
                velocity[name] = torch.where(on, training.momentum * velocity[name] + pull, velocity[name])
                theta[name] = torch.where(on, tensor - training.lr * velocity[name], tensor)
        if epoch in record or epoch == training.epochs:
            kept[epoch] = {name: tensor.clone() for name, tensor in theta.items()}
        if progress:
            progress.advance(len(seeds))
    return kept


def measured(task: Task, stacked: Parameters, batch: Batch, count: int) -> Tensor:
    """F of the queries under every model of a stack, shape (models, queries)."""
    functional, _ = task.at(task.state())
    with torch.no_grad(), task.evaluating():
        return vmap(lambda theta: functional.measures(theta, batch, count))(stacked)


def _refuse(model: nn.Module, subsets: Sequence[Tensor], training: Training) -> None:
    """Say so where models trained together would not be what they are alone."""
    if any(True for _ in model.buffers()):
        raise TaskError("models with buffers (such as batch norm's statistics) cannot be trained together yet.")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        raise TaskError("models with dropout cannot be trained together yet: it would be left out.")
    shortest = min(len(subset) for subset in subsets)
    if shortest < (training.batch_size if training.drop_last else 1):
        raise DataError(f"a subset of {shortest} examples does not fill one batch of {training.batch_size}.")


def _per_model(models: int, tensor: Tensor) -> Tensor:
    return tensor.reshape(models, -1, *tensor.shape[1:])


def _initial(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def _epoch(
    subsets: Sequence[Tensor], shuffles: Sequence[torch.Generator], training: Training, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Shuffled mini-batches of every model, shape (steps, models, size), and weights that average over each batch."""
    size = training.batch_size
    steps = max(len(subset) // size if training.drop_last else -(-len(subset) // size) for subset in subsets)
    examples = torch.zeros(len(subsets), steps * size, dtype=torch.int64)
    present = torch.zeros(len(subsets), steps * size, dtype=like.dtype)
    for model, (subset, shuffle) in enumerate(zip(subsets, shuffles, strict=True)):
        seen = len(subset) - (len(subset) % size if training.drop_last else 0)
        examples[model, :seen] = subset[torch.randperm(len(subset), generator=shuffle)[:seen]]
        present[model, :seen] = 1
    examples = examples.reshape(len(subsets), steps, size).transpose(0, 1)
    present = present.reshape(len(subsets), steps, size).transpose(0, 1)
    weights = present / present.sum(2, keepdim=True).clamp(min=1)
    return examples.to(like.device), weights.to(like.device)
