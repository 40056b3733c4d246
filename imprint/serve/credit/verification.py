"""Verifies the ledger of a service in a thread: when it starts, and when somebody asks; never twice at once."""

import logging
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from imprint.credit import log, tables
from imprint.credit.auditing import Problem
from imprint.credit.heads import read_heads
from imprint.credit.ledger import Ledger
from imprint.credit.log import format_time
from imprint.credit.verifying import Verification, verify
from imprint.errors import CreditUnavailable, ImprintError
from imprint.keys import load_public_key
from imprint.runtime.progress import Advance
from imprint.serve.metrics import Metrics
from imprint.serve.settings import Settings

logger = logging.getLogger("imprint.serve")
_SHARE = 0.5  # of the time that verifying leaves to answers
_LISTED = 1_000  # problems
CLOSING = 5.0
"""Seconds that a service waits for a verification when it ends: a database that checks its own file does not stop."""


@dataclass(frozen=True)
class State:
    """What is known of the ledger from its last verification.

    status: "failed" is a verification that could not be finished; `error` says why.
    began, ended: times. entries: how many entries were verified; while it runs, so far, of `total`.
    heads: signed heads that the log was compared with; of these, `published` come from a file outside of the database.
    signed: whether their signatures were checked with the public key.
    """

    status: Literal["never", "running", "holds", "problems", "failed"] = "never"
    began: str | None = None
    ended: str | None = None
    entries: int = 0
    total: int = 0
    heads: int = 0
    published: int = 0
    signed: bool = False
    seconds: float = 0.0
    problems: tuple[Problem, ...] = ()
    count: int = 0
    remarks: tuple[str, ...] = ()
    error: str = ""


class _Stopped(Exception):
    """The service is shutting down."""


class Verifier:
    """Verifies a ledger; keeps what the last verification found while the next one runs."""

    def __init__(self, ledger: Ledger, settings: Settings, metrics: Metrics | None = None) -> None:
        self._ledger, self._settings, self._metrics = ledger, settings, metrics
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._last, self._running = State(), State()
        self._thread: threading.Thread | None = None

    @property
    def last(self) -> State:
        """The last verification that ended."""
        return self._last

    @property
    def running(self) -> State | None:
        """The one that runs now; None if none does."""
        with self._lock:
            return self._running if self._running.status == "running" else None

    def start(self) -> bool:
        """Begin to verify, unless that is being done; return whether it was begun."""
        with self._lock:
            if self._running.status == "running" or self._closing.is_set():
                return False
            self._running = State("running", format_time(datetime.now(UTC)))
            self._thread = threading.Thread(target=self._work, name="imprint-verifying", daemon=True)
            self._thread.start()
            return True

    def wait(self, timeout: float | None = None) -> None:
        """Return once what runs has ended."""
        if self._thread is not None:
            self._thread.join(timeout)

    def close(self) -> None:
        """Stop, and accept no more. What does not stop is left behind: it only reads, and ends with the process."""
        self._closing.set()
        self.wait(CLOSING)

    def _work(self) -> None:
        try:
            found = self._verify()
        except _Stopped:
            found = self._last
        except ImprintError as error:
            is_unavailable = isinstance(error, CreditUnavailable)  # whose message names the host and the user
            found = self._fail("the ledger cannot be reached." if is_unavailable else str(error))
            logger.error("the ledger could not be verified: %s", found.error)
        except Exception as error:  # a thread that dies in silence would leave the page at "running" for ever
            found = self._fail(f"it ended with an unexpected {type(error).__name__}.")
            logger.exception("the ledger could not be verified")
        with self._lock:
            self._last, self._running = found, State()

    def _fail(self, text: str) -> State:
        return replace(self._running, status="failed", error=text, ended=format_time(datetime.now(UTC)))

    def _verify(self) -> State:
        settings = self._settings
        heads = [] if settings.heads is None else read_heads(settings.heads)
        key = None if settings.public_key is None else load_public_key(settings.public_key)
        found = verify(self._ledger, heads=heads, key=key, progress=_Polite(self._note, self._closing))
        state = _describe(found, self._running.began, len(heads), key is not None)
        if self._metrics is not None:
            self._metrics.problems.set(state.count)
            self._metrics.verified.set_to_current_time()
        if not found.holds:
            logger.error("the ledger does not verify: %d problems", state.count)
        with tables.reading(self._ledger.engine) as connection:
            if (clock := log.describe_clock(connection)) is not None:
                logger.warning("a clock is wrong: %s", clock)
        return state

    def _note(self, done: int, total: int) -> None:
        with self._lock:
            self._running = replace(self._running, entries=done, total=total)


class _Polite:
    """Told how far the verification is; lets others compute in between, and ends it when the service does."""

    def __init__(self, note: Advance, closing: threading.Event) -> None:
        self._tell, self._closing, self._last = note, closing, time.monotonic()

    def __call__(self, done: int, total: int, /) -> None:
        self._tell(done, total)
        spent = time.monotonic() - self._last
        if self._closing.wait(min(1.0, spent * _SHARE / (1 - _SHARE))):
            raise _Stopped
        self._last = time.monotonic()


def _describe(found: Verification, began: str | None, published: int, signed: bool) -> State:
    return State(
        status="holds" if found.holds else "problems",
        began=began,
        ended=format_time(datetime.now(UTC)),
        entries=found.entries,
        total=found.entries,
        heads=found.heads,
        published=published,
        signed=signed,
        seconds=found.seconds,
        problems=found.problems[:_LISTED],
        count=len(found.problems),
        remarks=found.remarks,
    )
