"""Compares the unperturbed replay with the recording: the loss and the gradient of every step, and the end.

What differs from the first step on, or suddenly, is another loss, other data or another optimiser: it is refused with
what to look for. What grows slowly is rounding, which is measured and stated. Messages count steps from 1, as the
recorder does.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from imprint.errors import SimulationError
from imprint.recording.records import MicroBatch, Step
from imprint.simulation.engines.replay.training import Repetition, Seen
from imprint.task import Parameters
from imprint.tensors.vectors import minus, norm

FIRST = 3
"""Steps that are compared strictly."""
_BLOCK = 32  # steps that are compared together: reading a number makes a GPU wait
_JUMP = 30.0  # times more than any step before: no growth of rounding
_SMALL = 1e-2  # of the largest value so far: values below count as that large
_STEADY = 0.05  # relative spread of a ratio that is called constant, where it is larger than the next
_LARGE = 1.5
_EXPLAINED = 0.03  # of a figure: a cause that predicts it as closely is named as its cause
_FOUND, _PARTING = "agreement", "parting"  # the names of what a snapshot keeps
_FIGURES = ("loss", "gradient norm")
_ASTRAY = 0.5  # of the distance the run travelled: by so much its end may be missed


def tolerance(repetition: Repetition) -> float:
    """Return the relative difference that rounding may make in a first step."""
    dtypes = {p.dtype for name, p in repetition.task.model.named_parameters() if name in repetition.trained}
    size = min(dtype.itemsize for dtype in dtypes)
    if repetition.run.circumstances.autocast is not None or size < 4:
        return 3e-2
    return 1e-4 if size == 4 else 1e-9


@dataclass(frozen=True)
class _Pair:
    """A figure of a step, replayed and recorded."""

    step: int
    what: str
    replayed: float
    recorded: float
    deviation: float

    def pack(self) -> list[float]:
        """Return the pair as numbers."""
        return [self.step, _FIGURES.index(self.what), self.replayed, self.recorded, self.deviation]

    @classmethod
    def unpack(cls, numbers: list[float]) -> "_Pair":
        """Return the pair that was packed."""
        step, what, *values = numbers
        return cls(int(step), _FIGURES[int(what)], *values)


class Agreement:
    """Hears what every step of the unperturbed replay shows, and refuses a replay that is not of the recorded run."""

    def __init__(self, repetition: Repetition) -> None:
        self._repetition, self._tolerance = repetition, tolerance(repetition)
        self._waiting: list[tuple[int, Seen]] = []
        self._largest = dict.fromkeys(_FIGURES, 0.0)
        self._first: list[_Pair] = []
        self.worst = 0.0  # relative difference so far
        self.parting: _Pair | None = None  # the first figure that differs by more than rounding may in a first step

    def add(self, number: int, seen: Seen) -> None:
        """Take what a step shows."""
        self._waiting.append((number, seen))
        at_first = number < self._repetition.begin + FIRST
        if len(self._waiting) == (FIRST if at_first else _BLOCK) or number == self._repetition.steps[-1]:
            self._compare()

    def pack(self) -> Parameters:
        """Compare all steps so far, and return what a snapshot needs to go on from them."""
        if self._waiting:
            self._compare()
        parting = [] if self.parting is None else [self.parting.pack()]
        return {
            _FOUND: torch.tensor([self.worst, *self._largest.values()], dtype=torch.float64),
            _PARTING: torch.tensor(parting, dtype=torch.float64),
        }

    def restore(self, found: Parameters) -> None:
        """Go on from what was packed."""
        self.worst, *largest = found[_FOUND].tolist()
        self._largest = dict(zip(self._largest, largest, strict=True))
        self.parting = next((_Pair.unpack(each) for each in found[_PARTING].tolist()), None)

    def _compare(self) -> None:
        """Compare the steps that wait."""
        waiting, self._waiting = self._waiting, []
        steps = self._repetition.run.steps
        pairs = list(chain.from_iterable(self._pairs(number, seen, steps[number]) for number, seen in waiting))
        if waiting[0][0] == self._repetition.begin:
            self._first = pairs
        known = {pair.step for pair in pairs if pair.what == "loss"}
        for pair in pairs:
            strict = pair.step < self._repetition.begin + FIRST
            allowed = self._tolerance if strict else _JUMP * max(self._tolerance, self.worst)
            decides = strict or pair.what == "loss" or pair.step not in known  # gradients leap where a run is chaotic
            if decides and not pair.deviation <= allowed * (1 if pair.what == "loss" else 10):
                raise SimulationError(self._explain(pair))
            if (
                decides
                and self.parting is None
                and pair.deviation > self._tolerance * (1 if pair.what == "loss" else 10)
            ):
                self.parting = pair
            if pair.what == "loss" or not strict:
                self.worst = max(self.worst, pair.deviation / (1 if pair.what == "loss" else 10))

    def describe_parting(self) -> str:
        """Say at which step the replay left the recording, in a sentence."""
        if (pair := self.parting) is None:
            return f"The steps agree with the recording to {max(self.worst, 1e-16):.1g}."
        return (
            f"It parts from the recording at step {pair.step + 1}: the {pair.what} is {pair.replayed:.6g}, and was "
            f"{pair.recorded:.6g} in training."
        )

    def _pairs(self, number: int, seen: Seen, step: Step) -> list[_Pair]:
        """Return the figures of a step that were recorded."""
        losses = [micro.loss for micro in step.batches]
        recorded = {
            "loss": None if any(loss is None for loss in losses) else sum(loss or 0.0 for loss in losses),
            "gradient norm": step.gradient_norm,
        }
        replayed = {"loss": seen.loss, "gradient norm": seen.gradient_norm}
        found: list[_Pair] = []
        for what, before in recorded.items():
            now = replayed[what]
            if before is None or now is None:
                continue
            self._largest[what] = max(self._largest[what], abs(before))
            size = max(abs(before), _SMALL * self._largest[what], 1e-30)
            value = float(now)
            found.append(_Pair(number, what, value, before, abs(value - before) / size))
        return found

    def _explain(self, pair: _Pair) -> str:
        """Say at which step the replay leaves the recording, and what to look for."""
        begin = self._repetition.begin
        said = (
            f"the replay differs from the recording at step {pair.step + 1}: the {pair.what} is {pair.replayed:.6g}, "
            f"and was {pair.recorded:.6g} in training (a relative difference of {pair.deviation:.2g}). "
        )
        has_loss = any(other.what == "loss" for other in self._first)
        if pair.step == begin and (pair.what == "loss" or not has_loss) and (reason := self._explain_mean(pair)):
            return said + reason
        if pair.step == begin and pair.what == "loss":
            return said + (self._explain_ratio() or _WRONG_LOSS)
        if pair.step == begin:
            return said + (_WRONG_GRADIENT if has_loss else self._guess(pair))
        if pair.step < begin + FIRST:
            return said + (
                f"Step {begin + 1} agrees, so the loss is right: the optimiser then moved differently, or this batch "
                "differs. Look for another class or other settings of the optimiser, clipping or a divisor that was "
                "not recorded, examples that differ, a loss that changes from step to step (an annealed weight, a "
                "teacher), or weights that were changed between steps."
            )
        return said + (
            f"The steps before agree to {max(self.worst, 1e-16):.1g}: look for steps that were not recorded, data that "
            "changed during training, weights that were changed between steps, or random numbers that do not come from "
            "torch, numpy or random."
        )

    def _guess(self, pair: _Pair) -> str:
        """Say what a wrong gradient may come from where no loss was recorded."""
        batch = self._repetition.run.steps[pair.step].batches[0]
        return (
            f"No loss was recorded, which would tell more (step.backward(loss) records it). Look for a sum where "
            f"training took a mean, or another divisor: the losses of {len(batch.examples)} examples are summed and "
            f"divided by the recorded normaliser {batch.normaliser:g}, run.step(indices, normaliser=...). Or look for "
            "other data or data in another order, another loss, augmentation, another model, or gradients that were "
            "changed before the step."
        )

    def _explain_mean(self, pair: _Pair) -> str | None:
        """Say that training divided by the number of tokens, not recorded, where that explains the first figure."""
        batches = self._repetition.run.steps[pair.step].batches
        counts = self._count_terms(batches)
        if counts is None or (pair.what != "loss" and len(batches) > 1):
            return None
        expected = _expect_sum(pair, batches, counts)
        if not _is_near(expected, pair.replayed, _EXPLAINED) or _is_near(expected, pair.recorded, 2 * _EXPLAINED):
            return None
        return _describe_mean(sum(counts), _count_examples(batches), len(batches))

    def _count_terms(self, batches: Sequence[MicroBatch]) -> list[float] | None:
        """Return how many terms the losses of each micro-batch add up; None where that is unknown."""
        repetition = self._repetition
        counts = [repetition.task.count_terms(repetition.gather(batch)[1]) for batch in batches]
        known = [count for count in counts if count is not None]
        return known if len(known) == len(counts) else None

    def _explain_ratio(self) -> str | None:
        """Say that all losses are wrong by one factor, if they are: the normaliser, or a mean for a sum."""
        losses = [pair for pair in self._first if pair.what == "loss"]
        ratios = [pair.replayed / pair.recorded for pair in losses if pair.recorded]
        if len(ratios) < 2 or min(ratios) <= 0 or (min(ratios) < 1.01 and max(ratios) > 0.99):
            return None
        is_large = max(ratios) < 1 / _LARGE or min(ratios) > _LARGE
        if max(ratios) > (1 + (_STEADY if is_large else _STEADY / 100)) * min(ratios):
            return None
        batch = self._repetition.run.steps[self._repetition.begin].batches[0]
        return (
            f"It is {math.exp(sum(map(math.log, ratios)) / len(ratios)):.4g} times the recorded one in every step: the "
            f"losses of {len(batch.examples)} examples are summed and divided by the recorded normaliser "
            f"{batch.normaliser:g}. Look for a loss that is reduced or scaled in another way than in training (a sum "
            "over tokens against a mean), or tell the recorder its divisor: run.step(indices, normaliser=...)."
        )


def _expect_sum(pair: _Pair, batches: Sequence[MicroBatch], counts: Sequence[float]) -> float:
    """Return what a replay finds if the recorded figure was a mean over so many terms in each micro-batch."""
    factors = [len(batches) * count / batch.normaliser for batch, count in zip(batches, counts, strict=True)]
    shares = [batch.loss or 0.0 for batch in batches] if pair.what == "loss" else [pair.recorded]
    return sum(share * factor for share, factor in zip(shares, factors, strict=True))


def _describe_mean(terms: float, examples: int, parts: int) -> str:
    """Say that a mean over tokens was recorded as a sum, and how to record it, with so many parts of a step."""
    tokens = "(labels[:, 1:] != -100).sum()"
    call = f"run.step(indices, normaliser={tokens})"
    if parts > 1:
        call = f"step.batch(indices, normaliser={parts} * {tokens})"
    return (
        f"The first looks like a sum over tokens, the second like a mean over them, as transformers computes it: "
        f"the {examples} examples of this step have {terms:.6g} predicted tokens, {terms / examples:.4g} each. "
        f"Record what the loss was divided by: {call}."
    )


def _count_examples(batches: Sequence[MicroBatch]) -> int:
    return sum(len(batch.examples) for batch in batches)


def _is_near(one: float, other: float, within: float) -> bool:
    """Tell whether two figures are the same to so many parts of the larger one."""
    return abs(one - other) <= within * max(abs(one), abs(other))


_WRONG_LOSS = (
    "Look for another loss or reduction than in training, other data or data in another order, augmentation or other "
    "random numbers that are not drawn within run.step, another model, or a regulariser that only one of them has."
)
_WRONG_GRADIENT = (
    "The loss agrees: look for gradients that were changed before the step (scaled, accumulated from an earlier step, "
    "hooks), or a regulariser that the reported loss leaves out."
)


def compare_end(repetition: Repetition, end: Parameters, agreement: Agreement) -> float:
    """Return how far the unperturbed replay ends from the recorded end, relative to the distance the run travelled.

    A far end after losses that agreed is refused: the weights were changed after the last step.
    """
    recorded = _trained(repetition, repetition.run.state(len(repetition.run.steps)))
    way = norm(minus(recorded, _trained(repetition, repetition.start())))
    missed = norm(minus(_trained(repetition, end), recorded)) / way if way else 0.0
    if missed > _ASTRAY and agreement.worst < _JUMP * tolerance(repetition):
        raise SimulationError(
            f"the replay misses the recorded end by {missed:.0%} of the distance the run travelled, although its "
            f"losses agree to {max(agreement.worst, 1e-16):.1g}: look for weights that were averaged, restored or "
            "changed after the last recorded step."
        )
    return missed


def _trained(repetition: Repetition, state: Parameters) -> Parameters:
    return {name: state[name].to(repetition.data.device) for name in repetition.trained}


class Watch:
    """Keeps the first step at which the loss of each row was not finite, and refuses such a row by its name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._unread = names, 0
        self._first: Tensor | None = None

    def add(self, number: int, losses: Tensor) -> None:
        """Take the loss of each row at a step."""
        if self._first is None:
            self._first = torch.full_like(losses, -1, dtype=torch.long)
        self._first = torch.where((self._first < 0) & ~losses.isfinite(), number, self._first)
        self._unread += 1
        if self._unread == _BLOCK:
            self.check()

    def check(self) -> None:
        """Refuse a row whose loss was not finite."""
        self._unread = 0
        if self._first is None:
            return
        steps = self._first.tolist()
        for name, step in zip(self._names, steps, strict=True):
            if step >= 0:
                raise SimulationError(
                    f"the loss of {name} is not finite at step {step + 1}: it diverges there. Train with a smaller "
                    "learning rate or with clipping, so that the run survives small changes, and record it again."
                )
