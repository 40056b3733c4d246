"""What attacks have in common: an application whose ledger has something to show."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.pages import login
from imprint.serve.settings import Settings
from tests.serve.hostile.target import Target, fill
from tests.serve.news import News, make_ledger


@pytest.fixture
def target(news: News, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    monkeypatch.setattr(login, "_BURST", 1e9)
    with make_ledger(tmp_path / "credit.db") as ledger:
        access, service = Access(tmp_path / "access.db"), news.serve(ledger)
        settings = Settings(metrics="", rate=1e9, body_bytes=100_000)
        fill(service, ledger, tmp_path)
        yield Target(create_app(settings, service, access), settings, access, ledger)
        service.close()
        access.close()
