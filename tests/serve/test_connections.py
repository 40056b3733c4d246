"""Slow readers are waited for, those who do not read are not, and each address has its share of the connections."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from uvicorn.server import ServerState

from imprint.serve import connections
from imprint.serve.connections import LimitedProtocol
from imprint.serve.running import configure
from imprint.serve.settings import Settings

KIB = 1 << 10


class Loop:
    """Keeps the one timer that was set last."""

    def __init__(self) -> None:
        self.timer: tuple[float, Callable[[], None]] | None = None

    def call_later(self, seconds: float, function: Callable[..., None], *given: Any) -> "Loop":
        self.timer = seconds, lambda: function(*given)
        return self

    def cancel(self) -> None:
        self.timer = None

    def fire(self) -> float:
        assert self.timer is not None
        (seconds, function), self.timer = self.timer, None
        function()
        return seconds


class Transport:
    """A connection from an address, of which so many bytes were not read yet."""

    def __init__(self, address: str) -> None:
        self.address, self.size, self.state, self.written = address, 0, "open", b""

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self, "peername": (self.address, 1), "sockname": ("127.0.0.1", 80)}.get(name)

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.size

    def close(self) -> None:
        self.state = "closed"

    def abort(self) -> None:
        self.state = "aborted"

    def ignore(self, *_: Any, **__: Any) -> None: ...

    family = socket.AF_INET
    set_write_buffer_limits = setsockopt = ignore

    def getpeername(self) -> tuple[str, int]:
        return self.address, 1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def connect(loop: Loop) -> Callable[..., tuple[LimitedProtocol, Transport]]:
    state = ServerState()

    def connect(address: str = "192.0.2.1", *proxies: str) -> tuple[LimitedProtocol, Transport]:
        config = configure(FastAPI(), Settings(proxies=proxies))
        config.load()
        make: Callable[..., Any] = config.http_protocol_class
        made, transport = make(config, state, {}, loop), Transport(address)
        made.connection_made(transport)
        return made, transport

    return connect


Connect = Callable[..., tuple[LimitedProtocol, Transport]]


def test_whoever_reads_slowly_is_waited_for_and_whoever_stops_is_not(loop: Loop, connect: Connect) -> None:
    protocol, transport = connect()
    transport.size = 1000 * KIB
    protocol.pause_writing()
    for left in (960, 900, 868):
        transport.size = left * KIB
        assert loop.fire() == connections.READING_SECONDS and transport.state == "open"
    transport.size -= 31 * KIB
    loop.fire()
    assert transport.state == "aborted"


def test_whoever_has_read_everything_is_not_looked_at(loop: Loop, connect: Connect) -> None:
    protocol, transport = connect()
    transport.size = KIB
    protocol.pause_writing()
    protocol.resume_writing()
    assert loop.timer is None and transport.state == "open"


def test_at_the_end_whoever_does_not_read_is_given_less_time(loop: Loop, connect: Connect) -> None:
    protocol, transport = connect()
    transport.size = KIB
    protocol.pause_writing()
    protocol.shutdown()
    assert loop.fire() == connections.LAST_SECONDS and transport.state == "aborted"
    late, _ = connect()
    late.shutdown()
    late.pause_writing()
    assert loop.fire() == connections.LAST_SECONDS


@pytest.mark.parametrize("others", ["192.0.2.1", "2001:db8::1"])
def test_an_address_has_its_share_of_the_connections(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(connections, "_SHARE", 2)
    places = [others, others.replace("::1", "::2"), others]
    assert [connect(place)[1].state for place in places] == ["open", "open", "closed"]
    assert connect("198.51.100.1")[1].state == "open"


@pytest.mark.parametrize("proxy", ["192.0.2.1", "192.0.2.0/24", "*"])
def test_connections_of_a_proxy_are_not_those_of_one_address(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setattr(connections, "_SHARE", 2)
    assert {connect("192.0.2.1", "proxy.internal", proxy)[1].state for _ in range(5)} == {"open"}
