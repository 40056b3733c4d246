"""Threads of their own for what waits for a database, so that one that is locked or away stalls nothing else.

Credits, keys and readiness have some each (`Service`, `Access`, `imprint.serve.api.health`).
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from imprint.serve.batching import Closing, Overloaded

T = TypeVar("T")
_RETRY = 5  # seconds after which somebody is told to come back: a database that is locked is rarely so for longer


class Unanswered(Exception):
    """A function did not return in time. It may still do what it was to do, unless it had not begun."""


class Workers:
    """A few threads with a queue. threads: that run at once. waiting: how many functions may wait for one."""

    def __init__(self, name: str, threads: int, waiting: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"imprint-{name}")
        self._most, self._count, self._lock = threads + waiting, 0, threading.Lock()

    def require_room(self) -> None:
        """Refuse if as many functions wait as may."""
        with self._lock:
            if self._count >= self._most:
                raise Overloaded(_RETRY)

    async def run(self, function: Callable[..., T], *arguments: object, timeout: float) -> T:
        """Return what a function returns, or give up waiting for it; what has not begun by then never does."""
        with self._lock:
            self._count += 1
        try:
            future = self._pool.submit(copy_context().run, function, *arguments)
        except RuntimeError as error:
            self._forget()
            raise Closing from error
        future.add_done_callback(self._forget)
        answered = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([answered], timeout=timeout)
        finally:
            answered.cancel()  # which a function that runs, or has returned, does not notice
        if not done:
            raise Unanswered
        return answered.result()

    def _forget(self, _: object = None) -> None:
        with self._lock:
            self._count -= 1

    def close(self) -> None:
        """Accept no more, and return once everything that was accepted is finished."""
        self._pool.shutdown()
