"""Small training runs that are recorded, and a repetition of a run from nothing but its recording."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from imprint import Recording, RunRecorder
from imprint.recording.memory import give_memory
from imprint.recording.records import Step, micro_seed
from imprint.recording.seeding import seed_everything

N = 24
SEEN = torch.Generator().manual_seed(3)
X, Y = torch.randn(N, 4, generator=SEEN), torch.randint(0, 3, (N,), generator=SEEN)

Make = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int = 0) -> nn.Sequential:
    """Return a model that draws random numbers and has running statistics."""
    torch.manual_seed(seed)
    layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
    return nn.Sequential(*layers)


def make_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def mean_loss(model: nn.Module, indices: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(X[indices]), Y[indices])


def train(
    folder: Path,
    make: Make = make_adamw,
    *,
    model: nn.Sequential | None = None,
    epochs: int = 2,
    stop: int | None = None,
    resume: bool = False,
    **options: Any,
) -> tuple[nn.Sequential, RunRecorder]:
    """Train a model for some epochs of four batches, or until it stops after so many steps, and record it."""
    model = make_model() if model is None else model
    optimiser = make(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, 20)
    run = RunRecorder(folder, model, optimiser, scheduler=scheduler, **options)
    if resume:
        run.resume()
    for indices in run.batches(N, 6, epochs=epochs):
        if run.steps == stop:
            run.close()
            break
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(mean_loss(model, indices))
            step.clip_grad_norm_(0.5)
            optimiser.step()
        scheduler.step()
    return model, run


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder, but for the one that says how long the training took."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "recording.json"}


def repeat(recording: Recording, model: nn.Module) -> nn.Module:
    """Repeat a recorded run on another copy of its model, one micro-batch after the other."""
    model = deepcopy(model)
    parameters = dict(model.named_parameters())
    assert not model.load_state_dict(recording.state(0), strict=False).unexpected_keys
    make: Any = recording.optimiser
    optimiser = make(
        [
            {"params": [parameters[name] for name in names], **settings}
            for names, settings in zip(recording.groups, recording.steps[0].groups, strict=True)
        ]
    )
    give_memory(optimiser, parameters, recording.optimiser_state(0))
    for module in model.modules():
        module.training = True
    for name in recording.circumstances.evaluating:
        model.get_submodule(name).training = False
    for step in recording.steps:
        for group, settings in zip(optimiser.param_groups, step.groups, strict=True):
            group.update(settings)

        def evaluate(step: Step = step) -> Tensor:
            optimiser.zero_grad()
            total = torch.zeros(())
            for index, batch in enumerate(step.batches):
                seed_everything(micro_seed(step.seed, index))
                examples = torch.tensor(batch.examples)
                value = mean_loss(model, examples) * (len(batch.examples) / batch.normaliser)
                value.backward()
                total = total + value.detach()
            return total

        if step.closure:
            optimiser.step(evaluate)
            continue
        evaluate()
        if step.clipping is not None and step.clipping.kind == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), step.clipping.limit, step.clipping.norm_type)
        elif step.clipping is not None:
            nn.utils.clip_grad_value_(model.parameters(), step.clipping.limit)
        optimiser.step()
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    """Assert that two models are equal bit for bit."""
    theirs = other.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name
