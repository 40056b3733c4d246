"""The recorded run again, as it was: compared with the recording step by step, and at its end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from imprint.simulation.engines.replay.agreement import FIRST, Agreement, Watch, compare_end
from imprint.simulation.engines.replay.routes import Names, Routes, find_routes
from imprint.simulation.engines.replay.rows import Keeping, follow, restore_ends
from imprint.simulation.engines.replay.training import Repetition, Seen, Training, as_recorded
from imprint.simulation.snapshot import Snapshot
from imprint.task import Parameters
from imprint.tensors.vectors import six_digits

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Unperturbed:
    """What the unperturbed replay has shown.

    deviation: the root mean square difference of F between its end and the recorded one.
    missed: how far it ends from the recorded end, relative to the distance that the run travelled.
    routes: which gradients the training loop withheld; None where none was missing in training.
    """

    deviation: float
    missed: float
    agreement: Agreement
    routes: Routes | None


def replay_unperturbed(
    repetition: Repetition,
    hear: Callable[[str], None],
    compare: Callable[[Parameters], float],
    snapshot: Snapshot | None = None,
) -> Unperturbed:
    """Replay a run as it was; refuse one that is not the recorded one.

    hear: called at every step, with its name.
    compare: returns by how much F differs between an end and the recorded one.
    """
    agreement, training, missing = Agreement(repetition), Training(repetition), _Missing(repetition)
    _, left = restore_ends(repetition, 1, snapshot)
    if left is not None and left.note:
        agreement.restore(left.tensors)
        missing.restore(left.tensors)

    def add(number: int, seen: Seen) -> None:
        agreement.add(number, seen)
        missing.add(number, seen)
        hear(f"repeating the run as it was, {repetition.describe_step(number)}")

    keeping = Keeping(snapshot, left=left, beside=lambda: {**agreement.pack(), **missing.pack()})
    follow(training, keeping, add, watch=Watch(("the unperturbed replay",)), measure=True)
    missed, deviation = compare_end(repetition, training.state(), agreement), compare(training.state())
    logger.info(
        "the unperturbed replay misses the recorded end by %.2g of the distance travelled, and F there by %.2g "
        "(losses by %.2g)",
        *(missed, deviation, agreement.worst),
    )
    return Unperturbed(six_digits([deviation])[0], missed, agreement, missing.find_routes())


def compare_first_steps(repetition: Repetition, *, leaves_out: bool) -> None:
    """Refuse a task whose first steps are not those of the recorded run: it was not trained like this."""
    agreement, training = Agreement(repetition), Training(repetition, leaves_out=leaves_out)
    with as_recorded(repetition.run.circumstances):
        for number in repetition.steps[:FIRST]:
            agreement.add(number, training.step(number, measure=True))


def withholds(repetition: Repetition) -> bool:
    """Tell whether some gradient was missing in a step of training that the optimiser did not evaluate itself."""
    steps = repetition.run.steps[repetition.begin :]
    return any(step.missing for step in steps) and not any(step.closure for step in steps)


class _Missing:
    """Keeps which gradients the loss has none of at each step, if some were missing in training."""

    def __init__(self, repetition: Repetition) -> None:
        self._repetition, self._wanted = repetition, withholds(repetition)
        self._found: dict[int, Names] = {}

    def add(self, number: int, seen: Seen) -> None:
        if self._wanted:
            self._found[number] = seen.missing

    def pack(self) -> Parameters:
        """Return what a snapshot keeps: a row for each step so far, a column for each trained parameter."""
        rows = [[name in names for name in self._repetition.trained] for names in self._found.values()]
        return {_MISSING: torch.tensor(rows, dtype=torch.bool)}

    def restore(self, found: Parameters) -> None:
        """Go on from what was packed."""
        names = self._repetition.trained
        for number, row in enumerate(found[_MISSING].tolist(), self._repetition.begin):
            self._found[number] = frozenset(name for name, absent in zip(names, row, strict=True) if absent)

    def find_routes(self) -> Routes | None:
        """Return which gradients the training loop withheld; None where none was missing in training."""
        if not self._wanted:
            return None
        return find_routes(self._repetition.run, self._repetition.begin, list(self._found.values()))


_MISSING = "missing"  # the name of what a snapshot keeps
