"""Every request has its line in the log, with what an operator needs, and nothing of what it carried."""

import json
import logging
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.logs import JsonFormatter, TextFormatter, start_logging
from imprint.serve.service import Service
from tests.serve.calling import Caller
from tests.serve.news import News

JSON = (b"content-type", b"application/json")
MARK = "hidden1234"  # in everything that a request carries
Lines = list[dict[str, Any]]


class Log:
    """A stream for logs, and what stands in it."""

    def __init__(self) -> None:
        self.stream = StringIO()

    @property
    def lines(self) -> Lines:
        return [json.loads(line) for line in self.stream.getvalue().splitlines()]

    def requests(self) -> Lines:
        return [line for line in self.lines if line["event"] == "request"]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    made, root, before = Log(), logging.getLogger(), logging.getLogger("imprint.serve").level
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    start_logging(made.stream)
    yield made
    logging.captureWarnings(False)
    logging.getLogger("imprint.serve").setLevel(before)


@pytest.fixture
def caller(service: Service, tmp_path: Path) -> Iterator[Caller]:
    access = Access(tmp_path / "access.db")
    secret = access.create("app", "query").secret
    yield Caller(create_app(service.settings, service, access), secret)
    access.close()


def ask(caller: Caller, news: News, headers: Any = (), **body: Any) -> Any:
    content = json.dumps({"queries": [news.ask(0), news.ask(1)], **body}).encode()
    return caller.call("/v1/attributions", [JSON, *headers], [content], method="POST")


def test_a_request_is_logged_with_its_route_status_duration_and_caller(caller: Caller, news: News, log: Log) -> None:
    answer = ask(caller, news, [(b"idempotency-key", b"a")], credit=True)
    assert answer.status == 200
    ask(caller, news, [(b"idempotency-key", b"a")], credit=True)
    first, again = log.requests()
    known = {"level": "info", "method": "POST", "route": "/v1/attributions", "status": 200, "queries": 2, "key": "app"}
    assert known.items() <= first.items() and first["credited"] == 2 and again["credited"] == 0
    assert first["request"] == answer.headers["x-request-id"] != again["request"]
    assert first["milliseconds"] > 0 and first["time"].endswith("Z")


def test_an_id_that_is_given_is_kept_if_it_is_plain(caller: Caller, log: Log) -> None:
    for given, kept in ((b"trace-7.a_B", True), (b"a b", False), (b'x","level":"y', False), (b"x" * 65, False)):
        answer = caller.call("/healthz", [(b"x-request-id", given)])
        assert (answer.headers["x-request-id"] == given.decode()) == kept
        assert log.requests()[-1]["request"] == answer.headers["x-request-id"]


def test_what_is_logged_while_answering_has_the_id_of_the_request(
    caller: Caller, news: News, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError(MARK)

    monkeypatch.setattr(caller.app.state.service, "_parse", fail)
    answer = ask(caller, news)
    assert answer.status == 500 and MARK not in answer.body.decode()
    error, request = log.lines
    assert error["level"] == "error" and "RuntimeError while answering /v1/attributions" in error["event"]
    assert error["request"] == request["request"] == answer.headers["x-request-id"]
    assert MARK not in log.stream.getvalue()


def test_nothing_that_a_request_carries_is_logged(caller: Caller, news: News, log: Log) -> None:
    mark, secret = MARK.encode(), caller.secret
    headers = [(name, mark) for name in (b"cookie", b"user-agent", b"referer", b"x-csrf-token", b"x-other")]
    ask(caller, news, [*headers, (b"idempotency-key", mark)], credit=True)
    for body in (f'{{"{MARK}": 1}}', f'{{"query": "{MARK}"}}', MARK, f'{{"queries": [1], "top": "{MARK}"}}'):
        caller.call(f"/v1/attributions?q={MARK}", [JSON, *headers], [body.encode()], method="POST")
    for path in (f"/{MARK}", f"/login/{MARK}", f"/v1/{MARK}", f"/login?next=/{MARK}", f"/sources/{MARK}", "/credit"):
        caller.call(f"{path}", headers)
        caller.call(path, [(b"content-type", b"application/x-www-form-urlencoded")], [b"key=" + mark], method="POST")
    caller.call("/healthz", method=MARK)
    caller.call("/healthz", [(b"host", mark)], host=False)
    stranger = Caller(caller.app, f"imprint_{MARK}")
    assert ask(stranger, news).status == 401
    text = log.stream.getvalue()
    assert len(log.requests()) == 20 and MARK not in text and secret not in text


def test_an_exception_is_logged_without_its_message() -> None:
    try:
        raise ValueError(MARK)
    except ValueError:
        record = logging.LogRecord("imprint", logging.ERROR, __file__, 1, "it failed", (), sys.exc_info())
    found = json.loads(JsonFormatter().format(record))
    assert found["error"] == "ValueError" and "test_logs.py" in found["frames"][0]
    text = TextFormatter().format(record)
    assert "error: it failed error=ValueError" in text and MARK not in text and MARK not in json.dumps(found)


def test_a_line_for_a_person_cannot_forge_another_or_move_the_cursor() -> None:
    record = logging.LogRecord("imprint", logging.INFO, __file__, 1, "\x1b[2J%s", ("a",), None)
    record.fields = {"status": 200}
    text = TextFormatter().format(record)
    assert "\x1b" not in text and text.endswith("a status=200")
