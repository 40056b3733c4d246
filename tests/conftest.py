"""What every test starts from: one thread, one seed, and examples that hypothesis draws the same way each time."""

import os
from collections.abc import Iterator

import pytest
import torch

from imprint.simulation import step_size

try:
    from hypothesis import settings
except ImportError:  # the zoo also runs where there is only torch and pytest
    pass
else:
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
    settings.load_profile("repeatable")


def require(what: str, there: bool, reason: str) -> None:
    """Skip a test that lacks what it needs; fail it where the environment variable REQUIRE lists that, as in "data"."""
    if there:
        return
    if what in os.environ.get("REQUIRE", "").split(","):
        pytest.fail(f"{reason}, and REQUIRE lists {what!r}")
    pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors of the tests are tiny: a second thread only waits, for long on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def few_curvature_products() -> Iterator[None]:
    """Measure the curvature where a simulation starts by two products instead of thirty: that halves a tiny one."""
    with step_size.coarse_curvature():
        yield


@pytest.fixture(autouse=True)
def all_curvature_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Measure it in full in tests marked `curvature`, which are about what is found there."""
    if request.node.get_closest_marker("curvature") is None:
        yield
        return
    token = step_size._START_ITERATIONS.set(30)
    yield
    step_size._START_ITERATIONS.reset(token)


@pytest.fixture(autouse=True)
def one_seed() -> None:
    torch.manual_seed(0)
