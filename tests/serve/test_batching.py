"""Concurrent requests share a readout, nobody waits for more than is there, and nothing that was accepted is lost."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from imprint.serve.batching import Batcher, Closing, DeadlinePassed, Overloaded


class Gate:
    """Reads numbers by squaring them, once it is opened; keeps the batches that it was given."""

    def __init__(self) -> None:
        self.open, self.entered, self.batches = threading.Event(), threading.Semaphore(0), list[list[list[int]]]()

    def read(self, requests: Sequence[Sequence[int]]) -> list[list[int]]:
        self.batches.append([list(each) for each in requests])
        self.entered.release()
        assert self.open.wait(60)
        if any(query < 0 for request in requests for query in request):
            raise ValueError("no root")
        return [[query * query for query in request] for request in requests]


async def wait_until_reading(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.acquire, True, 60)


def test_what_waits_is_read_together_and_everybody_gets_their_own() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=10, waiting=100)

    async def run() -> list[list[int]]:
        first = asyncio.create_task(batcher.submit([1], 60))
        await wait_until_reading(gate)
        others = [asyncio.create_task(batcher.submit([n, n + 1], 60)) for n in (2, 4, 6)]
        await asyncio.sleep(0)
        gate.open.set()
        return [(await each).result for each in (first, *others)]

    assert asyncio.run(run()) == [[1], [4, 9], [16, 25], [36, 49]]
    assert gate.batches == [[[1]], [[2, 3], [4, 5], [6, 7]]]
    batcher.close()


def test_no_batch_is_larger_than_allowed_and_requests_are_not_split() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=4, waiting=100)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60))
        await wait_until_reading(gate)
        others = [asyncio.create_task(batcher.submit([1, 2, 3], 60)) for _ in range(3)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert [len(batch) for batch in gate.batches] == [1, 1, 1, 1]
    batcher.close()


def test_queries_that_do_not_fit_together_are_read_apart() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=10, waiting=100, fits=lambda batch, more: batch[0] == more[0])

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60))
        await wait_until_reading(gate)
        others = [asyncio.create_task(batcher.submit([n], 60)) for n in (1, 1, 2)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert gate.batches[1:] == [[[1], [1]], [[2]]]
    batcher.close()


def test_an_error_is_that_of_its_own_request_alone() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=10, waiting=100)

    async def run() -> list[object]:
        first = asyncio.create_task(batcher.submit([0], 60))
        await wait_until_reading(gate)
        others = [asyncio.create_task(batcher.submit([n], 60)) for n in (2, -1, 3)]
        await asyncio.sleep(0)
        gate.open.set()
        await first
        return await asyncio.gather(*others, return_exceptions=True)

    good, bad, fine = asyncio.run(run())
    assert isinstance(bad, ValueError)
    assert [getattr(each, "result", None) for each in (good, fine)] == [[4], [9]]
    batcher.close()


def test_more_than_may_wait_is_refused_at_once_with_a_time_to_come_back() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=2, waiting=3)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60))
        await wait_until_reading(gate)
        waiting = asyncio.create_task(batcher.submit([1, 2], 60))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await batcher.submit([3, 4], 60)
        assert 1 <= refused.value.retry_after <= 60
        gate.open.set()
        assert (await waiting).result == [1, 4]
        await first

    asyncio.run(run())
    batcher.close()


def test_callers_take_turns_by_queries() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=4, waiting=100)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60, "much"))
        await wait_until_reading(gate)
        others = [asyncio.create_task(batcher.submit([n] * 4, 60, "much")) for n in (1, 2, 3)]
        others += [asyncio.create_task(batcher.submit([n], 60, "little")) for n in (7, 8)]
        others += [asyncio.create_task(batcher.submit([9], 60, "once"))]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *others)

    asyncio.run(run())
    assert gate.batches == [[[0]], [[7], [9]], [[1] * 4], [[8]], [[2] * 4], [[3] * 4]]
    batcher.close()


def test_where_the_queue_is_full_whoever_asked_most_gives_way() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=2, waiting=4)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60, "much"))
        await wait_until_reading(gate)
        waiting = [asyncio.create_task(batcher.submit([n, n], 60, "much")) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await batcher.submit([3, 3], 60, "much")
        other = asyncio.create_task(batcher.submit([4], 60, "other"))
        with pytest.raises(Overloaded):
            await waiting[1]
        with pytest.raises(Overloaded):  # which would not fit if all gave way who may
            await batcher.submit([5, 5, 5], 60, "other")
        gate.open.set()
        assert [(await each).result for each in (first, other, waiting[0])] == [[0], [16], [1, 1]]

    asyncio.run(run())
    batcher.close()


def test_a_request_that_is_given_up_is_not_read() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=2, waiting=10)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([0], 60))
        await wait_until_reading(gate)
        with pytest.raises(DeadlinePassed):
            await batcher.submit([1], 0.01)
        gate.open.set()
        await first
        assert (await batcher.submit([2], 60)).result == [4]

    asyncio.run(run())
    assert gate.batches == [[[0]], [[2]]]
    batcher.close()


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    gate = Gate()
    batcher = Batcher[int, list[int]](gate.read, most=2, waiting=10)

    async def run() -> None:
        first = asyncio.create_task(batcher.submit([1], 60))
        await wait_until_reading(gate)
        second = asyncio.create_task(batcher.submit([2], 60))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        while batcher.alive:
            await asyncio.sleep(0)
        with pytest.raises(Closing):
            await batcher.submit([3], 60)
        gate.open.set()
        assert (await first).result == [1] and (await second).result == [4]
        await closing

    asyncio.run(run())


def test_functions_run_in_turn_with_readouts_in_the_same_thread() -> None:
    gate = Gate()
    gate.open.set()
    batcher = Batcher[int, list[int]](gate.read, most=2, waiting=10)
    names = {asyncio.run(batcher.run(lambda: threading.current_thread().name)) for _ in range(2)}
    assert names == {"imprint-readout"}

    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(batcher.run(fail))
    assert asyncio.run(batcher.submit([3], 60)).result == [9]
    batcher.close()


class Steps:
    """Reads in steps, each of which is let through, and asks before each whether somebody still waits."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.batcher = Batcher[int, int](self.read, most=10, waiting=100)
        self.steps = 0

    def read(self, requests: Sequence[Sequence[int]]) -> list[int]:
        for _ in range(3):
            self.begun.release()
            assert self.go_on.acquire(timeout=60)
            self.batcher.check_wanted()
            self.steps += 1
        return [sum(request) for request in requests]


def test_reading_ends_once_nobody_waits_for_it() -> None:
    steps = Steps()

    async def run() -> None:
        request = asyncio.create_task(steps.batcher.submit([1], 60))
        await asyncio.to_thread(steps.begun.acquire, True, 60)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        for _ in range(4):
            steps.go_on.release()
        assert (await steps.batcher.submit([2], 60)).result == 2

    asyncio.run(run())
    assert steps.steps == 3  # none of them for the first
    steps.batcher.close()


def test_reading_goes_on_while_one_of_several_waits() -> None:
    steps = Steps()

    async def run() -> int:
        first = asyncio.create_task(steps.batcher.submit([1], 60))
        await asyncio.to_thread(steps.begun.acquire, True, 60)
        others = [asyncio.create_task(steps.batcher.submit([n], 60)) for n in (2, 3)]
        await asyncio.sleep(0)
        for _ in range(3):
            steps.go_on.release()
        await first
        for _ in range(3):
            await asyncio.to_thread(steps.begun.acquire, True, 60)
        others[0].cancel()
        await asyncio.sleep(0)
        for _ in range(3):
            steps.go_on.release()
        return (await others[1]).result

    assert asyncio.run(run()) == 3 and steps.steps == 6
    steps.batcher.close()
