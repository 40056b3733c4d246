"""Ledgers that are filled by hand, and services over them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.credit import Ledger
from tests.conftest import require
from tests.credit.crediting import Server, has_postgres, make_ledger
from tests.serve.credit.asking import Bureau, open_bureau
from tests.serve.news import News


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    require("postgres", has_postgres(), "PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(prefix="imprint-pg-") as folder:  # paths of sockets must be short
        Path(folder).chmod(0o711)
        server = Server(Path(folder) / "server")
        yield server
        server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.system)])
def ledger(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ledger]:
    """An empty ledger that pays 2,000 micro-units per query."""
    if request.param == "sqlite":
        place = str(tmp_path / "credit.db")
    else:
        server: Server = request.getfixturevalue("server")
        place = server.make_database()
    made = make_ledger(place)
    yield made
    made.close()


@pytest.fixture
def bureau(news: News, ledger: Ledger, tmp_path: Path) -> Iterator[Bureau]:
    with open_bureau(news, ledger, tmp_path) as found:
        yield found
