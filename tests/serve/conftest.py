"""What tests of the service share: a small store, services of it, and a ledger."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.serve.service import Service
from tests.credit.conftest import server as server  # a PostgreSQL, for the whole session
from tests.serve.news import News, make_ledger, make_news


@pytest.fixture(scope="session")
def news(tmp_path_factory: pytest.TempPathFactory) -> News:
    return make_news(tmp_path_factory.mktemp("news"))


@pytest.fixture
def service(news: News, tmp_path: Path) -> Iterator[Service]:
    """A service that credits in a ledger of its own."""
    with make_ledger(tmp_path / "credit.db") as ledger:
        made = news.serve(ledger)
        yield made
        made.close()
