"""How scores spread over runs: the standard errors of scores that answer `expected`.

Each run has one deviation from the mean for every query and source. All of them are kept, because the error of an
imprint is shared by all queries: the error of a mean over queries is found from the means of each run, and is not the
error of one query divided by √queries. Sums over sources and differences of results are found likewise.

With shares w of k runs that vary alike, x̄ = Σ w x has the variance Σw²/(1 − Σw²) · Σ w (x − x̄)², which for equal shares
is s²/k, and Student's t has k − 1 degrees of freedom; if few runs have most of the weight, it has fewer. Of two
independent results the variances add up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from imprint.display import count_of
from imprint.readout.units import Over, Units
from imprint.statistics import student_quantile

LOWER_BOUND = "a lower bound, what the seed does is not in it"


@dataclass(frozen=True)
class Replicates:
    """How far the scores of each of several runs lie from their mean.

    deviations: in the unit of scores, shape (runs, queries, sources); with their shares they add up to 0.
    shares: what each run counts in the mean; they add up to 1.
    names: identify the runs: hashes of their checkpoints.
    over: "runs", or "checkpoints" where these are the checkpoints of a single run, which are not independent.
    """

    deviations: Tensor
    shares: tuple[float, ...]
    names: tuple[str, ...]
    over: Over = "runs"

    def __len__(self) -> int:
        return len(self.shares)

    def change(self, linear: Callable[[Tensor], Tensor]) -> "Replicates":
        """Return what a linear function of the scores makes of each run."""
        return replace(self, deviations=linear(self.deviations))

    @property
    def variance(self) -> Tensor:
        """The squared standard error of the mean over runs, shape (queries, sources)."""
        total = torch.zeros(self.deviations.shape[1:], dtype=torch.float64)
        for share, deviation in zip(self.shares, self.deviations, strict=True):
            total += share * deviation.double().square()
        squares = sum(share**2 for share in self.shares)
        return squares / (1 - squares) * total

    @property
    def freedom(self) -> int:
        """The degrees of freedom of the variance, by Satterthwaite's rule, rounded down: k − 1 for equal shares.

        The sum of squares is x'(W − ww')x for independent x, and its degrees are (tr A)²/tr A² with A = W − ww'.
        """
        square, cube = (sum(share**power for share in self.shares) for power in (2, 3))
        return max(1, math.floor((1 - square) ** 2 / (square - 2 * cube + square**2) + 1e-9))

    def leave_out(self, scores: Tensor) -> list[Tensor]:
        """Return the mean scores without each run in turn, from those of all runs."""
        kept = zip(self.shares, self.deviations.double(), strict=True)
        return [scores.double() - share / (1 - share) * deviation for share, deviation in kept]


def replicate(units: Units | None, deviations: Tensor | None) -> tuple[Replicates, ...]:
    """Return the replicates of scores that were read with their deviations; none where there are none."""
    if units is None or deviations is None:
        return ()
    return (Replicates(deviations.cpu(), units.shares, units.names, units.over),)


def combine_errors(replicates: Sequence[Replicates]) -> Tensor:
    """Return the standard errors of scores that are sums of independent parts, shape (queries, sources)."""
    return torch.stack([each.variance for each in replicates]).sum(0).sqrt()


def find_quantiles(replicates: Sequence[Replicates], level: float) -> Tensor:
    """Return Cochran's quantiles for the standard errors: the mean of Student's weighted with the variances."""
    quantiles = torch.tensor([student_quantile(each.freedom, level) for each in replicates], dtype=torch.float64)
    if len(replicates) == 1:
        return quantiles[0]
    variances = torch.stack([each.variance for each in replicates])
    mean = torch.einsum("p,pqs->qs", quantiles, variances) / variances.sum(0)
    return torch.where(variances.sum(0) > 0, mean, quantiles.max())


def subtract_replicates(first: Sequence[Replicates], second: Sequence[Replicates]) -> tuple[Replicates, ...]:
    """Return the replicates of a difference of two results, whose scores have the same sources and unit.

    The same runs are paired, since what they share cancels. Those of different runs are independent. Empty where one
    result has none, or where they share some runs but not all, or weigh them otherwise.
    """
    if len(first) != 1 or len(second) != 1:
        return ()
    one, other = first[0], second[0]
    if not set(one.names) & set(other.names):
        return one, other.change(torch.neg)
    if sorted(one.names) != sorted(other.names) or len(set(one.names)) < len(one):
        return ()
    order = [other.names.index(name) for name in one.names]
    if any(abs(share - other.shares[place]) > 1e-9 for share, place in zip(one.shares, order, strict=True)):
        return ()
    paired = one.change(lambda deviations: deviations.double() - other.deviations[order].double())
    return (paired if one.over == other.over else replace(paired, over="checkpoints"),)


def describe_replicates(replicates: Sequence[Replicates]) -> str:
    """Say what the standard errors of a result are over."""
    texts = [
        f"over {count_of(len(each), 'run')}"
        if each.over == "runs"
        else f"over {count_of(len(each), 'checkpoint')} of one run: {LOWER_BOUND}"
        for each in replicates
    ]
    if len(texts) == 2 and texts[0] != texts[1]:
        return f"standard errors of the first result {texts[0]}; of the second {texts[1]}"
    return f"standard errors {texts[0]}{' in each of the two results' * (len(texts) == 2)}"
