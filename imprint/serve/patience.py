"""Connections that do not keep others out: one on which no request arrives in time is closed.

uvicorn waits for a request as long as it takes. Whoever opens a thousand connections and says nothing, or a byte a
minute, would fill a service for good.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 15.0  # in which the head of a request has to arrive, from the connection or its first byte on


class ImpatientProtocol(H11Protocol):
    """HTTP as uvicorn speaks it, with a time limit for the head of each request."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
