"""A task and a store of it in which nothing is wrong."""

import pytest

from imprint import Store, Task
from tests.bad_input.inputs import simulated, small_model


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.classifier(small_model())


@pytest.fixture(scope="module")
def store(task: Task) -> Store:
    return simulated(task)
