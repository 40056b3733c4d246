"""Models with weights where the library does not look, or with more of a life than a function of their weights.

Each is an ordinary model with one mistake or oddity. Scores come out right, or the problem is refused or named.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan
from tests.attacks.cases import CLASSES, WIDTH, Case, Table, judge, mlp, register

MODELS: Table = {}
attack = register(MODELS)

HIDDEN = r"trainable|not registered|gradient|selected|depend"
LIVE = r"argument|does not depend|another|live|gradient|copy"
TRAJECTORIES = Plan(engine="trajectories", steps=3, lr=0.2, epsilon=0.01)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_no_model_is_silently_misread(name: str) -> None:
    judge(MODELS[name])


def weight(*shape: int) -> Tensor:
    return (0.5 * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


class Around(nn.Module):
    """A linear layer, and then whatever `last` does with it and its output."""

    def __init__(self, last: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4).double()
        self.head = nn.Linear(4, CLASSES).double()
        self.last = last
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self, self.first(x).tanh())


# --- weights that are not registered


def hidden(hold: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> Case:
    """A matrix that training moves and the model does not register."""
    matrix = weight(4, 4)
    model = Around(lambda self, h: self.head(h @ take(self.held)), held=hold(matrix))
    return Case(model, trained=[*model.parameters(), matrix])


@attack("honest", HIDDEN)
def weights_in_a_list() -> Case:
    return hidden(lambda w: [w], lambda held: held[0])


@attack("honest", HIDDEN)
def weights_in_a_dict() -> Case:
    return hidden(lambda w: {"w": w}, lambda held: held["w"])


@attack("honest", HIDDEN)
def weights_in_a_nested_list_of_tuples() -> Case:
    return hidden(lambda w: [(0, w)], lambda held: held[0][1])


@attack("honest", HIDDEN)
def weights_as_plain_tensors_of_the_module() -> Case:
    return hidden(lambda w: w, lambda held: held)


@attack("honest", HIDDEN)
def weights_in_a_helper_object() -> Case:
    return hidden(lambda w: types.SimpleNamespace(w=w), lambda held: held.w)


@attack("honest", HIDDEN)
def weights_in_a_closure_of_the_model() -> Case:
    return hidden(lambda w: lambda: w, lambda held: held())


@attack("honest", HIDDEN)
def weights_in_a_partial() -> Case:
    return hidden(lambda w: functools.partial(torch.matmul, other=w), lambda held: held(torch.eye(4).double()))


@attack("honest", HIDDEN)
def a_parameter_in_a_list() -> Case:
    matrix = nn.Parameter(weight(4, 4).detach())
    model = Around(lambda self, h: self.head(h @ self.held[0]), held=[matrix])
    return Case(model, trained=[*model.parameters(), matrix])


@attack("honest", HIDDEN)
def weights_in_the_closure_of_the_loss() -> Case:
    model, matrix = mlp(), weight(CLASSES, CLASSES)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) @ matrix, batch[1], reduction="none")

    return Case(model, loss, trained=[*model.parameters(), matrix])


TEMPERATURE = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)


@attack("honest", HIDDEN)
def a_global_temperature_that_is_trained() -> Case:
    model = mlp()
    TEMPERATURE.data.fill_(2.0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) * TEMPERATURE, batch[1], reduction="none")

    return Case(model, loss, trained=[*model.parameters(), TEMPERATURE])


@attack("honest", HIDDEN)
def weights_on_the_class() -> Case:
    matrix = weight(4, 4)

    class WithClassWeight(Around):
        shared = matrix

    model = WithClassWeight(lambda self, h: self.head(h @ self.shared))
    return Case(model, trained=[*model.parameters(), matrix])


@attack("honest", HIDDEN)
def a_buffer_that_is_trained() -> Case:
    model = Around(lambda self, h: self.head(h @ self.matrix))
    model.register_buffer("matrix", weight(4, 4))
    return Case(model, trained=[*model.parameters(), *model.buffers()])


@attack("honest", HIDDEN)
def a_buffer_that_is_trained_and_not_saved() -> Case:
    model = Around(lambda self, h: self.head(h @ self.matrix))
    model.register_buffer("matrix", weight(4, 4), persistent=False)
    return Case(model, trained=[*model.parameters(), *model.buffers()])


@attack("honest", HIDDEN)
def submodules_in_a_list() -> Case:
    layers = [nn.Linear(4, 4).double(), nn.Linear(4, 4).double()]
    model = Around(lambda self, h: self.head(self.layers[1](self.layers[0](h).tanh())), layers=layers)
    return Case(model, trained=[*model.parameters(), *(p for layer in layers for p in layer.parameters())])


@attack("honest", HIDDEN)
def submodules_in_a_dict() -> Case:
    experts = {"a": nn.Linear(4, 4).double()}
    model = Around(lambda self, h: self.head(self.experts["a"](h)), experts=experts)
    return Case(model, trained=[*model.parameters(), *experts["a"].parameters()])


@attack("honest", HIDDEN)
def a_submodule_in_a_closure() -> Case:
    extra = nn.Linear(4, 4).double()
    model = Around(lambda self, h: self.head(extra(h)))
    return Case(model, trained=[*model.parameters(), *extra.parameters()])


@attack("honest", HIDDEN)
def a_wrapped_model_that_is_hidden_from_registration() -> Case:
    inner = mlp()
    model = Around(lambda self, h: self.head(h) + 0 * h[:, :3], wrapped=[inner])
    return Case(
        model,
        lambda m, batch: F.cross_entropy(m(batch[0]) + m.wrapped[0](batch[0]), batch[1], reduction="none"),
        trained=[*model.parameters(), *inner.parameters()],
    )


class Growing(nn.Module):
    """Makes its head when it sees the first input, as some tutorials do."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.first, self.registered = nn.Linear(WIDTH, 4).double(), registered
        self.made: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        if not self.made:
            torch.manual_seed(7)
            self.made.append(nn.Linear(4, CLASSES).double())
            if self.registered:
                self.head = self.made[0]
        head: Tensor = self.made[0](self.first(x).tanh())
        return head


@attack("speaks", HIDDEN + "|appeared|created")
def a_head_that_is_made_in_the_first_forward() -> Case:
    return Case(Growing(registered=True))


@attack("speaks", HIDDEN + "|appeared|created")
def a_hidden_head_that_is_made_in_the_first_forward() -> Case:
    return Case(Growing(registered=False))


@attack("honest", HIDDEN)
def a_fresh_parameter_in_every_forward() -> Case:
    """Its values never train: what matters is that nothing is silently odd about the others."""
    model = Around(lambda self, h: self.head(h * nn.Parameter(torch.ones(4).double())))
    return Case(model)


@attack("works")
def a_parameter_list() -> Case:
    return Case(Around(lambda self, h: self.head(h @ self.held[0]), held=nn.ParameterList([weight(4, 4)])))


@attack("works")
def a_parameter_dict() -> Case:
    return Case(Around(lambda self, h: self.head(h @ self.held["w"]), held=nn.ParameterDict({"w": weight(4, 4)})))


@attack("works")
def a_module_dict_of_experts() -> Case:
    experts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}).double()
    return Case(Around(lambda self, h: self.head(self.experts["a"](h) * self.experts["b"](h)), experts=experts))


# --- complex weights


class Complex(nn.Module):
    def __init__(self, trained: bool, only: bool = False) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 4, dtype=torch.complex128), requires_grad=trained)
        self.head = nn.Linear(4, CLASSES).double().requires_grad_(not only)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((x.to(torch.complex128) @ self.turn).abs().square().tanh())
        return out


@attack("honest", "complex|" + HIDDEN)
def complex_parameters_beside_real_ones() -> Case:
    return Case(Complex(trained=True))


@attack("honest", "complex|" + HIDDEN)
def complex_parameters_only() -> Case:
    return Case(Complex(trained=True, only=True))


@attack("honest")
def complex_parameters_that_are_frozen() -> Case:
    return Case(Complex(trained=False))


@attack("honest")
def a_complex_buffer() -> Case:
    model = Around(lambda self, h: self.head((h * self.turn).abs().square()))
    model.register_buffer("turn", torch.randn(4, dtype=torch.complex128))
    return Case(model)


# --- tied weights


@attack("works")
def tied_by_object() -> Case:
    layer = nn.Linear(WIDTH, WIDTH).double()
    other = nn.Linear(WIDTH, WIDTH).double()
    other.weight = layer.weight
    return Case(nn.Sequential(layer, nn.Tanh(), other))


@attack("works")
def one_module_under_two_names() -> Case:
    layer = nn.Linear(WIDTH, WIDTH).double()
    return Case(nn.Sequential(layer, nn.Tanh(), layer))


@attack("works")
def one_weight_used_transposed() -> Case:
    return Case(Around(lambda self, h: F.linear(h, self.first.weight.t() @ self.first.weight.new_ones(4, 4))[:, :3]))


@attack("honest", "storage|tied|shar|gradient")
def tied_through_data() -> Case:
    layer, other = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    other.weight.data = layer.weight.data
    return Case(nn.Sequential(layer, nn.Tanh(), other))


@attack("honest", "storage|tied|shar|gradient")
def tied_through_a_transposed_view() -> Case:
    layer, other = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
    other.weight = nn.Parameter(layer.weight.data.t())
    return Case(nn.Sequential(layer, nn.Tanh(), other))


@attack("honest", "storage|tied|shar|overlap|gradient")
def a_parameter_that_is_a_slice_of_another() -> Case:
    layer, other = nn.Linear(WIDTH, 5).double(), nn.Linear(5, CLASSES).double()
    other.bias = nn.Parameter(layer.bias.data[:CLASSES])
    return Case(nn.Sequential(layer, nn.Tanh(), other))


@attack("honest", "storage|tied|shar|overlap|gradient")
def a_buffer_on_the_storage_of_a_parameter() -> Case:
    model = Around(lambda self, h: self.head(h) + self.twin)
    model.register_buffer("twin", model.head.bias.detach())
    return Case(model)
