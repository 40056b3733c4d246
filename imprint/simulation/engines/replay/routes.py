"""Which gradients a run without a source has none of: its own choice, or that of the recorded training loop.

An optimiser leaves a parameter alone whose gradient is missing (None). Where the loss itself leaves a gradient out, as
of an expert that no example of a batch is sent to, a run without a source finds its own routes. What the loop withheld,
as of a layer that it froze midway, is withheld from every run. The unperturbed replay tells which is which: it computes
the gradients that were withheld.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from imprint.recording.records import Run

Names = frozenset[str]


@dataclass(frozen=True)
class Routes:
    """What holds for the gradients of every run, for each step from `begin` on; all others are a run's own.

    withheld: gradients that training had none of, although its loss has them.
    filled: gradients that training had although its loss has none, and which are 0 then.
    """

    begin: int
    withheld: tuple[Names, ...]
    filled: tuple[Names, ...]

    def at(self, step: int) -> tuple[Names, Names] | None:
        """Return what is withheld and filled at a step; None for a step before the first."""
        return None if step < self.begin else (self.withheld[step - self.begin], self.filled[step - self.begin])


def find_routes(run: Run, begin: int, missing: Sequence[Names]) -> Routes:
    """Tell what training withheld from what its loss left out.

    missing: the gradients that the loss of the unperturbed replay has none of, at each step from `begin` on. One that
        differs from the recording decides for all neighbouring steps in which the recording is the same: an expert may
        rest in some of the steps for which it is frozen.
    """
    trained = frozenset(name for group in run.groups for name in group)
    steps = run.steps[begin:]
    absent = [step.missing for step in steps]
    present = [trained - names for names in absent]
    withheld = [there - own for there, own in zip(absent, missing, strict=True)]
    filled = [there & own for there, own in zip(present, missing, strict=True)]
    return Routes(begin, _spread(withheld, absent), _spread(filled, present))


def _spread(found: Sequence[Names], within: Sequence[Names]) -> tuple[Names, ...]:
    """Extend what was found at a step to all neighbouring steps that have it within."""
    forward = _carry(found, within)
    return tuple(reversed(_carry(list(reversed(forward)), list(reversed(within)))))


def _carry(found: Iterable[Names], within: Iterable[Names]) -> list[Names]:
    carried: Names = frozenset()
    every: list[Names] = []
    for names, there in zip(found, within, strict=True):
        carried = (carried | names) & there
        every.append(carried)
    return every
