"""What tests of access share: databases of keys, a clock to turn, and an application to knock at."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.credit.crediting import Server
from tests.serve.access.doors import ADDRESS, Clock, Doors


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.system)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where keys are kept."""
    if request.param == "sqlite":
        return str(tmp_path / "access.db")
    server: Server = request.getfixturevalue("server")
    return server.make_database()


@pytest.fixture
def access(place: str, clock: Clock) -> Iterator[Access]:
    made = Access(place, clock=clock)
    yield made
    made.close()


@pytest.fixture
def doors(service: Service, tmp_path: Path, clock: Clock) -> Iterator[Doors]:
    """A service with a key of each role."""
    access = Access(tmp_path / "access.db", clock=clock)
    app: FastAPI = create_app(Settings(metrics="", rate=1e6), service, access)
    with TestClient(app, base_url=ADDRESS, follow_redirects=False) as client:
        yield Doors(app, client, access)
    access.close()
