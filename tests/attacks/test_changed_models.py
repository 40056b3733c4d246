"""Models that change behind the back of a task: after it was made, or between simulating and attributing."""

import pytest
import torch
from torch import nn

from tests.attacks.cases import CLASSES, Case, Table, cross_entropy, judge, mlp, register
from tests.attacks.test_misused_models import Around

CHANGED_MODELS: Table = {}
attack = register(CHANGED_MODELS)
CHANGED = r"chang|replac|differ|another|no longer|since|gradient|depend|frozen|trainable"


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGED_MODELS)
def test_no_changed_model_is_silently_misread(name: str) -> None:
    judge(CHANGED_MODELS[name])


# --- changed after the task was made


def head_of(case: Case) -> nn.Linear:
    head = case.model[2]  # type: ignore[index]
    assert isinstance(head, nn.Linear)
    return head


def replace_the_head(case: Case) -> None:
    torch.manual_seed(5)
    case.model[2] = nn.Linear(4, CLASSES).double()  # type: ignore[operator]


@attack("honest", CHANGED)
def a_head_replaced_after_the_task_was_made() -> Case:
    return Case(mlp(), after=replace_the_head)


@attack("honest", CHANGED)
def a_weight_replaced_after_the_task_was_made() -> Case:
    def replace(case: Case) -> None:
        head_of(case).weight = nn.Parameter(0.1 * torch.ones(CLASSES, 4).double())

    return Case(mlp(), after=replace)


@attack("honest", CHANGED)
def data_of_a_weight_replaced_after_the_task_was_made() -> Case:
    def replace(case: Case) -> None:
        head_of(case).weight.data = 0.1 * torch.ones(CLASSES, 4).double()

    return Case(mlp(), after=replace)


@attack("honest", CHANGED)
def a_state_assigned_after_the_task_was_made() -> Case:
    def assign(case: Case) -> None:
        torch.manual_seed(5)
        case.model.load_state_dict(mlp().state_dict(), assign=True)

    return Case(mlp(), after=assign)


@attack("works")
def a_state_loaded_after_the_task_was_made() -> Case:
    def load(case: Case) -> None:
        torch.manual_seed(5)
        case.model.load_state_dict(mlp().state_dict())

    return Case(mlp(), after=load)


@attack("works")
def trained_on_after_the_task_was_made() -> Case:
    def train(case: Case) -> None:
        optimiser = torch.optim.SGD(case.model.parameters(), 0.5)
        cross_entropy(case.model, case.data).mean().backward()
        optimiser.step()
        optimiser.zero_grad()

    return Case(mlp(), after=train)


@attack("honest", CHANGED)
def made_double_after_the_task_was_made() -> Case:
    return Case(mlp().float(), after=lambda case: case.model.double())


@attack("honest", CHANGED)
def a_buffer_replaced_after_the_task_was_made() -> Case:
    def replace(case: Case) -> None:
        case.model.shift = torch.ones(4).double()

    model = Around(lambda self, h: self.head(h + self.shift))
    model.register_buffer("shift", torch.zeros(4).double())
    return Case(model, after=replace)


@attack("honest", CHANGED)
def an_attribute_replaced_after_the_task_was_made() -> Case:
    def replace(case: Case) -> None:
        case.model.factor = 3.0  # type: ignore[assignment]

    return Case(Around(lambda self, h: self.head(h * self.factor), factor=1.0), after=replace)


@attack("honest", CHANGED)
def a_hook_registered_after_the_task_was_made() -> Case:
    def hook(case: Case) -> None:
        head_of(case).register_forward_hook(lambda module, given, output: 2 * output)

    return Case(mlp(), after=hook)


@attack("honest", CHANGED)
def an_adapter_added_after_the_task_was_made() -> Case:
    def wrap(case: Case) -> None:
        torch.manual_seed(5)
        case.model[2] = nn.Sequential(head_of(case), nn.Linear(CLASSES, CLASSES).double())  # type: ignore[operator]

    return Case(mlp(), after=wrap)


@attack("honest", CHANGED)
def a_layer_frozen_after_the_task_was_made() -> Case:
    return Case(mlp(), after=lambda case: head_of(case).requires_grad_(False))


@attack("speaks", CHANGED)
def everything_frozen_after_the_task_was_made() -> Case:
    return Case(mlp(), after=lambda case: case.model.requires_grad_(False), truth=False)


@attack("honest", CHANGED)
def a_layer_thawed_after_the_task_was_made() -> Case:
    model = mlp()
    model[0].requires_grad_(False)
    return Case(model, after=lambda case: case.model.requires_grad_(True))


@attack("honest", CHANGED)
def a_weight_deleted_after_the_task_was_made() -> Case:
    def delete(case: Case) -> None:
        head_of(case).bias = None  # type: ignore[assignment]

    return Case(mlp(), after=delete)


@attack("works")
def trained_on_between_simulating_and_attributing() -> Case:
    def train(case: Case) -> None:
        for parameter in case.model.parameters():
            parameter.data += 1.0

    return Case(mlp(), between=train)


@attack("honest", CHANGED)
def a_head_replaced_between_simulating_and_attributing() -> Case:
    return Case(mlp(), between=replace_the_head)


@attack("honest", CHANGED)
def a_head_of_another_shape_between_simulating_and_attributing() -> Case:
    def replace(case: Case) -> None:
        case.model[2] = nn.Linear(4, CLASSES + 2).double()  # type: ignore[operator]

    return Case(mlp(), between=replace)


@attack("speaks", CHANGED)
def another_activation_between_simulating_and_attributing() -> Case:
    def replace(case: Case) -> None:
        case.model[1] = nn.ReLU()  # type: ignore[operator]

    return Case(mlp(), between=replace)


@attack("speaks", CHANGED)
def another_factor_between_simulating_and_attributing() -> Case:
    def replace(case: Case) -> None:
        case.model.factor = 1.5  # type: ignore[assignment]

    return Case(Around(lambda self, h: self.head(h * self.factor), factor=1.0), between=replace)
