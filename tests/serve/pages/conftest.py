"""What tests of pages share: browsers that are logged in, in front of several services."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import Browser, Clock, Doors
from tests.serve.news import News
from tests.serve.pages.hostile import make_hostile

EXAMPLES = 3


def open_doors(service: Service, folder: Path, examples: list[tuple[object, str]]) -> Doors:
    access = Access(folder / "access.db", clock=Clock())
    app = create_app(Settings(metrics="", rate=1e6), service, access, examples=examples)
    return Doors(app, Browser(app), access)


@pytest.fixture
def doors(service: Service, news: News, tmp_path: Path) -> Iterator[Doors]:
    """The service of the news, which credits."""
    made = open_doors(service, tmp_path, [(news.ask(place), f"story {place}") for place in range(EXAMPLES)])
    yield made
    made.access.close()


@pytest.fixture
def admin(doors: Doors) -> Browser:
    return doors.browse("admin")


@pytest.fixture(scope="session")
def hostile_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = make_hostile(tmp_path_factory.mktemp("hostile"))
    yield made
    made.close()


@pytest.fixture
def hostile(hostile_service: Service, tmp_path: Path) -> Iterator[Browser]:
    """An admin in front of a store with hostile names: without a ledger, a validation or examples."""
    made = open_doors(hostile_service, tmp_path, [])
    yield made.browse("admin")
    made.access.close()
