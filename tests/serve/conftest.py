"""What tests of the service share: a small store, services of it, and a ledger."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import imprint
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


@pytest.fixture(scope="session")
def language(tmp_path_factory: pytest.TempPathFactory) -> tuple[imprint.Task, imprint.Store]:
    """A tiny language model with three sources of text."""
    pytest.importorskip("transformers")
    from imprint.language import task
    from tests.language.models import LABELS, documents, gpt2, tokenizer

    language = task(gpt2(), tokenizer=tokenizer(), parameters="last:1")
    columns = documents().columns
    plan = imprint.Plan(steps=2, lr=0.05)
    sources = documents().sources(LABELS)
    out = tmp_path_factory.mktemp("written") / "store"
    return language, imprint.simulate(language, columns, sources, plan=plan, out=out, progress=False)


@pytest.fixture
def written(language: tuple[imprint.Task, imprint.Store]) -> Iterator[Service]:
    made = Service(*language)
    yield made
    made.close()
