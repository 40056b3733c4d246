"""Runs all parts of something on an executor: what is made when, what is tried again, and what the user hears."""

import builtins
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

import imprint.errors
from imprint.display import count_of, for_terminal, name_some
from imprint.errors import PartsError
from imprint.runtime.progress import Advance, Progress
from imprint.simulation.executors.protocol import Executor, Outcome, Pool, Recipe
from imprint.store.parts import Share

logger = logging.getLogger(__name__)
_PAUSE = 2.0  # seconds before the first repetition, in which a process that is dying lets go of the folder; then more
_LOOK = 0.1  # seconds between two looks at whether it is time


def run_parts(executor: Executor, recipe: Recipe, progress: bool | Advance, known: Iterable[str] = ()) -> int:
    """Make all parts that are not finished; return how many there are.

    known: warnings that the user has seen.

    No more parts are under way than the executor can make at once. One that fails is tried again, and goes on with what
    it has; one that fails for good is reported, the others are made all the same, and an error follows in the end.
    """
    before = recipe.folder.division()
    reporter = Reporter(recipe, progress, known)
    with _resumable(recipe), closing(reporter), executor.open(recipe, reporter) as pool:
        of = executor.parts or before or max(1, min(pool.slots(), recipe.count))
        shares = Share(1, of).others()
        recipe.folder.refuse_other_number(shares[0])
        reporter.expect(of)
        failures = _Run(executor.retries, recipe, pool, reporter).make(shares)
    if failures:
        raise _explain(failures, of, recipe)
    return of


@contextmanager
def _resumable(recipe: Recipe) -> Iterator[None]:
    """Say that what was interrupted can be resumed."""
    try:
        yield
    except Exception:
        raise
    except BaseException:  # such as Ctrl-C
        logger.warning("stopped: the same call again resumes the parts in %s", recipe.folder.out)
        raise


class _Run:
    """The parts of one call, on their way."""

    def __init__(self, retries: int, recipe: Recipe, pool: Pool, reporter: "Reporter") -> None:
        self._retries, self._recipe, self._pool, self._reporter = retries, recipe, pool, reporter
        self._attempts: Counter[Share] = Counter()
        self._due: dict[Share, float] = {}  # when a part may be tried again
        self._failures: dict[Share, Outcome] = {}

    def make(self, shares: Iterable[Share]) -> dict[Share, Outcome]:
        """Make parts; return how those ended that could not be made."""
        waiting, running = list(shares), 0
        while waiting or running:
            while running < max(1, self._pool.slots()) and (share := self._find_due(waiting)) is not None:
                waiting.remove(share)
                self._attempts[share] += 1
                self._pool.start(share)
                running += 1
            if not running:
                time.sleep(_LOOK)
                continue
            for outcome in self._pool.wait():
                running -= 1
                if self._is_due_again(outcome):
                    waiting.append(outcome.share)
        return dict(sorted(self._failures.items(), key=lambda pair: pair[0].number))

    def _find_due(self, waiting: Iterable[Share]) -> Share | None:
        """Return the first part that may be made now."""
        now = time.monotonic()
        return next((share for share in waiting if self._due.get(share, now) <= now), None)

    def _is_due_again(self, outcome: Outcome) -> bool:
        """Take note of how an attempt ended; tell whether the part is to be tried again."""
        share = outcome.share
        if outcome.error is None:
            self._reporter.finish(share)
            return False
        if not outcome.final and self._attempts[share] <= self._retries:
            self._due[share] = time.monotonic() + _PAUSE * self._attempts[share]
            logger.warning("part %s is tried again, and resumes: %s", share, outcome.error)
            return True
        same = [other for other, earlier in self._failures.items() if earlier.error == outcome.error]
        self._failures[share] = outcome
        tried = count_of(self._attempts[share], "attempt")
        where = f"part {share} ({self._recipe.describe(share)}) failed, after {tried}"
        if same:
            logger.error("%s, as part %s did: %s", where, same[0], outcome.error)
        else:
            logger.error("%s: %s\n%s", where, outcome.error, outcome.traceback.rstrip())
        return False


def _explain(failures: dict[Share, Outcome], of: int, recipe: Recipe) -> PartsError:
    """Make the error that says which parts are missing, and how to go on."""
    reasons: dict[str, list[str]] = {}
    for share, outcome in failures.items():
        reasons.setdefault(outcome.error or "", []).append(str(share))
    why = "; ".join(f"{name_some(shares, 6)}: {error.rstrip('.')}" for error, shares in reasons.items())
    others = "" if len(failures) == of else f" The other {of - len(failures)} are finished and stay."
    error = PartsError(
        f"{len(failures)} of {count_of(of, 'part')} could not be made ({why}).{others} Once the cause is removed, make "
        f"the same call again: it resumes what is in {recipe.folder.out}."
    )
    error.tracebacks = {str(share): outcome.traceback for share, outcome in failures.items()}
    return error


class Reporter:
    """Reports on all parts to the user: one line of progress, and every message once."""

    def __init__(self, recipe: Recipe, progress: bool | Advance, known: Iterable[str] = ()) -> None:
        self._bar = Progress(recipe.label, 0, recipe.unit, progress)
        self._parts: dict[Share, tuple[int, int]] = {}
        self._silent: set[Share] = set()  # finished, and there was nothing to do
        self._seen_messages = {for_terminal(message) for message in known}
        self._of = 1

    def expect(self, of: int) -> None:
        """Expect the progress of so many parts."""
        self._of = of

    def advance(self, share: Share, done: int, total: int) -> None:
        """Count what a part has done; a second attempt counts from where the first one came."""
        before = self._parts.get(share, (0, 0))[0]
        self._parts[share] = (max(before, done), total)
        self._show()

    def finish(self, share: Share) -> None:
        """Count a part as finished."""
        if share in self._parts:
            total = self._parts[share][1]
            self.advance(share, total, total)
        else:
            self._silent.add(share)

    def _show(self) -> None:
        """Show what is done of all parts together; those that have not reported count as much work as the others."""
        total = sum(total for _, total in self._parts.values())
        unknown = self._of - len(self._parts) - len(self._silent)
        self._bar.total = total + round(total / len(self._parts) * max(0, unknown))
        if (left := sum(done for done, _ in self._parts.values()) - self._bar.done) > 0:
            self._bar.advance(left)

    def warn(self, category: str, message: str) -> None:
        """Pass on a warning that was not seen before."""
        if self._is_new(message):
            kind = getattr(imprint.errors, category, None) or getattr(builtins, category, None)
            known = isinstance(kind, type) and issubclass(kind, Warning)
            warnings.warn(message, kind if known else UserWarning, stacklevel=2)

    def log(self, level: int, logger: str, message: str) -> None:
        """Pass on a log message that was not seen before."""
        if self._is_new(message):
            logging.getLogger(logger).log(level, "%s", message)

    def _is_new(self, message: str) -> bool:
        new = message not in self._seen_messages
        self._seen_messages.add(message)
        return new

    def close(self) -> None:
        """Leave the line of progress as it stands."""
        self._bar.close()
