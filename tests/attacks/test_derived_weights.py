"""Weights that are made of others, and models that remember what they have seen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.attacks.cases import CLASSES, WIDTH, Case, Table, columns, judge, mlp, register
from tests.attacks.test_misused_models import TRAJECTORIES, Around, weight

DERIVED: Table = {}
attack = register(DERIVED)
CACHED = r"depend|gradient|cache|differ"


@pytest.mark.long
@pytest.mark.parametrize("name", DERIVED)
def test_no_derived_weight_is_silently_misread(name: str) -> None:
    judge(DERIVED[name])


# --- weights that are derived


@attack("honest", CACHED)
def weight_norm_of_old() -> Case:
    model = mlp()
    nn.utils.weight_norm(model[0])
    return Case(model)


@attack("works")
def weight_norm_by_parametrisation() -> Case:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return Case(model, plan=TRAJECTORIES)


@attack("honest", CACHED)
def spectral_norm_of_old() -> Case:
    model = mlp()
    nn.utils.spectral_norm(model[0])
    model.train()(columns()[0])
    return Case(model)


@attack("honest", CACHED)
def spectral_norm_by_parametrisation() -> Case:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return Case(model)


@attack("honest", CACHED)
def orthogonal_weights() -> Case:
    model = Around(lambda self, h: self.head(self.square(h)), square=nn.Linear(4, 4).double())
    parametrizations.orthogonal(model.square)  # type: ignore[arg-type]
    return Case(model)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


@attack("works")
def a_parametrisation_of_the_user() -> Case:
    model = Around(lambda self, h: self.head(self.square(h)), square=nn.Linear(4, 4).double())
    parametrize.register_parametrization(model.square, "weight", Symmetric())  # type: ignore[arg-type]
    return Case(model)


def caching(condition: Callable[[Any], bool]) -> Case:
    """A weight made of another one, and kept while `condition` holds."""

    def last(self: Any, h: Tensor) -> Tensor:
        if self.kept is None or not condition(self):
            self.kept = self.head.weight / self.head.weight.norm()
        return F.linear(h, self.kept)

    model = Around(last, kept=None)
    model.eval()(columns()[0])
    return Case(model.train(), training_mode=True)


@attack("honest", CACHED)
def a_derived_weight_cached_in_evaluation_mode() -> Case:
    return caching(lambda self: not self.training)


@attack("honest", CACHED)
def a_derived_weight_cached_without_gradient() -> Case:
    return caching(lambda self: not torch.is_grad_enabled())


@attack("honest", CACHED)
def a_derived_weight_cached_by_the_version_of_the_weight() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        key = (id(self.head.weight), self.head.weight._version)
        if self.kept[0] != key or self.training:
            self.kept = key, self.head.weight / self.head.weight.norm()
        return F.linear(h, self.kept[1])

    model = Around(last, kept=(None, None))
    model.eval()(columns()[0])
    return Case(model, training_mode=True)


class Merging(nn.Module):
    """Adds its low-rank part to the weight when it is put into evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES).double()
        self.down, self.up = nn.Parameter(weight(WIDTH, 1)), nn.Parameter(weight(1, CLASSES))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        if self.merged == mode:
            sign = -1 if mode else 1
            self.layer.weight.data += sign * (self.down @ self.up).T.detach()
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out if self.merged else out + x @ self.down @ self.up


@attack("honest", CACHED)
def an_adapter_that_merges_itself_in_evaluation_mode() -> Case:
    return Case(Merging(), training_mode=True)


@attack("honest", CACHED)
def an_adapter_that_was_merged_before() -> Case:
    return Case(Merging().eval(), training_mode=True)


# --- models that remember


@attack("honest", "twice|depend|state|buffer|random|differ|chang")
def a_buffer_that_follows_the_activations() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.running.mul_(0.9).add_(0.1 * h.detach().mean(0))
        out: Tensor = self.head(h - self.running)
        return out

    model = Around(last)
    model.register_buffer("running", torch.zeros(4).double())
    return Case(model, truth=False)


@attack("honest", "twice|depend|state|random|differ|chang")
def an_attribute_that_follows_the_activations() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.running = 0.9 * self.running + 0.1 * h.detach().mean(0)
        out: Tensor = self.head(h - self.running)
        return out

    return Case(Around(last, running=torch.zeros(4).double()), truth=False)


@attack("honest", "twice|depend|state|buffer|random|differ|chang")
def a_counter_of_calls_in_a_buffer() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(h)
        return out

    model = Around(last)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    return Case(model)


@attack("honest", "twice|depend|state|random|differ|chang")
def a_warm_up_by_the_number_of_calls() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.head(h * min(1.0, self.calls / 50))
        return out

    return Case(Around(last, calls=0), truth=False)


@attack("honest", "batch norm|statistic|alone|depend")
def batch_norm_that_puts_itself_into_training_mode() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm.train()(h))
        return out

    return Case(Around(last, norm=nn.BatchNorm1d(4).double()), truth=False)


@attack("honest", "in place|clamp|chang|depend|gradient")
def weights_clamped_in_forward() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.head.weight.data.clamp_(-0.2, 0.2)
        out: Tensor = self.head(h)
        return out

    return Case(Around(last))


@attack("works")
def activations_kept_for_a_plot() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        self.seen = h
        out: Tensor = self.head(h)
        return out

    return Case(Around(last, seen=None))


@attack("honest")
def a_model_that_puts_itself_into_training_mode() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = self.head(self.train().dropout(h))
        return out

    return Case(Around(last, dropout=nn.Identity()))
