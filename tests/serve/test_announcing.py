"""What a service says when it starts: whom its policy can credit, and why nobody."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import imprint
from imprint.cli.commands.serving import _describe
from imprint.credit import Policy
from imprint.serve.access import Access
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.news import POLICY, News, make_ledger

Announce = Callable[[Service], dict[str, str]]


@pytest.fixture
def announce(tmp_path: Path) -> Iterator[Announce]:
    """Returns what is announced of a service, by its heading, and closes the service."""
    access, app = Access(tmp_path / "access.db"), cast(Any, SimpleNamespace())

    def describe(service: Service) -> dict[str, str]:
        lines = dict(_describe(service, access, "http://127.0.0.1:8080", app))
        service.close()
        return lines

    yield describe
    access.close()


@pytest.fixture
def unvalidated(news: News, tmp_path: Path) -> imprint.Store:
    """A store of trainings like that of the news, which nobody validated."""
    sources, plan = imprint.Sources.by_label([f"{place % 3}" for place in range(12)]), imprint.Plan(steps=2, lr=0.1)
    data = news.inputs[:12], news.labels[:12]
    return imprint.simulate(news.task, data, sources, plan, out=tmp_path / "store", progress=False)


def test_a_policy_without_a_ledger_is_announced_as_one_that_credits_nothing(news: News, announce: Announce) -> None:
    service = Service(news.task, news.store, policy=POLICY, settings=Settings(metrics=""))
    lines = announce(service)
    assert "nothing is credited" in lines["ledger"] and "there is no ledger" in lines["policy"]
    assert "policy" not in announce(news.serve(metrics=""))


def test_a_policy_that_pays_is_announced_by_its_name_alone(news: News, tmp_path: Path, announce: Announce) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger:
        assert announce(news.serve(ledger, metrics=""))["policy"] == "house rules, version 1"


@pytest.mark.parametrize(
    ("fallback", "expected"),
    [
        (None, "p, version 1: nobody is credited (not validated)"),
        ("by_size", "p, version 1: shares are by size (not validated)"),
    ],
)
def test_that_nobody_will_be_credited_is_said_at_the_start(
    news: News, unvalidated: imprint.Store, tmp_path: Path, announce: Announce, fallback: Any, expected: str
) -> None:
    policy = Policy("p", question="expected", fallback=fallback)
    with make_ledger(tmp_path / "credit.db") as ledger:
        service = Service(news.task, unvalidated, policy=policy, ledger=ledger, settings=Settings(metrics=""))
        assert announce(service)["policy"] == expected
