"""Random numbers of a plain forward pass are found again in a stacked one, and in one of a part of the batch."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from imprint.model.draws import UncapturableDraws, capture_draws, substitute_draws
from imprint.model.replica import make_private

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def dropouts() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.AlphaDropout(0.3), nn.Dropout(0.2))


def test_a_stacked_pass_drops_what_the_plain_pass_has_dropped() -> None:
    model = dropouts()
    with capture_draws() as drawn:
        plain = model(X)
    stacks = {name: torch.stack([p.detach()] * 3) for name, p in model.named_parameters()}

    def at_row(parameters: dict[str, Tensor]) -> Tensor:
        with substitute_draws(drawn):
            outputs: Tensor = functional_call(model, parameters, (X,))
            return outputs

    for row in vmap(at_row, randomness="same")(stacks):
        torch.testing.assert_close(row, plain)
    assert len(drawn) == 3


def test_a_pass_of_some_examples_drops_what_it_dropped_among_the_others() -> None:
    model, kept = dropouts(), torch.tensor([1, 4, 5])
    with capture_draws() as drawn:
        whole = model(X)
    with substitute_draws(drawn, kept, len(X)):
        torch.testing.assert_close(model(X[kept]), whole[kept])


def test_partners_drawn_among_all_examples_are_not_those_of_some() -> None:
    """Mixup draws a permutation of the batch, which names examples that are no longer there."""
    with capture_draws() as drawn:
        torch.randperm(6)
    few = substitute_draws(drawn, torch.tensor([0, 1]), 6)
    with pytest.raises(UncapturableDraws, match="whole numbers for each example"), few:
        torch.randperm(2)


def test_a_draw_that_is_not_by_shape_is_refused() -> None:
    with (
        pytest.raises(UncapturableDraws, match="multinomial draws random numbers inside its own kernel"),
        capture_draws(),
    ):
        torch.multinomial(torch.ones(3), 2)
    with pytest.raises(UncapturableDraws, match="bernoulli draws"), capture_draws():
        torch.bernoulli(torch.full((3,), 0.5))


def test_a_pass_that_draws_something_else_is_refused() -> None:
    with capture_draws() as drawn:
        torch.rand(3)
    with pytest.raises(UncapturableDraws, match=r"of shape \(4,\) where \(3,\) were"), substitute_draws(drawn):
        torch.rand(4)
    with pytest.raises(UncapturableDraws, match="draws more random numbers"), substitute_draws([]):
        torch.rand(4)


def test_a_private_copy_is_trained_without_the_users_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    own = make_private(model)
    own(X).sum().backward()
    with torch.no_grad():
        for p in own.parameters():
            if p.requires_grad:
                p.add_(1.0)
    assert own.get_parameter("0.weight") is model.get_parameter("0.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.get_parameter("2.weight").grad is None


def test_tied_parameters_stay_tied_in_a_private_copy() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    own = make_private(model)
    assert own.get_parameter("1.weight") is own.get_parameter("0.weight") is not model.get_parameter("0.weight")
