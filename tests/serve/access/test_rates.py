"""Rates: bursts are allowed, then as many as flow in; nobody is limited by others, and memory is bounded."""

import pytest

from imprint.serve.access import rates
from imprint.serve.access.rates import Buckets, name_network


class Seconds:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_and_then_the_rate() -> None:
    clock = Seconds()
    buckets = Buckets(2, 4, clock)
    assert [buckets.take("a") for _ in range(4)] == [0.0] * 4
    assert buckets.take("a") == pytest.approx(0.5)
    clock.now += 0.5
    assert buckets.wait("a") == 0 and buckets.take("a") == 0 and buckets.take("a") == pytest.approx(0.5)
    clock.now += 1000
    assert [buckets.take("a") == 0 for _ in range(5)] == [True] * 4 + [False]


def test_whoever_is_refused_loses_nothing_by_asking() -> None:
    clock = Seconds()
    buckets = Buckets(1, 1, clock)
    buckets.take("a")
    for _ in range(100):
        assert buckets.take("a") > 0
    clock.now += 1
    assert buckets.take("a") == 0


def test_nobody_pays_for_others() -> None:
    buckets = Buckets(1, 1, Seconds())
    assert buckets.take("a") == 0 and buckets.take("a") > 0 and buckets.take("b") == 0


def test_a_rate_below_one_still_lets_one_through() -> None:
    buckets = Buckets(0.01, 0.02, Seconds())
    assert buckets.take("a") == 0 and buckets.take("a") == pytest.approx(100)


def test_there_are_so_many_buckets_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_MOST", 10)
    buckets = Buckets(1, 1, Seconds())
    for number in range(1000):
        buckets.take(number)
    assert len(buckets) == 10 and buckets.take(999) > 0 and buckets.take(0) == 0


def test_an_address_is_counted_by_its_network() -> None:
    assert name_network("2001:db8::1") == name_network("2001:db8::ffff:1") != name_network("2001:db8:0:1::1")
    assert name_network("10.0.0.1") != name_network("10.0.0.2")
    assert name_network("::ffff:10.0.0.1") != name_network("::ffff:10.0.0.2")
    assert name_network(None) == name_network("testclient") == "unknown"
