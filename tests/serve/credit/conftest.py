"""Ledgers that are filled by hand, and services over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.credit import Ledger
from tests.credit.conftest import ledger as ledger  # an empty one, on SQLite and on PostgreSQL
from tests.credit.conftest import place as place
from tests.serve.credit.asking import Bureau, open_bureau
from tests.serve.news import News


@pytest.fixture
def bureau(news: News, ledger: Ledger, tmp_path: Path) -> Iterator[Bureau]:
    with open_bureau(news, ledger, tmp_path) as found:
        yield found
