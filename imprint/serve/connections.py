"""Connections that do not keep others out: whoever sends no request in time, or does not read answers, is cut off.

uvicorn waits for both as long as it takes. Whoever opens a thousand connections and says nothing, or a byte a minute,
or asks for more than they read, would fill a service for good. That takes many addresses, too: each has its share of
the connections.
"""

import asyncio
import socket
import struct
from ipaddress import ip_address, ip_network
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from imprint.serve.access.rates import name_network

HEAD_SECONDS = 15.0  # in which the head of a request has to arrive, from the connection or its first byte on
READING_SECONDS = 30.0  # in which so much of an answer has to be read: 32 KiB, or all that is left
LAST_SECONDS = 5.0  # the same, once the service was told to stop
_READ, _UNSENT = 32 << 10, 16 << 10
_SHARE = 250  # connections of one address, of the thousand there may be
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 52\r\n"
    b"Retry-After: 5\r\nConnection: close\r\n\r\nthis address has too many connections: close others."
)
_RESET = struct.pack("ii", 1, 0)  # of a socket: forget what is still to be sent


class LimitedProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with time limits for the head of each request, and for reading the answers.

    proxies: addresses whose connections are those of many, and not counted.
    """

    proxies: tuple[str, ...] = ()
    _timer: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _network = ""
    _left = 0  # bytes that the other side had not read when somebody last looked
    _stopping = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that one learns of every byte that is not read …
        found: socket.socket = transport.get_extra_info("socket")
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)  # … and the system holds few back
        address = None if self.client is None else self.client[0]
        self._network = "" if _is_among(address, self.proxies) else name_network(address)
        if self._network and sum(getattr(each, "_network", "") == self._network for each in self.connections) > _SHARE:
            transport.write(_FULL)
            transport.close()
            return
        self._timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self.cycle is None or self.cycle.response_complete
        if not waiting:
            self._stop_waiting()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Note that the other side does not read as fast as it is answered: nothing is written until it has."""
        super().pause_writing()
        self._look_in(LAST_SECONDS if self._stopping else READING_SECONDS)

    def resume_writing(self) -> None:
        self._stop_looking()
        super().resume_writing()

    def shutdown(self) -> None:
        super().shutdown()
        self._stopping = True
        if self._reading is not None:
            self._look_in(LAST_SECONDS)

    def _look_in(self, seconds: float) -> None:
        """Look later whether the other side has read some of what is left."""
        self._stop_looking()
        self._left = self.transport.get_write_buffer_size()
        self._reading = self.loop.call_later(seconds, self._look, seconds)

    def _look(self, seconds: float) -> None:
        if self._left - self.transport.get_write_buffer_size() >= _READ:
            self._look_in(seconds)
            return
        found: socket.socket = self.transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_looking(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def _is_among(address: str | None, proxies: tuple[str, ...]) -> bool:
    return any(each in ("*", address) or _is_within(address, each) for each in proxies)


def _is_within(address: str | None, network: str) -> bool:
    try:
        return ip_address(address or "") in ip_network(network, strict=False)
    except ValueError:  # a proxy that is given by a name
        return False
