"""Makes parts one after another in this process: the reference that other executors are compared with."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from imprint.simulation.executors.protocol import Outcome, Place, Recipe, Reports, check_counts
from imprint.store.parts import Share


@dataclass(frozen=True)
class InProcess:
    """Makes parts one after another in this process.

    parts: how many; by default as many as there are already, or one.
    retries: how often a part is tried again.
    """

    parts: int | None = None
    retries: int = 0

    def __post_init__(self) -> None:
        check_counts(self.parts, self.retries)

    @contextmanager
    def open(self, recipe: Recipe, reports: Reports) -> Iterator["_InTurn"]:
        yield _InTurn(recipe, reports)


class _InTurn:
    """Makes a part when it is started."""

    def __init__(self, recipe: Recipe, reports: Reports) -> None:
        self._recipe, self._reports = recipe, reports
        self._ended: list[Outcome] = []

    def slots(self) -> int:
        return 1

    def start(self, share: Share) -> None:
        def advance(done: int, total: int, /) -> None:
            self._reports.advance(share, done, total)

        try:
            self._recipe.make(str(share), Place(), progress=advance, **self._recipe.given)
        except Exception as error:
            self._ended.append(Outcome.of_error(share, error, traceback.format_exc()))
        else:
            self._ended.append(Outcome(share))

    def wait(self) -> list[Outcome]:
        ended, self._ended = self._ended, []
        return ended
