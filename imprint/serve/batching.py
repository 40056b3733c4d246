"""Reads the queries of concurrent requests together, in the one thread that computes.

A request waits in a bounded queue. Whatever waits when the thread is free is read at once: nobody waits for others to
come, and the busier the service, the larger the batches. Callers take turns, by queries: whoever asks a lot waits
behind whoever asks a little, and gives way where the queue is full. If some query of a batch fails, its requests are
read one by one, so that nobody's error is somebody else's.
"""

import asyncio
import math
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_SMOOTHING = 0.2  # of the measured seconds per query
_SHORTEST, _LONGEST = 1, 60  # seconds after which a refused request is told to try again


class Overloaded(Exception):
    """Too many queries wait. retry_after: seconds after which there may be room."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many queries are waiting: try again in {retry_after} s.")
        self.retry_after = retry_after


class DeadlinePassed(Exception):
    """A request was not answered in time, and given up."""


class Unwanted(Exception):
    """Nobody waits any more for what is being read."""


class Closing(Exception):
    """The service is shutting down, and accepts no more."""


@dataclass(eq=False)
class _Request(Generic[Q, R]):
    """Queries that were asked together, or a function to run in turn with them."""

    queries: Sequence[Q]
    deadline: float
    function: Callable[[], Any] | None = None
    future: "Future[Any]" = field(default_factory=Future)
    asked: float = field(default_factory=time.monotonic)
    caller: str = ""
    turn: int = 0

    @property
    def size(self) -> int:
        return len(self.queries) or 1


@dataclass(frozen=True)
class Read(Generic[R]):
    """What was read for a request, the seconds that it waited, and those that reading its batch took."""

    result: R
    waited: float
    seconds: float


class Batcher(Generic[Q, R]):
    """One thread that reads queries in batches, and runs functions in turn with them.

    read: reads the queries of several requests; returns a result for each request.
    fits: whether a further query may join those of a batch, such as one of a similar length.
    most: queries of a batch. waiting: queries that may wait.
    """

    def __init__(
        self,
        read: Callable[[Sequence[Sequence[Q]]], Sequence[R]],
        *,
        most: int,
        waiting: int,
        fits: Callable[[Sequence[Q], Sequence[Q]], bool] = lambda batch, more: True,
        observe: Callable[[int, float], None] = lambda count, seconds: None,
    ) -> None:
        self._read, self._fits, self._observe = read, fits, observe
        self._most, self._waiting = most, waiting
        self._queue: deque[_Request[Q, R]] = deque()
        self._changed, self._closing, self._busy = threading.Condition(), False, 0
        self._turn, self._next = 0, dict[str, int]()  # of whom was read last; of the next request of each caller
        self._reading: Sequence[_Request[Q, R]] = ()
        self._pace = 0.0  # seconds per query, smoothed
        self._thread = threading.Thread(target=self._work, name="imprint-readout", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """How many queries wait or are being read."""
        with self._changed:
            return sum(len(request.queries) for request in self._queue) + self._busy

    @property
    def alive(self) -> bool:
        """Whether the thread is there, and more is accepted."""
        with self._changed:
            return self._thread.is_alive() and not self._closing

    async def submit(self, queries: Sequence[Q], timeout: float, caller: str = "") -> Read[R]:
        """Return what is read for some queries; refuse them if too many wait already."""
        request = _Request[Q, R](queries, time.monotonic() + timeout, caller=caller)
        self._enqueue(request)
        return await self._wait_for(request, timeout)  # type: ignore[no-any-return]

    async def run(self, function: Callable[[], T], timeout: float | None = None) -> T:
        """Return what a function returns that is run in turn with the readouts."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        request = _Request[Q, R]((), deadline, function)
        self._enqueue(request)
        return await self._wait_for(request, timeout)  # type: ignore[no-any-return]

    def check_wanted(self) -> None:
        """End the readout that calls this, with an error, if everybody has given up who asked for it."""
        now = time.monotonic()
        if self._reading and not any(_is_wanted(request, now) for request in self._reading):
            raise Unwanted

    async def _wait_for(self, request: _Request[Q, R], timeout: float | None) -> Any:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(request.future), timeout)
        except TimeoutError as error:
            raise DeadlinePassed from error

    def _enqueue(self, request: _Request[Q, R]) -> None:
        """Let a request wait, before those of callers who have asked more since nobody waited."""
        with self._changed:
            if self._closing:
                raise Closing
            if not self._queue and not self._busy:
                self._next.clear()
            request.turn = max(self._turn, self._next.get(request.caller, 0))
            self._make_room(request)
            self._next[request.caller] = request.turn + request.size
            insort(self._queue, request, key=lambda each: each.turn)
            self._changed.notify_all()

    def _make_room(self, request: _Request[Q, R]) -> None:
        """Refuse those whose turn is last until a request fits; if it comes after them, refuse it."""
        waiting = sum(each.size for each in self._queue)
        seconds = round(self._pace * (waiting + self._busy))
        refusal = Overloaded(min(max(seconds, _SHORTEST), _LONGEST))
        excess, last = waiting + request.size - self._waiting, list[_Request[Q, R]]()
        for each in reversed(self._queue):
            if excess <= sum(other.size for other in last) or each.turn <= request.turn:
                break
            last.append(each)
        if excess > sum(other.size for other in last):
            raise refusal
        for each in last:
            self._queue.remove(each)
            self._next[each.caller] = each.turn
            _finish(each.future, error=refusal)

    def close(self, timeout: float | None = None) -> None:
        """Accept no more, and return once everything that was accepted is finished."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            if batch[0].function is not None:
                _settle(batch[0], batch[0].function)
            else:
                self._read_batch(batch)
            with self._changed:
                self._busy = 0

    def _take(self) -> list[_Request[Q, R]] | None:
        """Wait for requests, and return those that are read together; None once there will be no more."""
        with self._changed:
            while True:
                now = time.monotonic()
                while self._queue and _is_given_up(self._queue[0], now):
                    self._queue.popleft()
                if self._queue:
                    break
                if self._closing:
                    return None
                self._changed.wait()
            batch = [self._queue.popleft()]
            self._turn = batch[0].turn
            queries = list(batch[0].queries)
            while batch[0].function is None and self._queue:
                after = self._queue[0]
                if _is_given_up(after, now):
                    self._queue.popleft()
                    continue
                too_many = len(queries) + len(after.queries) > self._most
                if after.function is not None or too_many or not self._fits(queries, after.queries):
                    break
                batch.append(self._queue.popleft())
                queries += after.queries
            self._busy = len(queries)
            return batch

    def _read_batch(self, batch: list[_Request[Q, R]]) -> None:
        began, self._reading = time.monotonic(), batch
        try:
            results = self._read([request.queries for request in batch])
        except Exception as error:
            if len(batch) == 1:
                _finish(batch[0].future, error=DeadlinePassed() if isinstance(error, Unwanted) else error)
            for request in batch if len(batch) > 1 else []:
                if not _is_given_up(request, time.monotonic()):
                    self._read_batch([request])
            return
        finally:
            self._reading = ()
        seconds, count = time.monotonic() - began, sum(len(request.queries) for request in batch)
        self._observe(count, seconds)
        pace = seconds / count
        self._pace = pace if not self._pace else (1 - _SMOOTHING) * self._pace + _SMOOTHING * pace
        for request, result in zip(batch, results, strict=True):
            _finish(request.future, Read(result, began - request.asked, seconds))


def _is_wanted(request: _Request[Any, Any], now: float) -> bool:
    return not request.future.cancelled() and now < request.deadline


def _is_given_up(request: _Request[Any, Any], now: float) -> bool:
    """Tell whether nobody waits for a request any more; if its time is over, say so."""
    if _is_wanted(request, now):
        return False
    if not request.future.cancelled():
        _finish(request.future, error=DeadlinePassed())
    return True


def _settle(request: _Request[Any, Any], function: Callable[[], Any]) -> None:
    if request.future.cancelled():
        return
    try:
        result = function()
    except Exception as error:
        _finish(request.future, error=error)
    else:
        _finish(request.future, result)


def _finish(future: "Future[Any]", result: Any = None, error: Exception | None = None) -> None:
    """Answer whoever waits, if anybody still does."""
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
