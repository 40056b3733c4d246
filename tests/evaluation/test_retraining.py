"""Many models trained as one computation are the models a plain loop would have trained."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from imprint import Task
from imprint.data import Data
from imprint.evaluation.retraining import Training, measured, train_together

TRAINING = Training(epochs=3, lr=0.1, batch_size=8, momentum=0.9, weight_decay=1e-2)
SUBSETS = [torch.arange(30), torch.arange(30)[torch.arange(30) % 3 != 0], torch.arange(5, 30)]
SEEDS = [3, 4, 5]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(30, 4, dtype=torch.float64), torch.randint(0, 3, (30,))


def train_alone(x: Tensor, y: Tensor, subset: Tensor, seed: int, drop_last: bool) -> nn.Module:
    """The same training with torch's own optimiser, one model at a time."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    optimiser = torch.optim.SGD(model.parameters(), TRAINING.lr, TRAINING.momentum, weight_decay=TRAINING.weight_decay)
    order = torch.Generator().manual_seed(seed)
    for _ in range(TRAINING.epochs):
        for batch in subset[torch.randperm(len(subset), generator=order)].split(TRAINING.batch_size):
            if drop_last and len(batch) < TRAINING.batch_size:
                continue
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimiser.step()
    return model


@pytest.mark.parametrize("drop_last", [False, True])
def test_models_trained_together_are_those_trained_alone(drop_last: bool) -> None:
    x, y = data()
    inputs = Data((x, y), device=torch.device("cpu"))
    training = replace(TRAINING, drop_last=drop_last)
    together = train_together(build, Task.classifier, inputs, SUBSETS, SEEDS, training)[TRAINING.epochs]
    for index, (subset, seed) in enumerate(zip(SUBSETS, SEEDS, strict=True)):
        alone = train_alone(x, y, subset, seed, drop_last)
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(together[name][index], parameter.detach(), rtol=1e-9, atol=1e-12)


def test_measurements_of_a_stack_are_those_of_its_models() -> None:
    x, y = data()
    stack = train_together(build, Task.classifier, Data((x, y), device=torch.device("cpu")), SUBSETS, SEEDS, TRAINING)
    losses = measured(Task.classifier(build()), stack[TRAINING.epochs], (x, y), len(x))
    model = build()
    model.load_state_dict({name: tensor[1] for name, tensor in stack[TRAINING.epochs].items()})
    torch.testing.assert_close(losses[1], nn.functional.cross_entropy(model(x), y, reduction="none").detach())


def test_recorded_epochs_are_states_on_the_way() -> None:
    short = replace(TRAINING, epochs=2)
    inputs = Data(data(), device=torch.device("cpu"))
    whole = train_together(build, Task.classifier, inputs, SUBSETS, SEEDS, TRAINING, record=(2,))
    part = train_together(build, Task.classifier, inputs, SUBSETS, SEEDS, short)
    assert sorted(whole) == [2, 3]
    for name, tensor in part[2].items():
        torch.testing.assert_close(whole[2][name], tensor)


def test_another_order_gives_another_model_of_the_same_initialisation() -> None:
    inputs = Data(data(), device=torch.device("cpu"))
    run = train_together(build, Task.classifier, inputs, SUBSETS[:1] * 2, [3, 3], TRAINING, orders=[1, 2])
    again = train_together(build, Task.classifier, inputs, SUBSETS[:1] * 2, [3, 3], TRAINING, orders=[1, 1])
    weight = run[TRAINING.epochs]["0.weight"]
    assert not torch.allclose(weight[0], weight[1])
    torch.testing.assert_close(again[TRAINING.epochs]["0.weight"][0], again[TRAINING.epochs]["0.weight"][1])
