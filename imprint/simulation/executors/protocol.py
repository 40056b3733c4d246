"""Defines what an executor must offer, and what it is given.

`run_parts` (in `running`) opens an executor for a recipe, starts no more parts than it has slots, and waits for them. A
new executor implements `Executor` and `Pool`; everything else, such as retries, is the same for all.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from imprint.errors import DataError, PlanError, SimulationError, SourcesError, TaskError, first_line
from imprint.store.parts import PartsFolder, Share

_FINAL = (TaskError, SourcesError, DataError, PlanError, SimulationError)  # which no repetition changes


@dataclass(frozen=True)
class Place:
    """Where a part is made.

    device: the device that its model belongs on; None to leave it where it is.
    at_once: how many parts share the memory of that device.
    """

    device: str | None = None
    at_once: int = 1


@dataclass(frozen=True)
class Recipe:
    """How all parts of something are made.

    make: makes one, as `make("3/8", place, progress=advance, **given)`.
    given: its arguments by name, which must reach wherever parts are made.
    folder: where the parts meet.
    count: how many sources or models there are.
    label, unit: what is being done, and what progress counts.
    device: the kind of device that the task's model is on, here.
    describe: names the sources or models of a part, for a person.
    """

    make: Callable[..., object]
    given: Mapping[str, Any]
    folder: PartsFolder
    count: int
    label: str
    unit: str
    device: str
    describe: Callable[[Share], str]


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a part ended.

    error: what went wrong, in one line; None if the part is finished.
    traceback: where it went wrong.
    final: whether another attempt would end in the same way.
    """

    share: Share
    error: str | None = None
    traceback: str = ""
    final: bool = False

    @classmethod
    def of_error(cls, share: Share, error: Exception, traceback: str) -> "Outcome":
        return cls(share, first_line(error), traceback, isinstance(error, _FINAL))


class Reports(Protocol):
    """Hears what goes on while parts are made."""

    def advance(self, share: Share, done: int, total: int) -> None:
        """Hear how far a part has come."""

    def warn(self, category: str, message: str) -> None:
        """Hear a warning, of a category such as "ReliabilityWarning"."""

    def log(self, level: int, logger: str, message: str) -> None:
        """Hear what was logged."""


class Pool(Protocol):
    """An executor at work."""

    def slots(self) -> int:
        """Return how many parts can be made at once at present."""

    def start(self, share: Share) -> None:
        """Begin to make a part."""

    def wait(self) -> list[Outcome]:
        """Return how parts ended, of those that ended since the last call; after a while without any, none."""


def require_whole(name: str, value: object, least: int) -> None:
    """Refuse a setting of an executor that is no whole number, or a smaller one than `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PlanError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def check_counts(parts: object, retries: object) -> None:
    """Refuse a number of parts, unless it is None, or of retries that makes no sense."""
    if parts is not None:
        require_whole("parts", parts, 1)
    require_whole("retries", retries, 0)


class Executor(Protocol):
    """Makes parts somewhere.

    parts: how many parts there are; None for as many as can be made at once.
    retries: how often a part is tried again.
    """

    @property
    def parts(self) -> int | None: ...

    @property
    def retries(self) -> int: ...

    def open(self, recipe: Recipe, reports: Reports) -> AbstractContextManager[Pool]:
        """Get ready to make parts; afterwards nothing is left running."""
