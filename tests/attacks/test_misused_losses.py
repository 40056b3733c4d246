"""Losses and measures that use another model, other examples, chance or memory, or that lost their derivative."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attacks.cases import CLASSES, Case, Table, columns, cross_entropy, judge, mlp, register
from tests.attacks.test_misused_models import LIVE, Around

LOSSES: Table = {}
attack = register(LOSSES)

BATCH = r"batch|alone|together|other examples|other queries|depend"
CHANCE = r"twice|random|differ|same|determin|state|chang"
Loss = Callable[[Any, Any], Any]


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_is_silently_misread(name: str) -> None:
    judge(LOSSES[name])


def on(outputs: Callable[[Tensor, Tensor], Any], **options: Any) -> Case:
    """A case whose loss is a function of outputs and targets."""
    return Case(mlp(), lambda model, batch: outputs(model(batch[0]), batch[1]), **options)


def measuring(outputs: Callable[[Tensor, Tensor], Any], **options: Any) -> Case:
    """A case whose measure is a function of outputs and targets."""
    return Case(mlp(), measure=lambda model, batch: outputs(model(batch[0]), batch[1]), **options)


def ce(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z, y, reduction="none")


def picked(z: Tensor, y: Tensor) -> Tensor:
    return z.gather(-1, y.unsqueeze(-1)).squeeze(-1)


# --- another model than the one that is given


@attack("honest", LIVE)
def a_loss_of_the_live_model() -> Case:
    model = mlp()
    return Case(model, lambda _, batch: cross_entropy(model, batch))


@attack("honest", LIVE)
def a_loss_that_is_a_method_of_the_live_model() -> Case:
    class Own(nn.Sequential):
        def training_loss(self, batch: Any) -> Tensor:
            return cross_entropy(self, batch)

    model = Own(*mlp())
    return Case(model, lambda _, batch: model.training_loss(batch))


@attack("speaks", LIVE)
def a_loss_of_a_deep_copy() -> Case:
    model = mlp()
    other = copy.deepcopy(model)
    return Case(model, lambda _, batch: cross_entropy(other, batch))


@attack("speaks", LIVE)
def a_loss_of_an_average_of_the_model() -> Case:
    model = mlp()
    average = torch.optim.swa_utils.AveragedModel(model)
    return Case(model, lambda _, batch: cross_entropy(average, batch))


@attack("works")
def a_loss_beside_a_frozen_teacher() -> Case:
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        away: Tensor = model(batch[0]) - 0.5 * teacher(batch[0])
        return cross_entropy(model, batch) + away.square().sum(1)

    return Case(model, loss)


@attack("speaks", LIVE)
def a_loss_of_a_traced_copy() -> Case:
    model = mlp()
    traced = torch.jit.trace(copy.deepcopy(model), columns()[0])
    return Case(model, lambda _, batch: cross_entropy(traced, batch))


@attack("honest", LIVE)
def a_loss_of_a_model_traced_on_the_same_weights() -> Case:
    model = mlp()
    traced = torch.jit.trace(model, columns()[0])
    return Case(model, lambda _, batch: cross_entropy(traced, batch))


@attack("honest", LIVE)
def a_loss_with_the_head_of_the_live_model() -> Case:
    model = mlp()
    head = model[2]
    return Case(
        model, lambda given, batch: F.cross_entropy(head(given[1](given[0](batch[0]))), batch[1], reduction="none")
    )


@attack("honest", LIVE)
def a_loss_with_features_of_the_live_model() -> Case:
    model = mlp()
    return Case(
        model, lambda given, batch: F.cross_entropy(given[2](model[1](model[0](batch[0]))), batch[1], reduction="none")
    )


@attack("honest", LIVE)
def a_penalty_on_parameters_listed_before() -> Case:
    model = mlp()
    listed = list(model.parameters())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + 0.1 * sum(p.square().sum() for p in listed)

    return Case(model, loss)


@attack("honest", LIVE + "|regulariser")
def a_regulariser_of_the_live_model() -> Case:
    model = mlp()

    def regulariser(_: nn.Module) -> Tensor:
        return 0.5 * torch.stack([p.square().sum() for p in model.parameters()]).sum()

    return Case(model, task={"regulariser": regulariser})


@attack("honest", LIVE + "|measure")
def a_measure_of_the_live_model() -> Case:
    model = mlp()
    return Case(model, measure=lambda _, batch: picked(model(batch[0]), batch[1]))


@attack("speaks", LIVE + "|measure")
def a_measure_of_a_deep_copy() -> Case:
    model = mlp()
    other = copy.deepcopy(model)
    return Case(model, measure=lambda _, batch: picked(other(batch[0]), batch[1]))


@attack("speaks", LIVE)
def a_loss_that_ignores_the_model() -> Case:
    return Case(mlp(), lambda model, batch: batch[0].sum(1))


@attack("honest", LIVE)
def outputs_of_the_live_model() -> Case:
    model = mlp()
    case = Case(model)
    case.task = {"outputs": lambda _, batch: model(batch[0]), "output_loss": lambda z, batch: ce(z, batch[1])}
    case.loss = None  # type: ignore[assignment]
    return OutputsCase(**vars(case))


class OutputsCase(Case):
    """A case whose loss is given as outputs and their loss."""

    def right_scores(self) -> Tensor:
        outputs, output_loss = self.task["outputs"], self.task["output_loss"]
        self.loss = lambda model, batch: output_loss(outputs(model, batch), batch)
        return super().right_scores()


@attack("honest", LIVE)
def an_output_loss_that_calls_the_model_again() -> Case:
    model = mlp()
    task = {
        "outputs": lambda model, batch: model(batch[0]),
        "output_loss": lambda z, batch: ce(z, batch[1]) + model(batch[0]).square().sum(1),
    }
    return OutputsCase(model, None, task=task)  # type: ignore[arg-type]


# --- the rest of the batch


@attack("speaks", BATCH)
def a_mean_spread_over_the_batch() -> Case:
    return on(lambda z, y: F.cross_entropy(z, y).expand(len(y)))


@attack("speaks", BATCH)
def a_mean_repeated_for_every_example() -> Case:
    return on(lambda z, y: F.cross_entropy(z, y).repeat(len(y)))


@attack("speaks", BATCH)
def a_loss_divided_by_its_batch() -> Case:
    return on(lambda z, y: ce(z, y) / len(y))


@attack("speaks", BATCH)
def a_loss_divided_by_the_mean_of_its_batch() -> Case:
    return on(lambda z, y: ce(z, y) / ce(z, y).detach().mean())


@attack("speaks", BATCH)
def outputs_centred_in_the_batch() -> Case:
    return on(lambda z, y: ce(z - z.mean(0), y))


@attack("speaks", BATCH)
def outputs_whitened_in_the_batch() -> Case:
    return on(lambda z, y: ce((z - z.mean(0)) / (z.std(0, correction=0) + 1e-3), y))


@attack("speaks", BATCH)
def a_softmax_over_the_wrong_axis() -> Case:
    return on(lambda z, y: -picked(z.log_softmax(0), y))


@attack("speaks", BATCH)
def a_contrastive_loss() -> Case:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        alike = F.normalize(z, dim=1) @ F.normalize(z.roll(1, 0) + y.unsqueeze(1), dim=1).T
        return ce(alike, torch.arange(len(y)))

    return on(loss)


@attack("speaks", BATCH)
def the_hardest_negative_of_the_batch() -> Case:
    return on(lambda z, y: ce(z, y) + torch.cdist(z, z).amax(1))


@attack("speaks", BATCH)
def a_difference_that_broadcasts() -> Case:
    """(n, 1) − (n,) is (n, n), and the mean over its last axis has one value for each example."""
    return on(lambda z, y: (z[:, :1] - y.double()).square().mean(1))


@attack("speaks", BATCH)
def class_weights_from_the_batch() -> Case:
    return on(lambda z, y: ce(z, y) * len(y) / torch.bincount(y, minlength=CLASSES)[y])


@attack("speaks", BATCH)
def a_running_sum_over_the_batch() -> Case:
    return on(lambda z, y: ce(z, y).cumsum(0))


@attack("speaks", BATCH)
def losses_sorted_in_the_batch() -> Case:
    return on(lambda z, y: ce(z, y).sort().values)


@attack("speaks", BATCH)
def the_largest_losses_of_the_batch() -> Case:
    return on(lambda z, y: ce(z, y) * (ce(z, y) >= ce(z, y).median()))


@attack("speaks", BATCH)
def a_mixture_with_the_next_example() -> Case:
    return Case(
        mlp(),
        lambda model, batch: F.cross_entropy(
            model(0.7 * batch[0] + 0.3 * batch[0].roll(1, 0)), batch[1], reduction="none"
        ),
    )


@attack("speaks", BATCH + "|norm|statistic")
def batch_norm_without_running_statistics() -> Case:
    norm = nn.BatchNorm1d(4, track_running_stats=False).double()
    return Case(Around(lambda self, h: self.head(self.norm(h)), norm=norm))


@attack("speaks", BATCH + "|norm|statistic")
def functional_batch_norm_in_training_mode() -> Case:
    return Case(Around(lambda self, h: self.head(F.batch_norm(h, None, None, training=True))))


@attack("speaks", BATCH)
def layer_norm_over_the_batch() -> Case:
    return Case(Around(lambda self, h: self.head(F.layer_norm(h.T, [h.shape[0]]).T)))


@attack("speaks", BATCH)
def attention_over_the_batch() -> Case:
    attention = nn.MultiheadAttention(4, 1).double()
    return Case(Around(lambda self, h: self.head(self.mix(h, h, h)[0]), mix=attention))


@attack("speaks", BATCH)
def a_recurrence_over_the_batch() -> Case:
    return Case(Around(lambda self, h: self.head(self.cell(h)[0]), cell=nn.GRU(4, 4).double()))


@attack("works")
def batch_norm_with_running_statistics() -> Case:
    model = Around(lambda self, h: self.head(self.norm(h)), norm=nn.BatchNorm1d(4).double())
    model.train()(columns()[0])
    return Case(model)


@attack("works")
def layer_norm_and_group_norm() -> Case:
    norms = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4)).double()
    return Case(Around(lambda self, h: self.head(self.norms(h)), norms=norms))


@attack("works")
def instance_norm() -> Case:
    norm = nn.InstanceNorm1d(1, affine=True).double()
    return Case(Around(lambda self, h: self.head(self.norm(h.unsqueeze(1)).squeeze(1)), norm=norm))


@attack("speaks", BATCH)
def a_measure_relative_to_its_batch() -> Case:
    return measuring(lambda z, y: picked(z, y) - picked(z, y).mean())


@attack("speaks", BATCH)
def a_measure_scaled_by_its_batch() -> Case:
    return measuring(lambda z, y: picked(z, y) / picked(z, y).abs().sum())


@attack("speaks", BATCH)
def a_soft_rank_in_the_batch() -> Case:
    return measuring(lambda z, y: (z[:, :1] - z[:, 0]).sigmoid().sum(1))


@attack("speaks", BATCH)
def a_probability_over_the_queries() -> Case:
    return measuring(lambda z, y: picked(z.softmax(0), y))


@attack("speaks", BATCH)
def a_measure_sorted_in_its_batch() -> Case:
    return measuring(lambda z, y: picked(z, y).sort().values)


# --- chance and memory


@attack("speaks", CHANCE)
def dropout_that_is_always_on() -> Case:
    return Case(Around(lambda self, h: self.head(F.dropout(h, 0.5, training=True))))


@attack("speaks", CHANCE)
def noise_on_the_features() -> Case:
    return Case(Around(lambda self, h: self.head(h + 0.3 * torch.randn_like(h))))


@attack("speaks", CHANCE)
def noise_from_numpy() -> Case:
    return Case(Around(lambda self, h: self.head(h + torch.from_numpy(np.random.normal(size=tuple(h.shape))))))


@attack("speaks", CHANCE)
def noise_from_python() -> Case:
    return on(lambda z, y: ce(z * random.uniform(0.5, 1.5), y))


@attack("speaks", CHANCE)
def noise_from_a_generator_of_its_own() -> Case:
    generator = torch.Generator().manual_seed(0)
    return on(lambda z, y: ce(z + torch.randn(z.shape, generator=generator, dtype=z.dtype), y))


@attack("speaks", CHANCE)
def random_features_left_out() -> Case:
    return Case(Around(lambda self, h: self.head(h[:, torch.randperm(4)])))


@attack("speaks", CHANCE)
def a_random_latent_variable() -> Case:
    return Case(Around(lambda self, h: self.head(torch.distributions.Normal(h, 1.0).rsample())))


@attack("honest", CHANCE)
def noise_from_the_same_seed_each_time() -> Case:
    """Deterministic, but another noise for another size of batch."""

    def last(self: Any, h: Tensor) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            out: Tensor = self.head(h + torch.randn(4, dtype=h.dtype))
        return out

    return Case(Around(last))


@attack("speaks", CHANCE)
def a_random_measure() -> Case:
    return measuring(lambda z, y: picked(z, y) * (1 + 0.3 * torch.randn(len(y))))


def counting(scale: Callable[[int], float]) -> Case:
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return cross_entropy(model, batch) * scale(calls[0])

    return Case(mlp(), loss, truth=False)


@attack("speaks", CHANCE)
def a_loss_that_warms_up() -> Case:
    return counting(lambda calls: min(1.0, calls / 30))


@attack("speaks", CHANCE)
def a_loss_that_alternates() -> Case:
    return counting(lambda calls: 1.0 if calls % 2 else 3.0)


@attack("speaks", CHANCE)
def a_loss_that_anneals() -> Case:
    return counting(lambda calls: 0.97**calls)


@attack("speaks", CHANCE)
def a_loss_relative_to_its_own_running_mean() -> Case:
    running = [1.0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(model, batch)
        running[0] = 0.9 * running[0] + 0.1 * float(batch[0].abs().mean())
        return losses / running[0]

    return Case(mlp(), loss, truth=False)


@attack("speaks", CHANCE)
def a_measure_that_remembers() -> Case:
    calls = [0]

    def measure(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        return picked(model(batch[0]), batch[1]) * (1 + calls[0] / 10)

    return Case(mlp(), measure=measure, truth=False)
