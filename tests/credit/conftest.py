"""Every claim about a ledger holds on SQLite and on a real PostgreSQL."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.credit import Ledger
from tests.conftest import require
from tests.credit.crediting import Server, has_postgres, make_ledger


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    require("postgres", has_postgres(), "PostgreSQL is not installed")
    with tempfile.TemporaryDirectory(prefix="imprint-pg-") as folder:  # paths of sockets must be short
        Path(folder).chmod(0o711)
        server = Server(Path(folder) / "server")
        yield server
        server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.system)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a ledger is kept."""
    if request.param == "sqlite":
        return str(tmp_path / "credit.db")
    server: Server = request.getfixturevalue("server")
    return server.make_database()


@pytest.fixture
def ledger(place: str) -> Iterator[Ledger]:
    made = make_ledger(place)
    yield made
    made.close()
