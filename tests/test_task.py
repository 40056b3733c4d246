"""A task: its measurements, the parameters it selects, and the swapping of them."""

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Task
from imprint.task import Batch

LOGITS = st.lists(st.floats(-30, 30), min_size=2, max_size=6)


class _Constant(nn.Module):
    """Gives back its input times 1."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.one * x


def _measured(name: str, logits: list[float], target: int) -> float:
    task = Task.classifier(_Constant(), measure=name)
    batch = torch.tensor([logits], dtype=torch.float64), torch.tensor([target])
    return task.measure(task.model, batch).item()


@given(LOGITS, st.data())
def test_logprob_is_the_log_of_the_right_class_probability(logits: list[float], data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)[target]
    assert _measured("logprob", logits, target) == pytest.approx(p.log().item(), abs=1e-9)


@given(LOGITS, st.data())
def test_margin_is_the_log_of_the_odds(logits: list[float], data: st.DataObject) -> None:
    """log p − log(1 − p), with 1 − p as the sum of the other probabilities, which does not cancel."""
    target = data.draw(st.integers(0, len(logits) - 1))
    p = torch.tensor(logits, dtype=torch.float64).softmax(0)
    others = torch.cat([p[:target], p[target + 1 :]]).sum()
    assert _measured("margin", logits, target) == pytest.approx((p[target].log() - others.log()).item(), abs=1e-9)


def test_margin_is_finite_where_the_probability_rounds_to_one() -> None:
    assert _measured("margin", [900.0, 0.0, 0.0], 0) == pytest.approx(900 - torch.log(torch.tensor(2.0)).item())
    assert _measured("margin", [0.0, 900.0], 0) == pytest.approx(-900)


@given(LOGITS, st.data())
def test_logit_is_the_output_of_the_right_class(logits: list[float], data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(logits) - 1))
    assert _measured("logit", logits, target) == logits[target]


def test_the_default_measure_is_the_loss() -> None:
    task = Task.classifier(nn.Linear(3, 2))
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    expected = F.cross_entropy(task.model(batch[0]), batch[1], reduction="none")
    assert torch.equal(task.measure(task.model, batch), expected)
    assert torch.equal(task.loss(task.model, batch), expected)
    assert (task.measure_name, task.better) == ("loss", "lower")


@pytest.mark.parametrize("name", ["margin", "logprob", "logit"])
def test_a_measure_by_name_is_better_when_higher(name: str) -> None:
    task = Task.classifier(nn.Linear(3, 2), measure=name)
    assert (task.measure_name, task.better) == (name, "higher")


def test_a_measure_of_ones_own_has_its_name_and_no_direction() -> None:
    def surprise(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])[:, 0]  # type: ignore[no-any-return]

    task = Task.classifier(nn.Linear(3, 2), measure=surprise)
    assert (task.measure_name, task.better) == ("surprise", None)


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target", "y"])
def test_targets_are_found_in_a_mapping(key: str) -> None:
    task = Task(
        nn.Linear(3, 2),
        outputs=lambda model, batch: model(batch["x"]),
        output_loss=lambda z, batch: z.sum(1),
        measure="logit",
    )
    batch = {"x": torch.randn(4, 3), key: torch.tensor([0, 1, 1, 0])}
    expected = task.model(batch["x"])[range(4), [0, 1, 1, 0]]
    assert torch.equal(task.measure(task.model, batch), expected)


@pytest.mark.parametrize("outputs", [1, 3])
def test_regression_has_half_the_squared_error(outputs: int) -> None:
    task = Task.regression(nn.Linear(3, outputs))
    x, y = torch.randn(5, 3), torch.randn(5, outputs)
    error = task.model(x) - y
    expected = (error**2).sum(1) / 2
    torch.testing.assert_close(task.loss(task.model, (x, y)), expected)
    if outputs == 1:
        torch.testing.assert_close(task.loss(task.model, (x, y[:, 0])), expected)


def test_regression_takes_a_model_that_gives_flat_outputs() -> None:
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    task = Task.regression(model)
    x, y = torch.randn(5, 3), torch.randn(5)
    torch.testing.assert_close(task.loss(model, (x, y)), (model(x) - y).square() / 2)


def _deep() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("globs", "names"),
    [
        ("*", ("0.weight", "0.bias", "2.weight", "2.bias")),
        ("2.*", ("2.weight", "2.bias")),
        ("*.bias", ("0.bias", "2.bias")),
        (["2.bias", "0.*"], ("0.weight", "0.bias", "2.bias")),
        (("*.weight", "0.weight"), ("0.weight", "2.weight")),
    ],
)
def test_globs_select_parameters_in_the_order_of_the_model(globs: Any, names: tuple[str, ...]) -> None:
    assert Task.classifier(_deep(), parameters=globs).names == names


def test_frozen_and_integer_parameters_are_left_out() -> None:
    model = _deep()
    model.get_parameter("0.bias").requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    assert Task.classifier(model).names == ("0.weight", "2.weight", "2.bias")


def test_a_task_shows_its_size() -> None:
    assert repr(Task.classifier(_deep())) == "Task(Sequential, measure='loss', parameters=4 tensors, 26 values)"


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("scratch", torch.tensor(5.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) * self.scale  # type: ignore[no-any-return]


def test_the_state_has_tied_tensors_once_and_no_scratch() -> None:
    assert Task.classifier(_Tied()).state().keys() == {"a.weight", "scale"}


def test_the_state_is_a_copy() -> None:
    task = Task.classifier(_deep())
    state = task.state()
    state["0.bias"].add_(1)
    assert not torch.equal(state["0.bias"], task.model.get_parameter("0.bias"))
    assert not any(tensor.requires_grad for tensor in state.values())


def test_a_state_dict_with_the_names_of_tied_weights_is_taken() -> None:
    task = Task.classifier(_Tied())
    given_by_torch = {name: tensor + 1 for name, tensor in task.model.state_dict().items()}
    assert given_by_torch.keys() == {"a.weight", "b.weight", "scale"}
    assert task.complete(given_by_torch).keys() == {"a.weight", "scale"}


def test_a_state_dict_with_the_other_name_of_a_tied_weight_is_taken() -> None:
    """Files keep a tied weight under one of its names, which need not be the first."""
    task = Task.classifier(_Tied())
    weight = torch.randn(3, 3)
    completed = task.complete({"b.weight": weight, "scale": torch.tensor(1.0)})
    assert torch.equal(completed["a.weight"], weight)


def test_a_checkpoint_is_copied_into_the_models_precision() -> None:
    task = Task.classifier(_deep().double())
    given = {name: tensor.float() for name, tensor in task.state().items()}
    completed = task.complete(given)
    assert {tensor.dtype for tensor in completed.values()} == {torch.float64}
    same = task.complete(task.state())
    assert all(tensor.data_ptr() != given[name].data_ptr() for name, tensor in same.items())


def test_swapped_parameters_reach_every_use_of_a_tied_weight() -> None:
    task = Task.classifier(_Tied())
    functional, theta = task.at(task.state())
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    moved = {"a.weight": theta["a.weight"] + 1}
    expected = F.cross_entropy(x @ moved["a.weight"].T @ moved["a.weight"].T * 2, y, reduction="none")
    torch.testing.assert_close(functional.losses(moved, (x, y), 4), expected)


def test_what_is_not_selected_stays_at_the_given_state() -> None:
    task = Task.classifier(_deep(), parameters="2.*")
    state = {name: tensor + 1 for name, tensor in task.state().items()}
    functional, theta = task.at(state)
    assert theta.keys() == {"2.weight", "2.bias"}
    twin = _deep()
    twin.load_state_dict(state)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    torch.testing.assert_close(functional.losses(theta, batch, 4), task.loss(twin, batch))


def test_swapping_leaves_the_model_as_it_was() -> None:
    task = Task.classifier(_deep())
    before, parameters = task.state(), dict(task.model.named_parameters())
    functional, theta = task.at({name: tensor + 1 for name, tensor in before.items()})
    functional.losses(theta, (torch.randn(4, 3), torch.tensor([0, 1, 1, 0])), 4)
    for name, parameter in task.model.named_parameters():
        assert parameter is parameters[name]
        assert torch.equal(parameter, before[name])


def test_the_regulariser_sees_the_swapped_parameters() -> None:
    def ridge(model: nn.Module) -> Tensor:
        return torch.stack([p.square().sum() for p in model.parameters()]).sum()

    task = Task.classifier(_deep(), regulariser=ridge)
    functional, theta = task.at(task.state())
    doubled = {name: 2 * tensor for name, tensor in theta.items()}
    torch.testing.assert_close(functional.regulariser(doubled), 4 * ridge(task.model))
    slope = torch.func.grad(functional.regulariser)(theta)
    torch.testing.assert_close(slope["2.bias"], 2 * theta["2.bias"])


def test_evaluating_leaves_each_module_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)))
    model.get_submodule("1.0").eval()
    task = Task.classifier(model)
    before = [module.training for module in model.modules()]
    assert any(before) and not all(before)
    with task.evaluating():
        assert [module.training for module in model.modules()] == before
        assert not any(module.training for module in task.replica.modules())
    assert [module.training for module in model.modules()] == before


def _squared(model: nn.Module, batch: Batch) -> Tensor:
    outputs: Tensor = model(batch)
    return outputs.square().sum(1)


def test_a_task_that_is_in_use_can_be_copied_and_pickled() -> None:
    """Without what serves computations of this process, such as the lock that is held meanwhile."""
    task, batch = Task(nn.Linear(3, 2), _squared), torch.randn(4, 3)

    def losses(task: Task) -> Tensor:
        functional, parameters = task.at(task.state())
        return functional.losses(parameters, batch, 4)

    with task.evaluating():
        expected = losses(task)
        for again in (pickle.loads(pickle.dumps(task)), copy.deepcopy(task)):
            assert again.names == task.names and again.model is not task.model
            with again.evaluating():
                assert torch.equal(losses(again), expected)
