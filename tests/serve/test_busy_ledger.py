"""A ledger that is locked stalls nothing but crediting, and whoever credits meanwhile learns what to do."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event

from imprint.credit import tables, verify
from imprint.serve import service as service_module
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.service import Service
from tests.serve.calling import HOST, Answer, Pieces, answer, make_scope
from tests.serve.news import News

PATIENCE = 30.0  # seconds, after which a test fails instead of waiting


class Desk:
    """Requests to an application whose ledger the test may lock."""

    def __init__(self, service: Service, access: Access) -> None:
        self.service, self._secret = service, access.create("app", "query").secret
        self.app = create_app(service.settings, service, access)
        self._locks, self._crediting = ExitStack(), 0
        service.credit, self._credit = self._note, service.credit  # type: ignore[method-assign]

    async def _note(self, *given: Any, **named: Any) -> Any:
        self._crediting += 1
        return await self._credit(*given, **named)

    async def wait_until_crediting(self, requests: int) -> None:
        """Wait until so many requests were read, and wait for the ledger."""
        async with asyncio.timeout(PATIENCE):
            while self._crediting < requests:
                await asyncio.sleep(0)

    def lock(self) -> None:
        """Hold the ledger as a writer."""
        assert self.service.ledger is not None
        self._locks.enter_context(tables.writing(self.service.ledger.engine))

    def release(self) -> None:
        self._locks.close()

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path, [], b"")

    async def post(self, *queries: Any, key: str | None = None) -> Answer:
        headers = [(b"content-type", b"application/json")]
        headers += [] if key is None else [(b"idempotency-key", key.encode())]
        body = json.dumps({"queries": list(queries), "credit": key is not None}).encode()
        return await self._ask("POST", "/v1/attributions", headers, body)

    async def _ask(self, method: str, path: str, headers: Any, body: bytes) -> Answer:
        return await asyncio.wait_for(answer(self.app, *self.describe(method, path, headers, body)), PATIENCE)

    def describe(self, method: str, path: str, headers: Any, body: bytes) -> tuple[dict[str, Any], Pieces]:
        """Return what a server tells the application of a request."""
        given = [HOST, (b"authorization", f"Bearer {self._secret}".encode()), *headers]
        return make_scope(method, path.encode(), b"", given), Pieces([body])

    def count(self) -> int:
        assert self.service.ledger is not None
        return len(list(self.service.ledger.entries(kind="credit")))


@pytest.fixture
def desk(service: Service, tmp_path: Path) -> Iterator[Desk]:
    access = Access(tmp_path / "access.db")
    made = Desk(service, access)
    yield made
    made.release()
    access.close()


def test_while_the_ledger_is_locked_everything_else_is_answered(desk: Desk, news: News) -> None:
    async def run() -> list[Answer]:
        desk.lock()
        credits = [asyncio.create_task(desk.post(news.ask(number), key=f"{number}")) for number in range(40)]
        await desk.wait_until_crediting(40)
        for path in ("/readyz", "/v1/store", "/v1/sources", "/healthz"):
            assert (await desk.get(path)).status == 200
        assert (await desk.post(news.ask(0))).status == 200
        assert not any(credit.done() for credit in credits) and desk.count() == 0
        desk.release()
        return list(await asyncio.gather(*credits))

    assert [each.status for each in asyncio.run(run())] == [200] * 40
    assert desk.count() == 40 and desk.service.ledger is not None
    assert verify(desk.service.ledger, progress=False).holds


def test_whoever_waits_too_long_is_told_to_send_the_same_again_which_credits_once(
    desk: Desk, news: News, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "_CREDITING_SECONDS", 0.05)
    desk.lock()
    late = asyncio.run(desk.post(news.ask(0), key="a"))
    desk.release()
    error = json.loads(late.body)["error"]
    assert late.status == 503 and error["code"] == "credit_unknown" and late.headers["retry-after"] == "5"
    assert "unknown whether this was credited" in error["message"] and "same Idempotency-Key" in error["message"]
    monkeypatch.setattr(service_module, "_CREDITING_SECONDS", PATIENCE)
    again = asyncio.run(desk.post(news.ask(0), key="a"))
    assert again.status == 200 and desk.count() == 1


def test_beyond_a_bound_a_request_that_credits_is_refused_before_it_is_read(
    news: News, service: Service, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, most = threading.Event(), service_module._CREDITING + service.settings.queue
    read: list[Any] = []
    parse = service._parse
    monkeypatch.setattr(service, "_parse", lambda queries: read.append(queries) or parse(queries))  # type: ignore[func-returns-value]

    async def run() -> None:
        waiting = [
            asyncio.create_task(service._crediting.run(opened.wait, PATIENCE, timeout=PATIENCE)) for _ in range(most)
        ]
        await asyncio.sleep(0)
        refused = await desk.post(news.ask(0), key="a")
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1 and read == []
        assert (await desk.post(news.ask(0))).status == 200 and len(read) == 1
        opened.set()
        await asyncio.gather(*waiting)
        assert (await desk.post(news.ask(0), key="a")).status == 200

    asyncio.run(run())
    assert desk.count() == 1


def test_a_service_that_closes_finishes_the_credits_that_it_accepted(desk: Desk, news: News) -> None:
    async def run() -> Answer:
        desk.lock()
        credit = asyncio.create_task(desk.post(news.ask(0), key="a"))
        await desk.wait_until_crediting(1)
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(desk.service.close))
        while desk.service.alive:
            await asyncio.sleep(0)
        desk.release()
        await closing
        return await credit

    assert asyncio.run(run()).status == 200 and desk.count() == 1


def test_a_database_that_hangs_is_named_and_does_not_keep_the_others_from_being_asked(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.serve.api.health._PATIENCE", 0.05)
    opened = threading.Event()
    monkeypatch.setattr(desk.app.state.readiness, "_probes", {"ledger": opened.wait, "access": lambda: None})

    async def run() -> list[Answer]:
        return await asyncio.gather(*(desk.get("/readyz") for _ in range(20)))

    answers = asyncio.run(run())
    opened.set()
    assert [each.status for each in answers] == [503] * 20
    assert json.loads(answers[0].body)["problems"] == ["the ledger database cannot be reached"]


def test_readiness_is_looked_up_once_for_all_who_ask_at_once_and_again_later(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(desk.app.state.readiness, "_probes", {"ledger": lambda: asked.append(1)})

    async def run() -> None:
        await asyncio.gather(*(desk.get("/readyz") for _ in range(9)))
        await desk.get("/readyz")
        assert len(asked) == 1
        desk.app.state.readiness._until = 0.0
        await desk.get("/readyz")
        assert len(asked) == 2

    asyncio.run(run())


def test_whoever_is_still_waiting_when_the_time_to_stop_is_over_is_told_so(desk: Desk, news: News) -> None:
    async def run() -> tuple[Answer, Answer]:
        desk.lock()
        body = json.dumps({"query": news.ask(0), "credit": True}).encode()
        headers = [(b"content-type", b"application/json"), (b"idempotency-key", b"a")]
        waiting = asyncio.create_task(answer(desk.app, *desk.describe("POST", "/v1/attributions", headers, body)))
        await desk.wait_until_crediting(1)
        desk.app.state.stopping = True
        waiting.cancel()  # as uvicorn does
        refused = await waiting
        desk.release()
        return refused, await desk.post(news.ask(0), key="a")

    refused, again = asyncio.run(run())
    error = json.loads(refused.body)["error"]
    assert refused.status == 503 and error["code"] == "closing" and "same Idempotency-Key" in error["message"]
    assert refused.headers["retry-after"] == "5" and again.status == 200 and desk.count() == 1


def test_the_log_says_why_the_ledger_cannot_be_used(desk: Desk, news: News, caplog: pytest.LogCaptureFixture) -> None:
    assert desk.service.ledger is not None
    with desk.service.ledger.engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    event.listen(desk.service.ledger.engine, "begin", lambda connection: fill_disk(connection, pages))
    refused = asyncio.run(desk.post(*[news.ask(number) for number in range(40)], key="a"))
    assert refused.status == 503 and b"no_database" in refused.body and b"full" not in refused.body
    assert "the ledger cannot be used: OperationalError: database or disk is full" in caplog.messages


def fill_disk(connection: Connection, pages: int) -> None:
    """Let a database have no more pages than it has."""
    connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
