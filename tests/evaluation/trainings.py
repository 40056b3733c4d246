"""Small models with data to train them on, together or alone in a plain loop."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Task
from imprint.data import Data
from imprint.evaluation.training import Training, train_together
from imprint.task import Batch, Parameters

CPU = torch.device("cpu")
EXAMPLES = 30
SUBSETS = [torch.arange(30), torch.arange(30)[torch.arange(30) % 3 != 0], torch.arange(5, 30), torch.arange(9)]
SEEDS = [3, 4, 5, 6]
TRAINING = Training(epochs=3, lr=0.1, batch_size=8, momentum=0.9, weight_decay=1e-2)
ADAM = Training(epochs=3, lr=0.01, batch_size=8, optimiser="adam")
After = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Kind:
    """A kind of model, with data for it."""

    build: Callable[[], nn.Module]
    data: Batch
    task: Callable[[nn.Module], Task] = Task.classifier

    @property
    def inputs(self) -> Data:
        return Data(self.data, device=CPU)

    def together(self, subsets: list[Tensor], seeds: list[int], training: Training, **options: Any) -> Parameters:
        return train_together(self.build, self.task, self.inputs, subsets, seeds, training, **options)[training.epochs]

    def alone(self, subset: Tensor, seed: int, training: Training, after: dict[int, After] | None = None) -> nn.Module:
        """The same training with torch's own optimisers, one model at a time.

        after: takes parameters and second moments as they are after each step.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = self.build().train()
        task, inputs = self.task(model), self.inputs
        optimiser, schedule = optimiser_of(model, training, training.epochs * training.steps(len(subset)))
        order = torch.Generator().manual_seed(seed)
        for _ in range(training.epochs):
            chosen = subset[torch.randperm(len(subset), generator=order)] if training.shuffle else subset
            for batch in chosen.split(training.batch_size):
                if training.drop_last and len(batch) < training.batch_size:
                    continue
                optimiser.zero_grad()
                task.loss(model, inputs.gather(batch)).mean().backward()
                optimiser.step()
                schedule.step()
                if after is not None:
                    after[len(after) + 1] = {
                        name: (p.detach().clone(), optimiser.state[p]["exp_avg_sq"].clone())
                        for name, p in model.named_parameters()
                    }
        return model


def optimiser_of(
    model: nn.Module, training: Training, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    optimiser: torch.optim.Optimizer
    if training.optimiser == "sgd":
        optimiser = torch.optim.SGD(
            model.parameters(), training.lr, training.momentum, weight_decay=training.weight_decay
        )
    else:
        adam = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
        optimiser = adam(model.parameters(), training.lr, training.betas, weight_decay=training.weight_decay)

    def factor(step: int) -> float:
        growth = min(1.0, (step + 1) / training.warmup) if training.warmup else 1.0
        share = min(1.0, max(0.0, (step - training.warmup) / max(1, steps - training.warmup)))
        falls = {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}
        return growth * falls[training.schedule]

    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, factor)


class Scaled(nn.Module):
    """Has a buffer that nothing changes, unless `counting`, and one that is not saved."""

    scale: Tensor
    shift: Tensor

    def __init__(self, *, drawn: bool = False, counting: bool = False) -> None:
        super().__init__()
        self.inner, self.counting = nn.Linear(4, 3), counting
        self.register_buffer("scale", torch.rand(4) if drawn else torch.arange(1.0, 5.0))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.counting and self.training:
            self.shift.mul_(0.9)
        logits: Tensor = self.inner(x * self.scale + self.shift)
        return logits


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


LABELS = torch.randint(0, 3, (EXAMPLES,), generator=torch.Generator().manual_seed(1))
PERCEPTRON = Kind(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), (draw(30, 4), LABELS))
