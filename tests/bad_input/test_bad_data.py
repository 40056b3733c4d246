"""What is wrong with data is refused with an error that names it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import DataError, Plan, SimulationError, Store, Task, attribute, simulate
from tests.bad_input.inputs import PLAN, SOURCES, N, columns, each_loss, simulated, small_model


@pytest.mark.parametrize("plan", [PLAN, Plan(engine="trajectories", steps=2, lr=0.1)], ids=["tangent", "trajectories"])
@pytest.mark.parametrize("example", [3, 5], ids=["of the first source", "of the last source"])
def test_nan_in_the_data_names_the_example_and_its_source(example: int, plan: Plan) -> None:
    x, y = columns()
    x[example, 1] = torch.nan
    owner = ["ann", "bob", "cid"][example % 3]
    with pytest.raises(SimulationError, match=f"training example {example} .*'{owner}'.* is nan"):
        simulated(data=(x, y), plan=plan)


@pytest.mark.parametrize("plan", [PLAN, Plan(engine="trajectories", steps=2, lr=0.1)], ids=["tangent", "trajectories"])
def test_a_loss_that_is_infinite_at_one_example_names_it(plan: Plan) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        distance: Tensor = (batch[0][:, 0] - 7).abs()
        return each_loss(model, batch) - distance.log()

    x, y = columns()
    x[4, 0] = 7
    with pytest.raises(SimulationError, match=r"training example 4 .*'bob'.* is inf"):
        simulated(Task(small_model(), loss), (x, y), plan=plan)


@pytest.mark.parametrize("batch_size", [None, 2], ids=["full batch", "mini-batches"])
@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_a_gradient_that_is_not_finite_names_source_step_and_parameter(engine: Any, batch_size: int | None) -> None:
    """√(z²) has a finite value and no derivative at 0, where an example of zeros puts it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        z: Tensor = model(batch[0])
        return z.square().sum(1).sqrt()

    x, y = columns()
    x[4] = 0
    plan = Plan(engine=engine, steps=2, lr=0.1, batch_size=batch_size)
    with pytest.raises(SimulationError, match=r"(?=.*source 'bob')(?=.*step 0)(?=.*parameter 'weight')"):
        simulated(Task(nn.Linear(3, 2, bias=False), loss), (x, y), plan=plan)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_name_the_parameter(value: float) -> None:
    model = small_model()
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 2] = value
    with pytest.raises(SimulationError, match=r"'2\.weight' of the model holds NaN or infinity"):
        simulated(Task.classifier(model))


def test_a_checkpoint_that_is_not_finite_is_named_with_its_parameter(task: Task) -> None:
    bad = task.state()
    bad["0.bias"][0] = torch.nan
    with pytest.raises(SimulationError, match=r"'0\.bias' of checkpoint 1"):
        simulated(task, checkpoints=[task.state(), bad])


def test_columns_must_have_equally_many_rows() -> None:
    x, y = columns()
    with pytest.raises(DataError, match=r"the same number of rows, got \[11, 12\]"):
        simulated(data=(x, y[:11]))


@pytest.mark.parametrize("data", [None, 3, iter([1, 2])], ids=["none", "number", "iterator"])
def test_what_is_no_dataset_is_refused(data: Any, task: Task) -> None:
    with pytest.raises(DataError, match=r"expected a map-style dataset.*got"):
        simulate(task, data, SOURCES, PLAN, progress=False)


def test_a_mapping_of_lists_is_no_dataset(task: Task) -> None:
    with pytest.raises(DataError, match="tensors"):
        simulated(task, {"x": [[0.0, 1.0, 2.0]] * N, "y": [0, 1] * 6})


@pytest.mark.parametrize("data", [[], (torch.zeros(0, 3), torch.zeros(0))], ids=["list", "columns"])
def test_training_data_must_not_be_empty(data: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        simulated(data=data)


def test_samples_that_do_not_stack_ask_for_a_collate_function() -> None:
    ragged = [(torch.zeros(1 + i % 2), 0) for i in range(N)]
    with pytest.raises(DataError, match=r"could not be collated.*collate_fn"):
        simulated(data=ragged)


def test_batch_size_must_be_positive(task: Task, store: Store) -> None:
    with pytest.raises(DataError, match="batch_size must be at least 1, got 0"):
        simulated(batch_size=0)
    with pytest.raises(DataError, match="batch_size must be at least 1, got -2"):
        attribute(task, store, columns(3), batch_size=-2, progress=False)
