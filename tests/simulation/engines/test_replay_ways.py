"""Whether runs are stacked is tried, not listed: optimisers, models and their attention."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint.simulation.engines.replay.optimisers import find_why_not_stackable
from imprint.simulation.engines.replay.training import as_recorded
from imprint.simulation.engines.replay.ways import Way, find_way
from tests.simulation.engines.trainings import Training, classification, mlp

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD")
SHAPES = [[torch.Size([8, 4]), torch.Size([8])], [torch.Size([]), torch.Size([3, 2, 2])]]


def settings_of(name: str, **options: Any) -> list[dict[str, Any]]:
    optimiser = getattr(torch.optim, name)([torch.zeros(2, 2)], **options)
    return [{key: value for key, value in optimiser.param_groups[0].items() if key != "params"}] * 2


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimisers_can_be_stacked(name: str) -> None:
    assert find_why_not_stackable(getattr(torch.optim, name), settings_of(name), SHAPES) is None


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_optimisers_that_mix_values_cannot_be_stacked(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this torch has no {name}")
    matrices = [[torch.Size([8, 4])], [torch.Size([3, 2])]]
    reason = find_why_not_stackable(getattr(torch.optim, name), settings_of(name), matrices)
    assert reason is not None and reason.startswith(name)


class Normed(torch.optim.SGD):
    """Divides each gradient by the norm of its parameter, as LARS does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.div_(p.detach().norm())
        super().step(closure)


def test_an_optimiser_of_the_users_that_takes_norms_cannot_be_stacked() -> None:
    reason = find_why_not_stackable(Normed, settings_of("SGD"), SHAPES)
    assert reason == "Normed moves a stack of rows in another way than each of them alone"


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.enter, self.leave, self.dropout = nn.Linear(1, 24), nn.Linear(8, 3), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.enter(x.unsqueeze(2)).unflatten(2, (2, 12)).transpose(1, 2).split(4, 3)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        outputs: Tensor = self.leave(mixed.transpose(1, 2).flatten(2).mean(1))
        return outputs


def way_of(model: nn.Module) -> Way:
    training = Training(model.double(), classification())
    _, run = training.run()
    repetition = training.repetition(run)
    with as_recorded(run.circumstances):
        return find_way(repetition)


def test_attention_that_vmap_takes_row_by_row_is_computed_by_plain_products() -> None:
    assert way_of(Attending(0.0)) == Way(False, None, plain_attention=True)


def test_dropout_of_plain_attention_is_captured() -> None:
    assert way_of(Attending(0.3)).one_by_one is None


def test_a_perceptron_is_stacked_as_it_is() -> None:
    assert way_of(mlp(nn.Dropout(0.2))) == Way(False, None)


def test_attention_that_draws_in_its_own_kernel_is_replayed_one_by_one() -> None:
    """As on a GPU; on the CPU no fused kernel has dropout, so one that draws otherwise stands for it."""

    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.bernoulli(torch.full_like(x, 0.7).detach())

    way = way_of(mlp(Drawn()))
    assert way.one_by_one is not None and "bernoulli draws random numbers inside its own kernel" in way.one_by_one
    assert not way.leaves_out
