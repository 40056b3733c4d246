"""Refuses recorded runs that share what several seeds are to vary: the start, the order of the data, dropout."""

import hashlib
import logging
from dataclasses import dataclass

from imprint.errors import DataError
from imprint.recording.reading import Recording
from imprint.store.fingerprint import of_tensors

logger = logging.getLogger(__name__)
_ADVICE = "RunRecorder(folder, ..., seed=seed), or TrainingArguments(seed=seed) of a Trainer"


@dataclass(frozen=True)
class _Traits:
    """What tells runs from different seeds apart: hashes of both ends and of the order, and the recorder's seed."""

    start: str
    end: str
    order: str
    seed: int

    @classmethod
    def of(cls, run: Recording) -> "_Traits":
        digest = hashlib.sha256()
        for step in run.steps:
            digest.update(repr([micro.examples for micro in step.batches]).encode())
        start, end = (of_tensors(run.state(step)) for step in (0, len(run.steps)))
        return cls(start, end, digest.hexdigest(), run.seed)


class DistinctRuns:
    """Compares each run of `record(seed, folder)` with those before it."""

    def __init__(self) -> None:
        self._known: dict[int, _Traits] = {}

    def add(self, number: int, run: Recording) -> None:
        """Refuse a run that is a copy of an earlier one, or has its random numbers; say what else they share."""
        traits = _Traits.of(run)
        for earlier, known in self._known.items():
            if traits.end == known.end:
                raise DataError(
                    f"record(seed, folder) records the same run for two seeds (runs {earlier} and {number}), so that "
                    "several runs would be copies of one: seed the initialisation with `seed`, and let the recorder "
                    f"draw order and dropout from it, {_ADVICE}; or use runs=1."
                )
            if traits.seed == known.seed:
                raise DataError(
                    f"record(seed, folder) records runs {earlier} and {number} with the same seed of the recorder, "
                    f"{known.seed}: the order of run.batches and run.loader, and dropout, are then the same in all "
                    f"runs, and their mean is not one over seeds. Give the recorder the seed, {_ADVICE}."
                )
        if len(self._known) == 1:
            _say_what_is_shared(traits, *self._known.values())
        self._known[number] = traits


def _say_what_is_shared(one: _Traits, other: _Traits) -> None:
    """Log what two runs share that may be meant to be the same."""
    if one.start == other.start:
        logger.warning(
            "runs from different seeds start from the same parameters, so that their mean is one over order and "
            "dropout alone: right for fine-tunes of one pretrained model; otherwise seed the initialisation in "
            "record(seed, folder), torch.manual_seed(seed)"
        )
    if one.order == other.order:
        logger.warning(
            "runs from different seeds take the examples in the same order: right for a training that does not "
            "shuffle; otherwise seed the order in record(seed, folder), or take it from run.batches"
        )
