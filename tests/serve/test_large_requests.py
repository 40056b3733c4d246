"""What is large is bounded, and keeps nobody else waiting."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from imprint.serve import requests
from imprint.serve.access import Access
from imprint.serve.api import attributions
from imprint.serve.app import create_app
from imprint.serve.pages import query as query_page
from imprint.serve.pages.asking import Asking
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import Browser
from tests.serve.calling import HOST, Answer, Caller, Pieces, answer, make_scope
from tests.serve.news import News


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    made = Access(tmp_path / "access.db")
    yield made
    made.close()


@pytest.fixture
def caller(service: Service, access: Access) -> Caller:
    app = create_app(Settings(metrics="", rate=1e6), service, access)
    return Caller(app, access.create("app", "query").secret)


def post(caller: Caller, **body: Any) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"idempotency-key", b"a")]
    return caller.call("/v1/attributions", headers, [json.dumps(body).encode()], method="POST")


def test_an_answer_lists_so_many_sources_and_no_more(
    news: News, service: Service, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attributions, "_MOST_LINES", 11)
    assert service.ledger is not None and len(news.store) == 6
    queries, entries = [news.ask(0), news.ask(1)], len(service.ledger)
    for top in (None, 6, 1_000_000):
        refused = post(caller, queries=queries, top=top, credit=True)
        assert refused.status == 413 and b'"too_many_lines"' in refused.body and b"2 times 6" in refused.body
    assert len(service.ledger) == entries
    assert [len(each["sources"]) for each in json.loads(post(caller, queries=queries, top=5).body)["queries"]] == [5, 5]
    assert len(json.loads(post(caller, query=queries[0], top=None).body)["queries"][0]["sources"]) == 6


def test_of_a_hundred_thousand_unknown_fields_one_is_named(caller: Caller) -> None:
    with pytest.raises(ValidationError) as found:
        requests.AttributionRequest.model_validate({"quary": 0} | {f"k{place}": 0 for place in range(100_000)})
    assert found.value.error_count() == 1
    refused = post(caller, quary=1, other=0)
    assert refused.status == 422 and b"unknown field 'quary'" in refused.body and b"mean query?" in refused.body


def test_keys_take_turns(
    news: News, service: Service, access: Access, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, submit = list[str](), service._batcher.submit

    async def note(queries: Any, timeout: float, caller: str) -> Any:
        turns.append(caller)
        return await submit(queries, timeout, caller)

    monkeypatch.setattr(service._batcher, "submit", note)
    assert [post(caller, query=news.ask(0), credit=credit).status for credit in (False, True)] == [200, 200]
    browser = Browser(caller.app)
    browser.post("/login", data={"key": access.create("root", "admin").secret}, csrf=False)
    assert browser.post("/query", data={"values": "1 2 3 4"}).status_code == 200
    assert turns == ["key:app", "key:app", "key:root"]


class Busy:
    """Stands for something that takes long: it goes on once `/healthz` was answered meanwhile."""

    def __init__(self, instead_of: Callable[..., Any]) -> None:
        self._instead_of, self.begun, self.answered = instead_of, threading.Event(), threading.Event()

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.begun.set()
        assert self.answered.wait(60), "the loop was blocked"
        return self._instead_of(*given, **more)

    async def outlast(self, caller: Caller, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
        """Return what a request is answered with, during which `/healthz` is asked."""
        long = asyncio.create_task(
            answer(caller.app, make_scope("POST", path.encode(), b"", [HOST, *headers]), Pieces([body]))
        )
        if await asyncio.to_thread(self.begun.wait, 60):
            healthy = await answer(caller.app, make_scope("GET", b"/healthz", b"", [HOST]), Pieces(None))
            assert healthy.status == 200
        self.answered.set()
        return await long


@pytest.mark.parametrize(("module", "name"), [(attributions, "_describe"), (requests, "read_json")])
def test_others_are_answered_while_a_large_request_is_read_or_answered(
    news: News, caller: Caller, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    busy = Busy(getattr(module, name))
    monkeypatch.setattr(module, name, busy)
    body = json.dumps({"query": news.ask(0)}).encode() + b" " * 20_000
    headers = [(b"authorization", f"Bearer {caller.secret}".encode()), (b"content-type", b"application/json")]
    assert asyncio.run(busy.outlast(caller, "/v1/attributions", headers, body)).status == 200


@pytest.mark.parametrize(("holder", "name"), [(query_page, "describe_answer"), (Asking, "_parse")])
def test_others_are_answered_while_a_page_is_read_or_rendered(
    caller: Caller, access: Access, monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    browser = Browser(caller.app)
    browser.post("/login", data={"key": access.create("root", "admin").secret}, csrf=False)
    cookies = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
    body = f"values=1+2+3+4&csrf={browser.token}".encode()
    busy = Busy(getattr(holder, name))
    monkeypatch.setattr(holder, name, busy if holder is query_page else lambda asking: busy(asking))
    headers = [(b"cookie", cookies.encode()), (b"content-type", b"application/x-www-form-urlencoded")]
    assert asyncio.run(busy.outlast(caller, "/query", headers, body)).status == 200
