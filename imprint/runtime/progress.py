"""Progress on anything that lasts: one line on standard error, with rate and time left."""

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO, runtime_checkable

_TELLING = 0.05  # the share of the work from which on the time left means something, or
_LONG = 30.0  # seconds since the first of it


class Advance(Protocol):
    """Told how far a long computation has come."""

    def __call__(self, done: int, total: int, /) -> None: ...


@runtime_checkable
class Announcing(Protocol):
    """Told what a long computation is doing, too."""

    def announce(self, phase: str, /) -> None: ...


class Progress:
    """Counts up to `total` and shows it once two seconds have passed.

    show: True for the line on standard error, False for silence, or a function of (done, total); one that has a method
        `announce(phase)` is told of phases too.

    The rate is that of the units after the first, which take longer than others: what comes before is preparation.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        show: bool | Advance = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done = self._skipped = 0
        self._phase = ""
        self._tell = show if callable(show) else None
        self._stream = (stream or sys.stderr) if show is True else None
        self._clock = clock
        self._start = self._last = self._begun = clock()
        self._first: tuple[float, int] | None = None  # when the first units were done, and how many
        self._shown = False

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        self.done += count
        if count:
            self._phase = ""
        if self._tell:
            self._tell(self.done, self.total)
        self._report()
        if self._first is None and self.done > self._skipped:
            self._first = self._clock(), self.done - self._skipped

    def skip(self, count: int) -> None:
        """`count` units were done by an earlier run: they do not count for the rate."""
        self._skipped += count
        self.advance(count)

    def announce(self, phase: str) -> None:
        """Say what is done now that no units count, such as "measuring, step 3 of 44"; the next units end it."""
        self._phase = phase
        if self._first is None:
            self._begun = self._clock()
        if isinstance(self._tell, Announcing):
            self._tell.announce(phase)
        self._report()

    def close(self) -> None:
        """Leave the line as it stands."""
        if self._stream is not None and self._shown and self._stream.isatty():
            self._stream.write(f"\r{self._line(self._clock())}\033[K\n")

    def _report(self) -> None:
        """Renew the line if it is old enough."""
        if self._stream is None:
            return
        now = self._clock()
        interactive = self._stream.isatty()
        if now - self._start >= 2 and now - self._last >= (0.2 if interactive else 10):
            self._last, self._shown = now, True
            self._stream.write(f"\r{self._line(now)}\033[K" if interactive else f"{self._line(now)}\n")
            self._stream.flush()

    def _line(self, now: float) -> str:
        elapsed = f"{format_duration(now - self._start)} elapsed"
        rate = self._find_rate(now)
        if not rate:
            return f"{self.label}: {self._phase or 'preparing'}, {elapsed}"
        reached = f"{self.label}: {100 * self.done / max(self.total, 1):.0f}% of {self.total:,} {self.unit}"
        if self._phase:
            return f"{reached}, {self._phase}, {elapsed}"
        left = (self.total - self.done) / rate
        made = (self.done - self._skipped) / max(self.total - self._skipped, 1)
        told = made >= _TELLING or (self._first is not None and now - self._first[0] >= _LONG)
        return f"{reached}, {_format_rate(rate)}, {elapsed}" + f", {format_duration(left)} left" * told

    def _find_rate(self, now: float) -> float:
        """Return the units per second; 0 where none are done."""
        made, (begun, before) = self.done - self._skipped, self._first or (self._begun, 0)
        if made == before:  # the first ones, now
            begun, before = self._begun, 0
        return (made - before) / max(now - begun, 1e-9)


def _format_rate(rate: float) -> str:
    """Format units per second, or how long one takes where that is a second or more."""
    if rate > 1:
        return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
    seconds = 1 / rate
    return f"{format_duration(seconds)} each" if seconds >= 60 else f"{seconds:.2g} s each"


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, as on a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
