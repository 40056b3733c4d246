"""What training takes, from a few steps of it."""

from itertools import count

import pytest
import torch
from torch import Tensor, nn

from imprint import Task
from imprint.data import Data
from imprint.evaluation import Together, Training, training_cost
from imprint.evaluation.training_cost import TrainingCost, measure_together, measure_training


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is a second further whenever somebody looks."""
    ticks = count()
    monkeypatch.setattr(training_cost, "_now", lambda device: float(next(ticks)))


def make_data(n: int = 20) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=generator), torch.arange(n) % 2


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.usefixtures("ticking")
def test_a_training_takes_its_steps_times_a_step() -> None:
    data = Data(make_data(), device=torch.device("cpu"))
    found = measure_training(Task.classifier(make_model()), data, 300, 8)
    assert found.seconds == 300.0  # a second each
    assert found.origin == "of 300 steps of 8 examples" and found.seconds_for(4) == 1200.0


@pytest.mark.usefixtures("ticking")
def test_models_that_train_together_share_a_step() -> None:
    training = Training(epochs=10, lr=0.1, batch_size=8, drop_last=True)
    train = Together(lambda: nn.Linear(3, 2), Task.classifier, make_data(), training, at_once=4)
    found = measure_together(train, 13)
    assert (found.at_once, found.seconds, found.seconds_at_once) == (4, 20.0, 20.0)  # 2 steps an epoch
    assert found.seconds_for(13) == 13 / 4 * 20.0 and found.seconds_for(1) == 20.0
    assert found.origin == "of 10 epochs in batches of 8"
    assert measure_together(train, 3).at_once == 3


def test_single_trainings_add_up() -> None:
    assert TrainingCost(2.5, "of 9 steps").seconds_for(4) == 10.0


def test_measuring_leaves_the_model_and_the_random_numbers_alone() -> None:
    model = make_model().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data = Data(make_data(), device=torch.device("cpu"))
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    measure_training(Task.classifier(model), data, 5, 64)  # more than there are
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training and all(p.grad is None for p in model.parameters())
