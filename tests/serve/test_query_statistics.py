"""Queries that are asked again say nothing new about what is asked."""

import asyncio

import pytest

from imprint.serve import query_statistics as module
from imprint.serve.service import Service
from tests.serve.news import News


def ask(service: Service, *queries: object) -> None:
    asyncio.run(service.attribute(queries))


def test_a_query_that_is_asked_again_counts_once(news: News, service: Service) -> None:
    (likeliest,) = asyncio.run(service.attribute([news.ask(0, labelled=False)])).answers
    assert likeliest is not None
    for _ in range(60):
        ask(service, {**news.ask(0), "label": int(likeliest)}, news.ask(0, labelled=False))
    summary = service.statistics.summary
    assert summary.answered == 121 and summary.different == summary.judged == 1
    assert summary.drift is None and summary.typical is None


def test_the_same_input_with_another_label_is_another_query(news: News, service: Service) -> None:
    ask(service, *({**news.ask(0), "label": label} for label in range(3)))
    assert service.statistics.summary.different == 3


def test_so_many_queries_are_kept_and_no_more(news: News, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KEPT", 20)
    ask(service, *(news.ask(place) for place in range(40)))
    latest = service.statistics.summary
    assert latest.answered == 40 and latest.different == latest.judged == 20
    other = news.serve()
    ask(other, *(news.ask(place) for place in range(20, 40)))
    assert other.statistics.summary.typical == pytest.approx(latest.typical) and latest.typical is not None
    other.close()


def test_a_share_comes_with_its_counts_and_its_interval(news: News, service: Service) -> None:
    assert service.statistics.summary.silent_share is None
    ask(service, *(news.ask(place) for place in range(10)))
    summary = service.statistics.summary
    share = summary.silent_share
    assert share is not None and share.value == summary.silent / 10
    assert 0 <= share.low <= share.value <= share.high <= 1 and share.high - share.low > 0.2
