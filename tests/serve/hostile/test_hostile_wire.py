"""What only a real server sees: broken HTTP, smuggled requests, bodies without an end, connections that hang."""

import contextlib
import http.client
import json
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn

from imprint.serve import connections, middleware
from imprint.serve.running import configure
from tests.serve.hostile.target import Target

pytestmark = pytest.mark.system
PATIENCE = 60.0  # seconds, after which a connection counts as hanging
MOST = 1 << 20  # bytes of an answer


class Wire:
    """A server at a port of this machine, and its target."""

    def __init__(self, port: int, target: Target, server: uvicorn.Server) -> None:
        self.port, self.target, self.secret, self.server = port, target, target.held.keys["admin"], server

    @property
    def head(self) -> bytes:
        return f"Host: 127.0.0.1:{self.port}\r\nAuthorization: Bearer {self.secret}\r\n".encode()

    def send(self, *pieces: bytes) -> bytes:
        """Send some bytes, and return what comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE) as connection:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    connection.sendall(piece)
            return receive_all(connection)

    def ask(self, line: str, *headers: str, body: bytes = b"") -> tuple[int, bytes]:
        """Send one request, and return the status and all that came back."""
        lines = [line, *headers, "Connection: close", "", ""]
        given = self.head + "\r\n".join(lines[1:]).encode("latin-1")
        found = self.send(line.encode("latin-1") + b"\r\n" + given + body)
        return read_status(found), found

    def is_alive(self) -> bool:
        query = json.dumps({"query": {"values": [0.1, 0.2, 0.3, 0.4]}})
        kind, length = "Content-Type: application/json", f"Content-Length: {len(query)}"
        return self.ask("POST /v1/attributions HTTP/1.1", kind, length, body=query.encode())[0] == 200


def receive_all(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while len(found) < MOST and (piece := connection.recv(65_536)):
            found += piece
    return found


def read_status(found: bytes) -> int:
    return int(found.split(b" ", 2)[1]) if found.startswith(b"HTTP/1.") else 0


@pytest.fixture
def wire(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(middleware, "_BODY_SECONDS", 0.5)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    server = uvicorn.Server(configure(target.app, target.settings))
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        made = Wire(bound.getsockname()[1], target, server)
        yield made
        assert server.should_exit or made.is_alive()
        server.should_exit = True
        thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_plain_request_is_answered(wire: Wire) -> None:
    status, found = wire.ask("GET /v1/store HTTP/1.1")
    head = found.partition(b"\r\n\r\n")[0].lower()
    assert status == 200 and b"content-security-policy" in head and b"server: uvicorn" not in head


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 5000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/store\r\n\r\n",
        b"GET  /v1/store  HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/store HTTP/1.1\r\n\r\n",
        b"GET /v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Y : z\r\n\r\n",
        b"GET /v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Y: a\r\n b\r\n\r\n",
        b"GET /v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\nX\0Y: z\r\n\r\n",
        b"GET /v1/\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET http://evil.example/v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -5\r\n\r\nabc",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        b"GET /v1/store HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    ],
    ids=range(26),
)
def test_broken_http_is_refused_or_dropped(wire: Wire, sent: bytes) -> None:
    found = wire.send(sent)
    assert not found or 400 <= read_status(found) < 500
    assert b"Traceback" not in found and b'File "' not in found and b"evil" not in found.partition(b"\r\n\r\n")[0]


@pytest.mark.parametrize(
    "order", [("Content-Length: 4", "Transfer-Encoding: chunked"), ("Transfer-Encoding: chunked", "Content-Length: 4")]
)
def test_a_smuggled_request_is_not_answered(wire: Wire, order: tuple[str, str]) -> None:
    smuggled = b"GET /v1/sources HTTP/1.1\r\n" + wire.head + b"\r\n"
    head = b"POST /v1/attributions HTTP/1.1\r\n" + wire.head + "\r\n".join(order).encode() + b"\r\n\r\n"
    found = wire.send(head + b"0\r\n\r\n" + smuggled)
    assert found.count(b"HTTP/1.1") == 1 and read_status(found) == 400 and b"publisher" not in found


def test_chunks_without_an_end_are_cut_off(wire: Wire) -> None:
    head = b"POST /v1/attributions HTTP/1.1\r\n" + wire.head + b"Transfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    found = wire.send(head, *([chunk] * 1000))
    assert not found or read_status(found) == 413


def test_a_body_that_is_a_little_too_large_is_answered(wire: Wire) -> None:
    body = b"x" * (wire.target.settings.body_bytes + 50_000)
    status, found = wire.ask("POST /v1/attributions HTTP/1.1", f"Content-Length: {len(body)}", body=body)
    assert status == 413 and b"a body has at most" in found


@pytest.mark.parametrize("begun", [b"", b'{"query"'])
def test_a_body_that_stops_coming_is_given_up(wire: Wire, begun: bytes) -> None:
    head = b"POST /v1/attributions HTTP/1.1\r\n" + wire.head + b"Content-Length: 1000\r\n\r\n"
    found = wire.send(head + begun)
    assert read_status(found) == 408


def test_whoever_waits_to_be_told_to_go_on_is_refused_first(wire: Wire) -> None:
    head = b"POST /v1/attributions HTTP/1.1\r\n" + wire.head.replace(b"Bearer imprint_", b"Bearer imprint-")
    found = wire.send(head + b"Expect: 100-continue\r\nContent-Length: 10\r\n\r\n")
    assert read_status(found) == 401


def test_connections_that_say_nothing_keep_nobody_out(wire: Wire) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE))
            silent.sendall(b"GET /v1/store HTTP/1.1\r\nHost: ")
        assert wire.is_alive()


def test_pipelined_requests_are_answered_in_order_each_for_its_own_key(wire: Wire) -> None:
    other = wire.target.held.keys["publisher"].encode()
    one = b"GET /v1/sources HTTP/1.1\r\n" + wire.head + b"\r\n"
    two = b"GET /v1/sources HTTP/1.1\r\n" + wire.head.replace(wire.secret.encode(), other) + b"\r\n"
    three = b"GET /v1/sources HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    found = wire.send(one + two + three).split(b"HTTP/1.1 ")[1:]
    assert [each[:3] for each in found] == [b"200", b"200", b"401"]
    assert b"publisher-5" in found[0] and b"publisher-5" not in found[1]


@pytest.mark.parametrize("begun", [b"", b"G", b"GET /v1/store HTTP/1.1\r\nHost: 127.0"])
def test_a_connection_without_a_request_is_closed(wire: Wire, begun: bytes) -> None:
    assert wire.send(begun) == b""


def test_a_connection_that_says_nothing_after_a_request_is_closed(wire: Wire) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", wire.port, timeout=PATIENCE)
    for _ in range(2):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read() == b'{"status":"alive"}'
    connection.sock.sendall(b"GET /")
    assert receive_all(connection.sock) == b""


@contextlib.contextmanager
def stall(wire: Wire) -> Iterator[socket.socket]:
    """Ask for far more than is read."""
    (style,) = re.findall(rb"/static/\w+/pages\.css", wire.ask("GET /login HTTP/1.1")[1])
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", wire.port))
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                connection.send(600 * (b"GET " + style + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"))
        yield connection


def is_reset(connection: socket.socket) -> bool:
    """Wait until the server resets a connection; read nothing of it."""
    poll = select.poll()
    poll.register(connection, 0)
    return bool(poll.poll(1000 * PATIENCE))


def test_whoever_does_not_read_the_answers_is_cut_off(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", 0.2)
    with stall(wire) as connection:
        assert is_reset(connection)


def test_whoever_does_not_read_does_not_keep_the_service_from_ending(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", 1e6)
    monkeypatch.setattr(connections, "LAST_SECONDS", 0.2)
    wire.server.config.timeout_graceful_shutdown = None  # it would wait for as long as it takes
    with stall(wire) as connection:
        wire.server.should_exit = True
        assert is_reset(connection)


def test_an_address_has_its_share_of_the_connections(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1e6)
    monkeypatch.setattr(connections, "_SHARE", 20)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE))
        found = wire.send()
        assert read_status(found) == 503 and found.endswith(b"this address has too many connections: close others.")
    while wire.server.server_state.connections:  # the others were closed, and have left
        pass


def test_many_who_leave_at_once_do_no_harm(wire: Wire) -> None:
    body = json.dumps({"queries": [{"values": [0.1, 0.2, 0.3, 0.4]}] * 20}).encode()
    kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    request = b"POST /v1/attributions HTTP/1.1\r\n" + wire.head + kind + body

    def leave() -> None:
        with socket.create_connection(("127.0.0.1", wire.port), timeout=PATIENCE) as connection:
            connection.sendall(request)

    run_together([leave] * 30)


def run_together(functions: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
