"""The recorded run again, as it was: compared with the recording step by step, and at its end."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from imprint.simulation.engines.replay.agreement import Agreement, Watch, compare_end
from imprint.simulation.engines.replay.routes import Names, Routes, find_routes
from imprint.simulation.engines.replay.rows import Keeping, follow
from imprint.simulation.engines.replay.training import Repetition, Seen, Training
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
    repetition: Repetition, advance: Callable[[], None], compare: Callable[[Parameters], float]
) -> Unperturbed:
    """Replay a run as it was; refuse one that is not the recorded one.

    advance: called at every step.
    compare: returns by how much F differs between an end and the recorded one.
    """
    agreement, training = Agreement(repetition), Training(repetition)
    missing: list[Names] = []

    def hear(number: int, seen: Seen) -> None:
        agreement.add(number, seen)
        missing.append(seen.missing)
        advance()

    watch = Watch(("the unperturbed replay",))
    follow(training, Keeping(), hear, watch=watch, measure=True)  # nothing is kept before the journal is there
    missed, deviation = compare_end(repetition, training.state(), agreement), compare(training.state())
    logger.info(
        "the unperturbed replay misses the recorded end by %.2g of the distance travelled, and F there by %.2g "
        "(losses by %.2g)",
        *(missed, deviation, agreement.worst),
    )
    return Unperturbed(six_digits([deviation])[0], missed, agreement, _find_routes(repetition, missing))


def _find_routes(repetition: Repetition, missing: list[Names]) -> Routes | None:
    if not withholds(repetition):
        return None
    return find_routes(repetition.run, repetition.begin, missing)


def withholds(repetition: Repetition) -> bool:
    """Tell whether some gradient was missing in a step of training that the optimiser did not evaluate itself."""
    steps = repetition.run.steps[repetition.begin :]
    return any(step.missing for step in steps) and not any(step.closure for step in steps)
