"""A task and a store of it, to be read."""

import pytest

from imprint import Store, Task
from tests.readout.reading import new_model, simulated


@pytest.fixture(scope="module")
def task() -> Task:
    return Task.classifier(new_model(), measure="margin")


@pytest.fixture(scope="module")
def store(task: Task) -> Store:
    return simulated(task)
