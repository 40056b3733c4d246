"""Losses and measures that lost their derivative, and functions and hooks with derivatives of their own."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attacks.cases import CLASSES, Case, Table, cross_entropy, judge, mlp, register
from tests.attacks.test_misused_losses import ce, measuring, on, picked
from tests.attacks.test_misused_models import TRAJECTORIES, Around

DERIVATIVES: Table = {}
attack = register(DERIVATIVES)
DETACHED = r"gradient|depend|zero|differentiat|derivative"


@pytest.mark.long
@pytest.mark.parametrize("name", DERIVATIVES)
def test_no_derivative_is_silently_lost(name: str) -> None:
    judge(DERIVATIVES[name])


# --- values without a derivative


@attack("speaks", DETACHED)
def a_loss_of_detached_outputs() -> Case:
    return on(lambda z, y: ce(z.detach(), y))


@attack("speaks", DETACHED)
def a_loss_through_numpy() -> Case:
    return on(lambda z, y: torch.from_numpy(ce(z, y).detach().numpy()))


@attack("speaks", DETACHED)
def a_loss_of_numbers() -> Case:
    return on(lambda z, y: torch.tensor([float(value) for value in ce(z, y)]))


@attack("speaks", DETACHED)
def a_loss_from_data() -> Case:
    return on(lambda z, y: ce(z.data, y))


@attack("speaks", DETACHED)
def a_loss_without_gradients() -> Case:
    return Case(mlp(), torch.no_grad()(cross_entropy))


@attack("speaks", DETACHED)
def a_loss_in_inference_mode() -> Case:
    return Case(mlp(), torch.inference_mode()(cross_entropy))


@attack("honest", DETACHED)
def features_detached_from_the_body() -> Case:
    return Case(Around(lambda self, h: self.head(h.detach())))


@attack("honest", DETACHED)
def features_computed_without_gradients() -> Case:
    class Frozen(Around):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                h = self.first(x).tanh()
            out: Tensor = self.head(h)
            return out

    return Case(Frozen(lambda self, h: h))


@attack("honest", DETACHED)
def a_target_network_from_the_model_itself() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            target = model(batch[0] + 0.1)
        away: Tensor = model(batch[0]) - 0.5 * target
        return away.square().sum(1) + cross_entropy(model, batch)

    return Case(mlp(), loss)


@attack("honest", DETACHED)
def a_normaliser_that_is_detached() -> Case:
    return on(lambda z, y: ce(z / z.detach().norm(dim=1, keepdim=True), y))


@attack("honest", DETACHED)
def a_reversed_gradient() -> Case:
    return Case(Around(lambda self, h: self.head(2 * h.detach() - h)))


@attack("honest", DETACHED)
def a_measure_without_gradients() -> Case:
    return Case(mlp(), measure=torch.no_grad()(lambda model, batch: picked(model(batch[0]), batch[1])))


@attack("honest", DETACHED)
def a_measure_in_inference_mode() -> Case:
    return Case(mlp(), measure=torch.inference_mode()(lambda model, batch: picked(model(batch[0]), batch[1])))


@attack("honest", DETACHED)
def a_detached_measure() -> Case:
    return measuring(lambda z, y: picked(z, y).detach())


@attack("honest", DETACHED)
def a_measure_from_data() -> Case:
    return measuring(lambda z, y: picked(z, y).data)


@attack("honest", DETACHED)
def a_measure_through_numpy() -> Case:
    return measuring(lambda z, y: torch.from_numpy(np.asarray(picked(z, y).detach())))


@attack("honest", DETACHED)
def a_measure_of_numbers() -> Case:
    return measuring(lambda z, y: torch.tensor([value.item() for value in picked(z, y)], dtype=torch.float64))


@attack("honest", DETACHED)
def a_measure_partly_without_gradients() -> Case:
    def measure(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            offset = model(batch[0]).logsumexp(1)
        found: Tensor = picked(model(batch[0]), batch[1]) - offset
        return found

    return Case(mlp(), measure=measure)


@attack("honest", DETACHED)
def a_measure_relative_to_a_detached_output() -> Case:
    return measuring(lambda z, y: picked(z, y) - z.detach().logsumexp(1))


@attack("honest", DETACHED)
def a_detached_measure_by_the_gradient() -> Case:
    return measuring(lambda z, y: picked(z, y) - z.detach().logsumexp(1), readout="gradient")


@attack("honest", DETACHED)
def a_detached_measure_by_differences() -> Case:
    return measuring(lambda z, y: picked(z, y) - z.detach().logsumexp(1), readout="central")


@attack("speaks", DETACHED + "|integer|whole|bool|int64|step|flat")
def a_measure_of_the_predicted_class() -> Case:
    return measuring(lambda z, y: z.argmax(1))


@attack("speaks", DETACHED + "|integer|whole|bool|int64|step|flat")
def a_measure_of_right_or_wrong() -> Case:
    return measuring(lambda z, y: z.argmax(1) == y)


@attack("speaks", DETACHED + "|step|flat")
def an_accuracy_as_a_number() -> Case:
    return measuring(lambda z, y: (z.argmax(1) == y).double())


@attack("speaks", DETACHED + "|step|flat")
def a_rounded_measure() -> Case:
    return measuring(lambda z, y: picked(z, y).round())


@attack("speaks", DETACHED + "|integer|int64")
def a_loss_of_whole_numbers() -> Case:
    return on(lambda z, y: (z.argmax(1) != y).long())


@attack("speaks")
def a_loss_with_a_column_too_many() -> Case:
    return on(lambda z, y: ce(z, y).unsqueeze(1))


@attack("speaks")
def a_loss_of_a_tuple() -> Case:
    return on(lambda z, y: (ce(z, y), z))


@attack("speaks")
def a_loss_of_nothing() -> Case:
    return on(lambda z, y: None)


@attack("speaks")
def a_complex_loss() -> Case:
    return on(lambda z, y: ce(z, y).to(torch.complex128))


@attack("speaks")
def a_loss_for_every_class() -> Case:
    return on(lambda z, y: (z - F.one_hot(y, CLASSES)).square())


# --- control flow, hooks and functions of the user's own


@attack("works")
def a_branch_on_the_data() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = self.head(h) if bool((h.abs() < 2).all()) else self.head(-h)
        return out

    return Case(Around(last))


@attack("works")
def a_branch_on_a_weight() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out: Tensor = self.head(h) if self.head.bias.sum().item() < 100 else h
        return out

    return Case(Around(last))


@attack("works")
def routing_by_data() -> Case:
    experts = nn.ModuleList([nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)]).double()

    def last(self: Any, h: Tensor) -> Tensor:
        out = h.new_zeros(len(h), CLASSES)
        for index, expert in enumerate(self.experts):
            rows = (h[:, 0] > 0) == bool(index)
            out = out + expert(h) * rows.unsqueeze(1)
        return out

    return Case(Around(last, experts=experts))


@attack("honest")
def rows_written_in_place() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        out = torch.zeros(len(h), CLASSES, dtype=h.dtype)
        out[:] = self.head(h)
        return out

    return Case(Around(last))


@attack("works")
def a_forward_hook_that_changes_outputs() -> Case:
    model = mlp()
    model[0].register_forward_hook(lambda module, given, output: 2 * output)
    return Case(model)


@attack("works")
def a_forward_pre_hook_that_changes_inputs() -> Case:
    model = mlp()
    model[0].register_forward_pre_hook(lambda module, given: (given[0] / 2,))
    return Case(model)


@attack("honest", DETACHED + "|hook")
def a_hook_on_the_gradient_of_a_weight() -> Case:
    model: Any = mlp()
    model[0].weight.register_hook(lambda gradient: 0.1 * gradient)
    return Case(model)


@attack("honest", DETACHED + "|hook")
def a_hook_on_the_gradient_of_a_module() -> Case:
    model: Any = mlp()
    model[2].register_full_backward_hook(lambda module, given, grads: (0.1 * given[0],))
    return Case(model)


@attack("honest", DETACHED + "|hook")
def a_hook_on_the_gradient_of_features() -> Case:
    def last(self: Any, h: Tensor) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda gradient: 0.1 * gradient)
        out: Tensor = self.head(h)
        return out

    return Case(Around(last))


@attack("honest", DETACHED + "|hook")
def a_mask_on_the_gradient_of_a_weight() -> Case:
    model: Any = mlp()
    mask = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    model[0].weight.register_hook(lambda gradient: gradient * mask)
    return Case(model)


class Scaled(torch.autograd.Function):
    """The tanh of its input, with rules for both modes of which some are wrong by a factor."""

    generate_vmap_rule = True
    backwards, forwards = 1.0, 1.0

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @classmethod
    def rule(cls, ctx: Any, given: Tensor, factor: float) -> Tensor:
        (output,) = ctx.saved_tensors
        scaled: Tensor = factor * given * (1 - output * output)
        return scaled


class WrongForwards(Scaled):
    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 1.0)

    @staticmethod
    def jvp(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 0.5)


class NoForwards(Scaled):
    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 1.0)


class ZeroForwards(Scaled):
    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 1.0)

    @staticmethod
    def jvp(ctx: Any, *given: Tensor) -> Tensor:
        return torch.zeros_like(given[0])


class DampedBackwards(Scaled):
    """As for a clipped gradient: training sees a tenth of it."""

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 0.1)

    @staticmethod
    def jvp(ctx: Any, *given: Tensor) -> Tensor:
        return Scaled.rule(ctx, given[0], 1.0)


def custom(function: Any, **options: Any) -> Case:
    return Case(Around(lambda self, h: self.head(function.apply(h))), **options)


@attack("honest", DETACHED + "|forward")
def a_function_with_a_wrong_forward_rule() -> Case:
    return custom(WrongForwards)


@attack("honest", DETACHED + "|forward")
def a_function_with_a_wrong_forward_rule_by_trajectories() -> Case:
    return custom(WrongForwards, plan=TRAJECTORIES)


@attack("honest", DETACHED + "|forward")
def a_function_with_a_forward_rule_of_zeros() -> Case:
    return custom(ZeroForwards)


@attack("honest", DETACHED + "|forward")
def a_function_without_a_forward_rule() -> Case:
    return custom(NoForwards)


@attack("works")
def a_function_without_a_forward_rule_by_trajectories() -> Case:
    return custom(NoForwards, plan=TRAJECTORIES)


@attack("honest", DETACHED + "|backward")
def a_function_with_a_damped_gradient() -> Case:
    return custom(DampedBackwards)


@attack("honest", DETACHED + "|backward")
def a_function_with_a_damped_gradient_read_by_gradients() -> Case:
    return custom(DampedBackwards, plan=TRAJECTORIES, readout="gradient")


@attack("honest", DETACHED)
def a_penalty_on_the_gradient_of_the_inputs() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().clone().requires_grad_()
        with torch.enable_grad():
            slope: Tensor = torch.autograd.grad(picked(model(x), batch[1]).sum(), x, create_graph=True)[0]
        return cross_entropy(model, batch) + slope.square().sum(1)

    return Case(mlp(), loss)


@attack("honest", DETACHED)
def a_penalty_on_the_gradient_of_the_inputs_by_transforms() -> Case:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        slope: Tensor = torch.func.grad(lambda x: picked(model(x), batch[1]).sum())(batch[0])
        return cross_entropy(model, batch) + slope.square().sum(1)

    return Case(mlp(), loss)


@attack("honest", DETACHED)
def inputs_moved_by_their_gradient() -> Case:
    """Adversarial training: the inputs are moved along a gradient that training takes for a constant."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].detach().clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(cross_entropy(model, (x, batch[1])).sum(), x)
        return cross_entropy(model, ((x + 0.1 * slope).detach(), batch[1]))

    return Case(mlp(), loss)
