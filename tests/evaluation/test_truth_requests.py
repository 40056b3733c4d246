"""Requests for a truth that cannot be meant are refused in words."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from imprint import DataError, Sources, Task, TaskError
from imprint.data import Data
from imprint.evaluation.subsets import Subsets
from tests.evaluation.truths import QUERIES, Counting, N, ask, build, points, task, together, train


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda subset: train(subset, 0), r"called as train\(subset, seed\), but takes \(subset\): too many"),
        (lambda subset, seed, lr: train(subset, seed), "missing a required argument: 'lr'"),
        ("train", "must be a function of .* or a Together, got a str"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(how: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ask(how=how)


def test_arguments_of_another_kind_are_refused_in_words() -> None:
    with pytest.raises(DataError, match=r"must be a Subsets, got a Sources: use Subsets\.halves\(sources\)"):
        ask(subsets=Sources.per_example(N))
    with pytest.raises(DataError, match="the task's model differs from those that are trained"):
        ask(task=Task.classifier(nn.Linear(4, 3).double()))
    with pytest.raises(TaskError, match=r"must be an imprint\.Task, got a Sequential"):
        ask(task=build())


def test_a_model_is_not_taken_for_the_function_that_trains_it() -> None:
    with pytest.raises(DataError, match="train is a model, a Sequential: give a function"):
        ask(how=build())


def test_queries_that_do_not_fit_are_told_before_anything_is_trained() -> None:
    counting, (x, y) = Counting(), points(QUERIES, 1)
    with pytest.raises(TaskError, match="the measurement failed on the queries: RuntimeError: mat1 and mat2"):
        ask(how=counting, queries=(x[:, :2], y))
    assert counting.made == 0


TOGETHER: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"build": build()}, TaskError, "build must be a function that builds a model, got a Sequential"),
    "task": ({"task_of": task()}, TaskError, "task_of must be a function .* got a Task"),
    "training": ({"training": {"lr": 0.1}}, TaskError, "training must be a Training, got a dict"),
    "dataset": ({"data": TensorDataset(*points(N, 0))}, DataError, "columns of tensors .*, got a TensorDataset"),
    "at once": ({"at_once": 0}, DataError, "at_once must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize(("change", "kind", "message"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_cannot_be_trained_together_is_refused(
    change: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        replace(together(), **change)


def test_a_measurement_with_other_than_one_value_per_query_is_refused() -> None:
    def column(model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        return outputs[:, :1]

    for how in (train, together()):
        with pytest.raises(TaskError, match=r"one value per query, shape \(5,\).*\(5, 1\)"):
            ask(how=how, task=task(measure=column))


def test_requests_that_cannot_be_meant_are_refused() -> None:
    for wrong in (0, 2.5, "2", True):
        with pytest.raises(DataError, match=f"runs must be a whole number of at least 1, got {wrong!r}"):
            ask(runs=wrong)
    for wrong in (-1, 1.5, "a"):
        with pytest.raises(DataError, match=f"seed must be a whole number of at least 0, got {wrong!r}"):
            ask(seed=wrong)
    with pytest.raises(DataError, match="subsets are made for 20 training examples, the data has 24"):
        ask(subsets=Subsets.halves(20))
    elsewhere = replace(together(), data=Data(points(N, 0), device=torch.device("meta")))
    with pytest.raises(DataError, match="trained on meta and measured on cpu"):
        ask(how=elsewhere)
