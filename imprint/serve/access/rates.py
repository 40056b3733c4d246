"""Limits how often somebody may do something: token buckets, and a bounded number of them."""

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from ipaddress import IPv6Address, ip_address

_MOST = 10_000  # buckets; beyond, those are dropped that nobody has taken from for the longest time


class Buckets:
    """A bucket for everybody who is counted apart: it holds `burst` tokens, and `rate` flow in per second."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, max(1.0, burst), clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, whose: Hashable) -> float:
        """Take a token, and return 0; or return the seconds until there will be one."""
        if wait := self.wait(whose):
            return wait
        self._buckets[whose] = self._level(whose) - 1, self._clock()
        self._buckets.move_to_end(whose)
        while len(self._buckets) > _MOST:
            self._buckets.popitem(last=False)
        return 0.0

    def wait(self, whose: Hashable) -> float:
        """Return the seconds until there will be a token: 0 if there is one."""
        missing = 1 - self._level(whose)
        return missing / self._rate if missing > 1e-9 else 0.0

    def _level(self, whose: Hashable) -> float:
        level, then = self._buckets.get(whose, (self._burst, self._clock()))
        return min(self._burst, level + (self._clock() - then) * self._rate)

    def __len__(self) -> int:
        return len(self._buckets)


def name_network(address: str | None) -> str:
    """Return what is counted as one address: of IPv6 the network of a subscriber, who has 2⁶⁴ addresses.

    >>> name_network("127.0.0.1"), name_network("2001:db8:1:2:3::4")
    ('127.0.0.1', '2001:db8:1:2::')
    """
    try:
        found = ip_address(address or "")
    except ValueError:
        return "unknown"
    if isinstance(found, IPv6Address) and found.ipv4_mapped is None:
        return str(IPv6Address(int(found) >> 64 << 64))
    return str(found)
