"""Progress on anything that lasts: one line on standard error, with rate and time left."""

import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO


class Advance(Protocol):
    """Told how far a long computation has come."""

    def __call__(self, done: int, total: int, /) -> None: ...


class Progress:
    """Counts up to `total` and shows it once two seconds have passed.

    show: True for the line on standard error, False for silence, or a function of (done, total).
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
        self._tell = show if callable(show) else None
        self._stream = (stream or sys.stderr) if show is True else None
        self._clock = clock
        self._start = self._last = clock()
        self._shown = False

    def advance(self, count: int = 1) -> None:
        """`count` more units are done."""
        self.done += count
        if self._tell:
            self._tell(self.done, self.total)
        if self._stream is None:
            return
        now = self._clock()
        interactive = self._stream.isatty()
        if now - self._start >= 2 and now - self._last >= (0.2 if interactive else 10):
            self._last, self._shown = now, True
            self._stream.write(f"\r{self._line(now)}\033[K" if interactive else f"{self._line(now)}\n")
            self._stream.flush()

    def skip(self, count: int) -> None:
        """`count` units were done by an earlier run: they do not count for the rate."""
        self._skipped += count
        self.advance(count)

    def close(self) -> None:
        """Leave the line as it stands."""
        if self._stream is not None and self._shown and self._stream.isatty():
            self._stream.write(f"\r{self._line(self._clock())}\033[K\n")

    def _line(self, now: float) -> str:
        elapsed = max(now - self._start, 1e-9)
        rate = (self.done - self._skipped) / elapsed
        if not rate:
            return f"{self.label}: preparing, {format_duration(elapsed)} elapsed"
        left = (self.total - self.done) / rate
        return (
            f"{self.label}: {100 * self.done / max(self.total, 1):.0f}% of {self.total:,} {self.unit}, "
            f"{rate:,.0f}/s, {format_duration(elapsed)} elapsed, {format_duration(left)} left"
        )


def format_duration(seconds: float) -> str:
    """Hours, minutes and seconds, as on a clock."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
