"""Tasks whose scores would be silently wrong are refused, or say what is missing from them."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Plan, Sources, Store, Task, attribute, simulate
from imprint.data import spread_examples
from imprint.errors import ImprintError, ReliabilityWarning

N = 24


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def run(task: Task) -> Store:
    sources = Sources.by_label([index % 4 for index in range(N)])
    return simulate(task, data(), sources, Plan(steps=2, lr=0.1), progress=False)


def each(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def refused(task: Task, message: str) -> None:
    with pytest.raises(ImprintError, match=message):
        run(task)


def reported(task: Task, message: str) -> None:
    with pytest.warns(ReliabilityWarning, match=message):
        store = run(task)
    assert any(message.split(".*")[0] in warning for warning in store.warnings)


class Held(nn.Module):
    """A layer whose output matrix is held in some other way than as a parameter."""

    def __init__(self, hold: Callable[[Any, Tensor], None], take: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.take = take
        hold(self, torch.randn(3, 6, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).tanh(), self.take(self))


def test_weights_in_a_python_list_are_reported() -> None:
    model = Held(lambda m, w: setattr(m, "weights", [w]), lambda m: m.weights[0])
    reported(Task.classifier(model), "the model has 1 trainable tensor .*outside model.parameters")


def test_modules_in_a_python_list_are_reported() -> None:
    def hold(model: Any, weight: Tensor) -> None:
        linear = nn.Linear(6, 3, bias=False)
        linear.weight = nn.Parameter(weight.detach())
        model.layers = [linear]

    model = Held(hold, lambda m: m.layers[0].weight)
    reported(Task.classifier(model), "trainable tensor.*part of every effect is missing")


def test_complex_parameters_are_reported() -> None:
    def hold(model: Any, weight: Tensor) -> None:
        model.spectrum = nn.Parameter(torch.complex(weight.detach(), weight.detach()))

    model = Held(hold, lambda m: m.spectrum.real)
    reported(Task.classifier(model), "complex parameters have no imprint")


class Cached(nn.Module):
    """In evaluation mode the derived weight is computed once and kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.raw = nn.Linear(4, 3)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.kept is None:
            self.kept = self.raw.weight / self.raw.weight.norm()
        return F.linear(x, self.kept, self.raw.bias)


def test_a_weight_that_is_derived_once_and_kept_is_refused() -> None:
    refused(Task.classifier(Cached()), "keeps state from one call to the next")


def test_a_weight_that_was_derived_before_is_refused() -> None:
    model = Cached().eval()
    model(data()[0])
    refused(Task.classifier(model), "value computed earlier from its weights.*raw.weight")


def test_a_loss_that_closes_over_the_model_is_refused_with_advice() -> None:
    model = mlp()
    refused(Task(model, loss=lambda _, batch: each(model, batch)), "uses another reference to the model.*argument")


def test_a_loss_that_uses_another_copy_of_the_model_is_refused() -> None:
    model, other = mlp(), mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)
        refused(Task(model, loss=lambda _, batch: each(other, batch)), "does not depend on the model it is given")


def test_a_loss_that_uses_another_copy_too_is_reported() -> None:
    model, other = mlp(), mlp()
    task = Task(model, loss=lambda m, batch: each(m, batch) + each(other, batch))
    reported(task, "the loss depends on 4 trainable tensors outside the model")


def test_a_frozen_teacher_is_no_reason_to_complain() -> None:
    model, teacher = mlp(), mlp().requires_grad_(False)
    run(Task(model, loss=lambda m, batch: each(m, batch) + (m(batch[0]) - teacher(batch[0])).square().sum(1)))


def test_weights_tied_through_data_are_refused() -> None:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight.data = first.weight.data
    model = nn.Sequential(first, nn.Tanh(), last)
    refused(Task.classifier(model), "'0.weight' and '2.weight' are two tensors in the same memory")


def test_a_parameter_that_is_a_slice_of_another_is_refused() -> None:
    first, last = nn.Linear(4, 5), nn.Linear(5, 3)
    last.bias = nn.Parameter(first.bias.data[:3])
    refused(Task.classifier(nn.Sequential(first, nn.Tanh(), last)), "two tensors in the same memory")


def test_a_loss_that_clamps_weights_in_place_is_refused() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        model.get_submodule("2").weight.data.clamp_(-0.1, 0.1)  # type: ignore[operator]
        return each(model, batch)

    refused(Task(mlp(), loss=loss), "changes parameters or buffers in place .2.weight")


def test_a_parameter_without_gradient_on_all_data_is_reported() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x) + self.spare(x).detach()
            return out

    reported(Task.classifier(Unused()), "2 selected parameters have no gradient on any training example.*spare.weight")


def test_a_parameter_that_only_a_late_example_uses_is_not_reported() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.common(x) + (x[:, :1] == late) * self.rare(x)
            return out

    late = data()[0][5, 0]
    assert 5 not in spread_examples(N)
    assert run(Task.classifier(Routed())).warnings == ()


def of_batch_mean(model: nn.Module, batch: Any) -> Tensor:
    z = model(batch[0])
    return F.cross_entropy(z - z.mean(0), batch[1], reduction="none")


def test_a_loss_with_in_batch_normalisation_is_refused() -> None:
    refused(Task(mlp(), loss=of_batch_mean), "among other examples and .* alone.*normalisation over the batch")


def test_batch_norm_without_running_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Tanh(), nn.Linear(6, 3))
    refused(Task.classifier(model), "among other examples and .* in another batch")


def test_a_loss_that_draws_random_numbers_is_refused() -> None:
    task = Task(mlp(), loss=lambda m, b: F.cross_entropy(F.dropout(m(b[0])), b[1], reduction="none"))
    refused(task, "on the second.*draws random numbers")


def test_a_measure_that_depends_on_the_batch_is_refused() -> None:
    task = Task(mlp(), loss=each, measure=of_batch_mean)
    store = run(task)
    with pytest.raises(ImprintError, match=r"measurement of query 0 is .* among other queries and .* alone"):
        attribute(task, store, data(), progress=False)


def test_a_random_measure_is_refused() -> None:
    task = Task(mlp(), loss=each, measure=lambda m, b: m(b[0])[:, 0] + torch.randn(len(b[0])))
    store = run(task)
    one = tuple(column[:1] for column in data())
    with pytest.raises(ImprintError, match=r"measurement of query 0 is .* on the second"):
        attribute(task, store, one, progress=False)


def test_a_measure_that_closes_over_the_model_is_refused() -> None:
    model = mlp()
    task = Task(model, loss=each, measure=lambda _, batch: each(model, batch))
    store = run(task)
    with pytest.raises(ImprintError, match="uses another reference to the model than the one it is given"):
        attribute(task, store, data(), progress=False)


def test_a_measure_that_uses_another_copy_of_the_model_is_reported() -> None:
    other = mlp()
    task = Task(mlp(), loss=each, measure=lambda _, batch: each(other, batch))
    store = run(task)
    with pytest.warns(ReliabilityWarning, match="every score of some queries is exactly 0"):
        assert any("exactly 0" in message for message in attribute(task, store, data(), progress=False).warnings)


class Damped(torch.autograd.Function):
    """The identity, with a wrong derivative in both modes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        return 0.8 * slopes[0]

    @staticmethod
    def jvp(ctx: Any, *along: Any) -> Any:
        return 0.8 * along[0]


def test_a_measure_with_a_wrong_derivative_is_reported_with_its_result() -> None:
    task = Task(mlp(), loss=each, measure=lambda m, b: Damped.apply(m(b[0])[:, 0]))  # type: ignore[no-untyped-call]
    store = run(task)
    with pytest.warns(ReliabilityWarning, match="derivative of the measurement is 20% off"):
        result = attribute(task, store, data(), progress=False)
    assert any("20% off" in message for message in result.warnings)


def test_a_detached_measure_is_reported_where_derivatives_are_read() -> None:
    task = Task(mlp(), loss=each, measure=lambda m, b: m(b[0])[:, 0].detach())
    store = run(task)
    with pytest.warns(ReliabilityWarning, match=r"derivative of the measurement is 100% off"):
        attribute(task, store, data(), progress=False)
    assert bool(attribute(task, store, data(), readout="central", progress=False).scores.any())


def test_a_detached_part_of_the_loss_is_reported_where_curvature_counts() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        z = model(batch[0])
        return F.cross_entropy(z / z.detach().norm(dim=1, keepdim=True), batch[1], reduction="none")

    reported(Task(mlp(), loss=loss), "the curvature of the loss, by forward mode, is")


def test_a_regulariser_that_closes_over_the_model_is_refused() -> None:
    model = mlp()

    def ridge(_: nn.Module) -> Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    refused(Task(model, loss=each, regulariser=ridge), "regulariser.* use only the argument")


def test_hooks_on_gradients_are_reported() -> None:
    model = mlp()
    model.get_parameter("0.weight").register_hook(lambda slope: 0 * slope)
    reported(Task(model, loss=each), "gradient hooks are not simulated")


def test_a_layer_frozen_after_the_task_was_made_is_refused() -> None:
    model = mlp()
    task = Task(model, loss=each)
    model.get_submodule("0").requires_grad_(False)
    refused(task, "changed after the task was built .*0.weight")


def test_a_loss_of_complex_numbers_is_refused() -> None:
    refused(Task(mlp(), loss=lambda m, b: each(m, b) + 0j), "must return real numbers")


def test_a_model_that_merges_weights_in_its_own_eval_is_refused() -> None:
    class Merging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.extra = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4))

        def train(self, mode: bool = True) -> "Merging":
            if not mode and self.training:
                self.layer.weight.data += self.extra.data
            return super().train(mode)

        def forward(self, x: Tensor) -> Tensor:
            extra = F.linear(x, self.extra) if self.training else 0
            out: Tensor = self.layer(x) + extra
            return out

    refused(Task.classifier(Merging()), "after the model's own eval")


def test_a_copy_of_the_model_in_training_elsewhere_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3))
    before = copy.deepcopy(model.state_dict())
    run(Task.classifier(model))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
