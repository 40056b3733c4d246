"""What waits for a database has threads and bounds of its own, and what was begun is finished."""

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from imprint.serve.batching import Closing, Overloaded
from imprint.serve.workers import Unanswered, Workers

PATIENCE = 60.0
name: ContextVar[str] = ContextVar("name", default="nobody")


class Gate:
    """A function that does not return before it is opened."""

    def __init__(self) -> None:
        self.open, self.entered, self.done = threading.Event(), threading.Semaphore(0), list[int]()

    def __call__(self, number: int) -> int:
        self.entered.release()
        assert self.open.wait(PATIENCE)
        self.done.append(number)
        return number


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


def test_as_many_run_and_wait_as_may_and_the_next_is_told_when_to_come_back(gate: Gate) -> None:
    workers = Workers("test", threads=1, waiting=2)

    async def run() -> list[int]:
        tasks = []
        for number in range(3):
            workers.require_room()
            tasks.append(asyncio.create_task(workers.run(gate, number, timeout=PATIENCE)))
            await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            workers.require_room()
        assert 1 <= refused.value.retry_after <= 60
        gate.open.set()
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [0, 1, 2]
    workers.require_room()
    workers.close()


def test_what_has_begun_is_finished_after_everybody_gave_up_and_what_has_not_never_begins(gate: Gate) -> None:
    workers = Workers("test", threads=1, waiting=9)

    async def run() -> None:
        first = asyncio.create_task(workers.run(gate, 1, timeout=0.01))
        await asyncio.to_thread(gate.entered.acquire)
        with pytest.raises(Unanswered):
            await workers.run(gate, 2, timeout=0.01)
        with pytest.raises(Unanswered):
            await first

    asyncio.run(run())
    gate.open.set()
    workers.close()
    assert gate.done == [1]
    workers.require_room()


def test_closing_finishes_what_was_accepted_and_refuses_the_rest(gate: Gate) -> None:
    workers = Workers("test", threads=1, waiting=9)

    async def run() -> list[int]:
        tasks = [asyncio.create_task(workers.run(gate, number, timeout=PATIENCE)) for number in range(3)]
        await asyncio.to_thread(gate.entered.acquire)
        gate.open.set()
        await asyncio.to_thread(workers.close)
        with pytest.raises(Closing):
            await workers.run(gate, 9, timeout=PATIENCE)
        return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == gate.done == [0, 1, 2]


def test_errors_and_the_context_of_a_request_are_passed_on() -> None:
    workers = Workers("test", threads=1, waiting=9)

    def fail() -> None:
        raise KeyError(name.get())

    async def run() -> None:
        name.set("a request")
        with pytest.raises(KeyError, match="a request"):
            await workers.run(fail, timeout=PATIENCE)

    asyncio.run(run())
    workers.close()
