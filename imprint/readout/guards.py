"""Look for signs that scores mislead while they are read out, and say what to do about them.

`Reader` hands over what it computes anyway: F of the first queries, the largest score, and some scores of each
checkpoint. The guards are pure functions of these figures; `attribute` shows what they find and keeps it in the result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from imprint.errors import ReliabilityWarning, UndefinedScore
from imprint.store.checkpoint import Measured

_BEYOND = 3.0  # times the range of F
_FEWEST = 4  # values of F that make a range
_OPPOSED = -0.2  # correlation of a checkpoint's scores with those of the others
_SAMPLE = 16_384  # scores of a block on which checkpoints are compared
_FLAT = (
    "every score of some queries is exactly 0, because their measurement has no derivative with respect to the "
    "selected parameters. Does it use the argument `model`? Accuracy, rounding and saturated losses are flat: measure "
    "a margin or a log-probability instead."
)
_UNMOVED = (
    "every score is exactly 0, because the recorded run did not move the weights: it ends where it began, with or "
    "without a source. Was its learning rate 0, or too small for the precision of the weights?"
)
_UNTOUCHED = (
    "every score is exactly 0, because removing a source changed no weight: the run learnt nothing from any of them in "
    "the steps that were replayed. Were their examples in these steps, and had they a gradient?"
)
_UNMEASURED = (
    "every score of some queries is exactly 0: removing a source changed the weights, and not what is measured there. "
    "Accuracy, rounding and saturated losses are flat: measure a margin or a log-probability instead."
)


@dataclass
class Observed:
    """Figures that a readout comes across: what the guards look at.

    values: F of some queries, and losses of training examples where F is the loss.
    unit: a change of F that is ordinary whatever its value: one nat of a classifier's loss or margin; 0 if unknown.
    largest: the largest score by magnitude.
    products: sums of products of scores between checkpoints, (checkpoints, checkpoints).
    """

    values: list[float] = field(default_factory=list)
    unit: float = 0.0
    largest: float = 0.0
    products: Tensor | None = None

    def add(self, largest: float, each: Sequence[Tensor]) -> None:
        """Add the figures of a block: its largest score, and the scores of each checkpoint, all of one shape."""
        self.largest = max(self.largest, largest)
        if len(each) < 2:
            return
        stride = max(1, each[0].numel() // _SAMPLE)
        some = torch.stack([scores.flatten()[::stride] for scores in each]).double()
        products = (some @ some.T).cpu()
        self.products = products if self.products is None else self.products + products

    def warnings(
        self, n: int, checkpoints: Sequence[int], shares: Sequence[float], *, predicted: bool = True
    ) -> Iterator[ReliabilityWarning]:
        """Return the warnings; checkpoints are given by number, with their shares in the mean.

        predicted: whether scores extrapolate; those of removals that were made may be as large as they are.
        """
        found = (
            warn_beyond_range(self.largest / n, self.values, self.unit) if predicted else None,
            None if self.products is None else warn_opposed(self.products, checkpoints, shares),
        )
        return (warning for warning in found if warning is not None)


def warn_beyond_range(effect: float, values: Sequence[float], unit: float = 0.0) -> ReliabilityWarning | None:
    """Warn of a predicted effect that is larger than the measurement itself; None where it is not.

    values: the measurement of some queries.
    unit: a change that is ordinary however small the measurement is; 0 where that is unknown.
    """
    if not unit and len(values) < _FEWEST:
        return None
    size = max((abs(value) for value in values), default=0.0)
    spread = max(values) - min(values) if values else 0.0
    if not effect > _BEYOND * max(size, spread, unit):
        return None
    return ReliabilityWarning(
        f"a removal is predicted to change the measurement by {effect:.3g}, where it is {size:.3g} at most now: so "
        "large an effect is no prediction, but a simulation that left the region where it holds. Use a smaller "
        'lr, no momentum, curvature="gauss-newton", fewer steps, more damping, or later checkpoints, and compare with '
        "retraining (`imprint evaluate`)."
    )


def warn_opposed(products: Tensor, checkpoints: Sequence[int], shares: Sequence[float]) -> ReliabilityWarning | None:
    """Warn of a checkpoint whose scores point the other way than those of the others; None where all agree.

    products: sums of products of scores between checkpoints, from which their correlations follow.
    """
    weights = torch.tensor(shares, dtype=torch.float64)
    worst, where = _OPPOSED, None
    for row, index in enumerate(checkpoints):
        others = weights.clone()
        others[row] = 0
        lengths = float(products[row, row]) * float(others @ products @ others)
        if lengths > 0 and (found := float(products[row] @ others) / lengths**0.5) < worst:
            worst, where = found, index
    if where is None:
        return None
    return ReliabilityWarning(
        f"checkpoint {where} disagrees with the others: its scores correlate {worst:.2f} with theirs, so that the mean "
        f"over checkpoints hides two opposite answers. Leave checkpoint {where} out, or compare each with retraining."
    )


def explain_silence(measured: Measured, *, removes: bool) -> str:
    """Say why all scores of some queries are exactly 0.

    measured: of the checkpoint that is read; `removes` says whether scores are those of removals that were made, which
        take no derivative.
    """
    if not removes:
        return _FLAT
    if measured.drift == 0:
        return _UNMOVED
    return _UNTOUCHED if measured.norms is not None and measured.norms.largest == 0 else _UNMEASURED


def explain_undefined(scores: Tensor, first: int, sources: Sequence[str]) -> UndefinedScore:
    """Return the error for scores, (queries, sources), of which some are not finite.

    first: the number of the first query.
    """
    query, source = (~scores.isfinite()).nonzero()[0].tolist()
    return UndefinedScore(
        f"the score of query {first + query} for source {sources[source]!r} is {float(scores[query, source])}: look "
        "for NaN or infinity in the query, or an undefined measurement."
    )
