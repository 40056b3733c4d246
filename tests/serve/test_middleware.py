"""What no route ever sees: other hosts, odd requests, too much, too often, too slow. And the headers of answers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from imprint.errors import AccessError
from imprint.serve import middleware
from imprint.serve.access import Access
from imprint.serve.access.roles import Identity
from imprint.serve.app import create_app
from imprint.serve.middleware import list_hosts
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import Clock
from tests.serve.calling import Caller, Raw
from tests.serve.news import News

OTHER_HOSTS: list[list[str]] = [
    [],
    [""],
    ["evil.example"],
    ["127.0.0.1.evil.example"],
    ["evil.example:127.0.0.1"],
    ["127.0.0.1@evil.example"],
    ["localhost.evil.example:8080"],
    ["127.0.0.1:80:80"],
    ["127.0.0.1:port"],
    ["127.0.0.1:٣"],
    ["[::1"],
    ["::1"],
    ["[::2]"],
    ["0.0.0.0:8080"],
    ["127.0.0.1", "127.0.0.1"],
    ["127.0.0.1", "evil.example"],
    ["127.0.0.1, evil.example"],
    [" 127.0.0.1"],
    ["127.0.0.1."],
]


@pytest.fixture(scope="module")
def quiet(news: News) -> Iterator[Service]:
    """A service without a ledger, for all tests here."""
    made = news.serve()
    yield made
    made.close()


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    made = Access(tmp_path / "access.db")
    yield made
    made.close()


def make_caller(quiet: Service, access: Access, **settings: Any) -> Caller:
    given = {"metrics": "", "rate": 1e6, "body_bytes": 10_000, **settings}
    secret = access.create(f"key-{len(access.list())}", "admin").secret
    return Caller(create_app(Settings(**given), quiet, access), secret)


@pytest.fixture
def caller(quiet: Service, access: Access) -> Caller:
    return make_caller(quiet, access)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:8080", "localhost:1", "LocalHost", "[::1]", "[::1]:8080", "news.example:443", "10.1.2.3"],
)
def test_the_service_answers_by_its_own_names(quiet: Service, access: Access, host: str) -> None:
    caller = make_caller(quiet, access, host="10.1.2.3", hosts=("News.example",))
    assert caller.call(headers=[(b"host", host.encode())], host=False)[0] == 200


def test_by_any_other_name_everything_is_refused(caller: Caller) -> None:
    for hosts, path in product(OTHER_HOSTS, ("/v1/store", "/healthz", "/login", "/static/0/pages.css", "/nothing")):
        headers = [(b"host", host.encode()) for host in hosts]
        status, _, body = caller.call(path, headers, host=False)
        assert status == 400 and b"bad_host" in body and b"evil" not in body


def test_a_service_on_all_addresses_needs_to_be_told_its_names() -> None:
    local = {"127.0.0.1", "localhost", "[::1]"}
    assert list_hosts(Settings(host="0.0.0.0")) == list_hosts(Settings(host="::")) == local
    assert list_hosts(Settings(host="::1")) == local
    assert list_hosts(Settings(host="Box.local", hosts=("a.example",))) == {*local, "box.local", "a.example"}


@pytest.mark.parametrize("pieces", [[b"x" * 10_001], [b"x" * 5_000] * 3, [b"x"] * 10_001])
def test_a_body_that_is_too_large_is_refused_however_it_comes(caller: Caller, pieces: list[bytes]) -> None:
    declared = [(b"content-length", str(sum(map(len, pieces))).encode())]
    for headers in ([], declared):
        status, _, body = caller.call("/v1/attributions", headers, pieces, method="POST")
        assert status == 413 and b"a body has at most 10,000 bytes" in body


def test_a_body_of_just_the_size_is_read(caller: Caller) -> None:
    kind = [(b"content-type", b"application/json")]
    status, _, body = caller.call("/v1/attributions", kind, [b" " * 9_999, b"x"], method="POST")
    assert status == 400 and b"bad_json" in body


def test_a_body_without_an_end_is_read_so_far_and_no_further(caller: Caller) -> None:
    async def stream() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (1 << 20)

    assert caller.call("/v1/attributions", [], stream(), method="POST")[0] == 413
    assert caller.read <= 10 << 20


def test_a_body_that_is_declared_to_be_huge_is_not_read_at_all(caller: Caller) -> None:
    huge = [(b"content-length", b"99999999999")]
    assert caller.call("/v1/attributions", huge, [b"x"], method="POST")[0] == 413 and caller.read == 0


def test_a_body_that_does_not_come_is_given_up(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "_BODY_SECONDS", 0.01)

    async def stall() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    status, headers, body = caller.call("/v1/attributions", [], stall(), method="POST")
    assert status == 408 and b"too_slow" in body and headers["connection"] == "close"


def test_whoever_leaves_is_not_answered(caller: Caller) -> None:
    async def leave() -> AsyncIterator[bytes]:
        yield b"{"

    assert caller.call("/v1/attributions", [], leave(), method="POST")[0] == 0


def test_without_a_key_no_body_is_read(caller: Caller) -> None:
    caller.secret = "imprint_" + "A" * 43
    assert caller.call("/v1/attributions", [], [b"x"], method="POST")[0] == 401 and caller.read == 0


@pytest.mark.parametrize(
    ("path", "most"),
    [("/login", 8192), ("/nothing", 8192), ("/healthz", 0), ("/readyz", 0), ("/static/0/pages.css", 0)],
)
def test_strangers_send_no_more_than_a_login(caller: Caller, path: str, most: int) -> None:
    caller.secret = ""
    assert caller.call(path, [], [b"x" * most, b"x"], method="POST")[0] == 413
    assert caller.call(path, [], [b"x" * most], method="POST")[0] in (401, 404, 405, 415)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity", "zstd", "x"])
def test_compressed_bodies_are_refused(caller: Caller, encoding: str) -> None:
    headers = [(b"content-encoding", encoding.encode())]
    status, _, body = caller.call("/v1/attributions", headers, [b"\x1f\x8b"], method="POST")
    assert status == 415 and b"compressed" in body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-length", b"1"), (b"content-length", b"2")], 400),
        ([(b"content-length", b"1"), (b"transfer-encoding", b"chunked")], 400),
        ([(b"content-length", b"-1")], 400),
        ([(b"content-length", b"0x10")], 400),
        ([(b"content-length", b"9" * 400)], 400),
        ([(b"authorization", b"Bearer x")], 400),
        ([(b"idempotency-key", b"a"), (b"idempotency-key", b"b")], 400),
        ([(b"content-type", b"application/json"), (b"content-type", b"text/html")], 400),
        ([(b"x-note", b"a\r\nset-cookie: x=y")], 400),
        ([(b"x-note", b"a\0b")], 400),
        ([(b"x\nnote", b"a")], 400),
        ([(b"x-note", b"x" * 40_000)], 431),
        ([(b"x-note", b"x" * 100)] * 500, 431),
    ],
)
def test_headers_that_contradict_each_other_or_are_odd_are_refused(caller: Caller, headers: Raw, status: int) -> None:
    found, answered, _ = caller.call(headers=headers)
    assert found == status and "set-cookie" not in answered


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/" + "a" * 9000, 414), ("/v1/store?" + "a" * 9000, 414), ("*", 400), ("", 400), ("http://x/", 400),
     ("/a\\b", 400), ("/a b", 400), ("/a\nb", 400), ("/\x7f", 400),
     ("/login?\xff=1", 400), ("/v1/store?a b", 400)],
)  # fmt: skip
def test_odd_urls_are_refused(caller: Caller, path: str, status: int) -> None:
    assert caller.call(path)[0] == status


def test_a_path_with_an_encoded_nul_is_refused_and_other_odd_characters_are_just_names(caller: Caller) -> None:
    assert caller.call(shown="/sources/\0", path="/sources/%00")[0] == 400
    assert caller.call(shown="/\x85\u00a0\n\\", path="/%C2%85%C2%A0%0A%5C")[0] == 404


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "TRACE", "BREW"])
def test_every_answer_has_the_security_headers(caller: Caller, method: str) -> None:
    for path in ("/healthz", "/v1/store", "/v1/nothing", "/login", "/nothing", "/static/0/x", "/keys"):
        check_headers(caller, path, method)


def check_headers(caller: Caller, path: str, method: str) -> None:
    _, headers, body = caller.call(path, method=method)
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert "unsafe" not in str(policy)
    expected = {
        "x-content-type-options": "nosniff",
        "referrer-policy": "strict-origin" if path == "/login" else "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }
    assert expected.items() <= headers.items() and "permissions-policy" in headers
    assert not {"strict-transport-security", "access-control-allow-origin", "server"} & headers.keys()
    if path.startswith(("/v1", "/healthz")):
        assert headers["content-type"] == "application/json" and (
            b"error" in body or b"status" in body or method == "GET"
        )


def test_only_over_https_is_https_demanded(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, https=True)
    assert caller.call("/healthz")[1]["strict-transport-security"] == "max-age=31536000"


def test_static_files_may_be_kept_and_refusals_may_not(caller: Caller) -> None:
    from imprint.serve.pages.static import address_of

    status, headers, _ = caller.call(address_of("pages.css"))
    assert status == 200 and "immutable" in headers["cache-control"] and "content-security-policy" in headers
    assert caller.call(address_of("pages.css") + "x")[1]["cache-control"] == "no-store"


def test_refusals_are_json_for_programs_and_pages_for_people(caller: Caller) -> None:
    bad = [(b"content-encoding", b"gzip")]
    for path in ("/v1/store", "/healthz", "/readyz"):
        status, headers, body = caller.call(path, bad)
        assert status == 415 and headers["content-type"] == "application/json" and b'"code":"compressed"' in body
    status, headers, body = caller.call("/login", bad)
    assert status == 415 and headers["content-type"].startswith("text/html") and b"<h1>" in body


def test_each_key_has_a_rate_of_its_own(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, rate=0.01)
    statuses = [caller.call()[0] for _ in range(2)]
    assert statuses == [200, 429]
    status, headers, body = caller.call()
    assert status == 429 and 1 <= int(headers["retry-after"]) <= 100 and b"too_many_requests" in body
    caller.secret = access.create("other", "query").secret
    assert caller.call()[0] == 200


def test_whoever_has_no_key_is_counted_by_address_and_keeps_nobody_out(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, rate=0.01)
    good, caller.secret = caller.secret, "imprint_" + "A" * 43
    assert [caller.call()[0] for _ in range(3)] == [401, 429, 429]
    assert caller.call("/login")[0] == 429 and caller.call(client=("10.0.0.2", 1))[0] == 401
    caller.secret = good
    assert caller.call()[0] == 200


def test_a_flood_of_secrets_that_nobody_has_is_not_looked_up_and_locks_nobody_out(
    quiet: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    access, elsewhere = (Access(tmp_path / "access.db", clock=clock) for _ in range(2))  # the latter is another process
    caller = make_caller(quiet, access, rate=0.01)
    good = elsewhere.create("early", "query").secret
    session = elsewhere.open_session(elsewhere.create("person", "query").secret, 60)
    assert session is not None
    looked_up, listed = list[str](), list[None]()

    def watch(find: Callable[[str], Identity | None]) -> Callable[[str], Identity | None]:
        return lambda secret: looked_up.append(secret) or find(secret)  # type: ignore[func-returns-value]

    monkeypatch.setattr(access, "identify_key", watch(access.identify_key))
    monkeypatch.setattr(access, "identify_session", watch(access.identify_session))
    monkeypatch.setattr(access, "list_secrets", lambda read=access.list_secrets: listed.append(read()))

    def knock(secret: str) -> int:
        caller.secret = secret
        return caller.call().status

    def look(token: str) -> int:
        return caller.call("/login", [(b"cookie", f"imprint={token}".encode())]).status

    guesses = [f"imprint_{place:043}" for place in range(20)]
    assert [knock(secret) for secret in guesses] == [401] + [429] * 19
    assert [look(f"{place:043}") for place in range(20)] == [429] * 20
    assert looked_up == guesses[:1] and len(listed) == 1
    assert knock(good) == 200 and look(session) != 429
    late = elsewhere.create("late", "query").secret
    assert knock(late) == 429
    clock.turn(seconds=1)
    assert knock(late) == 200 and len(listed) == 2
    access.close()
    elsewhere.close()


def test_only_the_paths_of_health_itself_are_not_counted(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, rate=0.01)
    caller.secret = ""
    assert [caller.call(path)[0] for path in ("/readyzX", "/healthz/x", "/readyz")] == [404, 429, 200]


def test_behind_a_proxy_that_is_named_everybody_has_an_address_of_their_own(quiet: Service, access: Access) -> None:
    def knock(caller: Caller) -> list[int]:
        caller.secret = "imprint_" + "A" * 43
        return [caller.call(headers=[(b"x-forwarded-for", b"6.6.6.6, " + who)])[0] for who in (b"1.1.1.1", b"1.1.1.2")]

    assert knock(make_caller(quiet, access, rate=0.01, proxies=("10.0.0.1",))) == [401, 401]
    assert knock(make_caller(quiet, access, rate=0.01)) == [401, 429]
    assert knock(make_caller(quiet, access, rate=0.01, proxies=("10.0.0.2",))) == [401, 429]


def test_health_and_static_files_are_not_counted(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, rate=0.01)
    assert [caller.call(path)[0] for path in ["/healthz"] * 5 + ["/readyz"] * 5] == [200] * 10


def test_refused_requests_are_counted(quiet: Service, access: Access) -> None:
    caller = make_caller(quiet, access, rate=0.01)
    for _ in range(3):
        caller.call()
    registry = caller.app.state.metrics.registry
    assert registry.get_sample_value("imprint_refused_requests_total", {"reason": "too_many_requests"}) == 2


def test_requests_that_reach_no_route_are_counted_with_their_status(caller: Caller) -> None:
    caller.call(host=False)
    caller.call(headers=[(b"content-encoding", b"gzip")])
    caller.secret = "imprint_" + "A" * 43
    caller.call()
    metrics = caller.app.state.metrics
    for status in ("400", "415", "401"):
        about = {"route": "unknown", "status": status}
        assert metrics.registry.get_sample_value("imprint_requests_total", about) == 1, status


def test_keys_that_cannot_be_checked_open_nothing(
    caller: Caller, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> None:
        raise AccessError("the database of keys /secret/place cannot be used.")

    monkeypatch.setattr(access, "identify_key", fail)
    status, headers, body = caller.call()
    assert status == 503 and headers["retry-after"] == "5" and b"secret" not in body
    assert caller.call("/healthz")[0] == 200


def test_there_are_no_web_sockets(caller: Caller) -> None:
    client = TestClient(caller.app, base_url="http://127.0.0.1")
    with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/v1/attributions"):
        pass
    assert refused.value.code == 1008
