"""What goes wrong in what the user gave is found early, and named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import DataError, Plan, PlanError, SimulationError, Sources, SourcesError, Task, TaskError
from tests.mistakes import classifier, columns, store_of


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("example", [0, 9])
def test_a_loss_that_is_not_finite_is_found_before_the_simulation(bad: float, example: int, tmp_path: Path) -> None:
    x, y = columns()
    weights = torch.ones(16)
    weights[example] = bad

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses: Tensor = F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]
        return losses

    with pytest.raises(SimulationError, match=rf"the loss of training example {example} \(source '{example % 4}'\) is"):
        store_of(tmp_path / "store", Task(nn.Linear(3, 3), loss), data=(x, y, weights))
    assert not (tmp_path / "store").exists()


def test_an_example_of_no_source_is_named_alone() -> None:
    x, y = columns()
    x[0] = torch.nan
    with pytest.raises(SimulationError, match="the loss of training example 0 is nan: look for NaN"):
        store_of(data=(x, y), sources=Sources.groups({"a": [1, 2]}))


def test_a_regulariser_that_is_not_finite_is_found_before_the_simulation(tmp_path: Path) -> None:
    def undefined(model: Any) -> Any:
        return model.weight.log().sum()

    with pytest.raises(SimulationError, match="the regulariser is nan at or near the first checkpoint"):
        store_of(tmp_path / "store", classifier(regulariser=undefined))
    assert not (tmp_path / "store").exists()


def test_a_failing_loss_says_how_it_was_called_and_with_what() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    says = r"failed on a few examples, called as loss\(model, batch\) with batch = \(float32 \(8, 3\), int64 \(8,\)\): "
    with pytest.raises(TaskError, match=says):
        store_of(task=Task(nn.Linear(3, 3), loss))


def test_float64_from_numpy_comes_with_a_hint() -> None:
    x, y = columns()
    with pytest.raises(TaskError, match=r"numbers of numpy are float64.*\.astype\('float32'\)"):
        store_of(data=(x.numpy().astype("float64"), y.numpy()))


def test_a_failing_collate_function_is_told_from_samples_that_want_one() -> None:
    samples = [(x, int(y)) for x, y in zip(*columns(), strict=True)]

    def collate(samples: list[Any]) -> Any:
        raise KeyError("tokens")

    with pytest.raises(DataError, match=r"^the collate_fn failed: KeyError: 'tokens'\.$"):
        store_of(data=samples, collate_fn=collate)
    with pytest.raises(DataError, match=r"samples could not be collated.*give a collate_fn"):
        store_of(data=[(torch.zeros(i + 1), 0) for i in range(16)])


def test_a_column_that_holds_no_numbers_is_named() -> None:
    x, y = (column.numpy() for column in columns())
    with pytest.raises(DataError, match=r"column 'text' of the data has dtype <U1: give numbers"):
        store_of(data={"x": x, "text": np.array(["a"] * 16)})
    with pytest.raises(DataError, match=r"column 1 of the data has dtype object: give numbers"):
        store_of(data=(x, np.array([object()] * 16)))
    with pytest.raises(
        DataError, match=r"a mapping must hold tensors with one row per example; 'names' is not a tensor"
    ):
        store_of(data={"x": x, "y": y, "names": ["a"] * 16})


def test_groups_of_a_list_are_refused() -> None:
    with pytest.raises(SourcesError, match=r"groups must map names .*, got a list: Sources\.by_label"):
        Sources.groups(["a", "b"])  # type: ignore[arg-type]


def test_identical_checkpoints_are_warned_of() -> None:
    state = classifier().state()
    half = {name: tensor / 2 for name, tensor in state.items()}
    with pytest.warns(UserWarning, match=r"checkpoints 0 and 2 have the same weights: .* must be cloned"):
        store_of(checkpoints=[state, half, state])


@pytest.mark.filterwarnings("error")
def test_different_checkpoints_are_not_warned_of() -> None:
    state = classifier().state()
    store_of(checkpoints=[state, {name: tensor / 2 for name, tensor in state.items()}])


def test_a_seed_that_no_generator_takes_is_refused() -> None:
    assert Plan(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(PlanError, match="seed must be a whole number from 0 to 2⁶³ − 1"):
        Plan(seed=2**63)
