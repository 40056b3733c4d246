"""The stores that attacks start from, made once for all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint import Attribution
from imprint.simulation import step_size
from tests.attacks.saved import make_saved
from tests.attacks.stores import Bases, Server


@pytest.fixture(autouse=True)
def all_curvature_products() -> Iterator[None]:
    """Attacks meet the library as users do."""
    token = step_size._START_ITERATIONS.set(30)
    yield
    step_size._START_ITERATIONS.reset(token)


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    place = tmp_path_factory.mktemp("bases")
    server = Server(place)
    yield Bases(place, server)
    server.stop()


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Attribution, Path]:
    return make_saved(tmp_path_factory.mktemp("saved"))
