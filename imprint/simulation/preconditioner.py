"""Adam's preconditioner M = diag(√v̂ + 1e-8), from second moments v̂ that stay as they are throughout a simulation.

`inputs` makes one for a checkpoint whose plan wants it, from the moments that were recorded with the checkpoint or else
from gradients there. The descent divides every step by M; plain gradient descent is M = I.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from imprint.errors import SimulationError
from imprint.task import Parameters

_ADAMS = 1e-8  # what Adam adds to √v̂
_SCALES = 0.1, 1000.0  # of recorded √v̂ beside estimated: gradients shrink while a model learns, and do not grow
_UNFELT = 1e-3**0.5  # √(1 − β₂) of Adam's β₂ = 0.999: after a gradient g, its √v̂ is no less than this times |g|


@dataclass(frozen=True)
class Preconditioner:
    """M, one value for each value of the selected parameters.

    It is infinite where v̂ is 0: there Adam has seen no gradient and moved nothing, and 1e-8 alone would let the first
    one that comes throw the parameter far away. `compare` makes it 0 where training has felt nothing
    but rounding.
    """

    diagonal: Parameters
    moments: Literal["recorded", "estimated"]

    @classmethod
    def adam(cls, moments: Parameters, origin: Literal["recorded", "estimated"]) -> "Preconditioner":
        """Return √v̂ + 1e-8 of second moments that are finite and not negative."""
        if not any(bool(v.any()) for v in moments.values()):
            raise SimulationError(
                f"the {origin} second moments are all 0, so that nothing would move: was the optimiser's state kept "
                "before its first step, or do the selected parameters not enter the loss?"
            )
        return cls({name: torch.where(v > 0, v.sqrt() + _ADAMS, torch.inf) for name, v in moments.items()}, origin)

    @property
    def unmoved(self) -> float:
        """The share of values that do not move, because their second moment is 0 or nothing but rounding."""
        still = sum(int(diagonal.isinf().sum()) for diagonal in self.diagonal.values())
        return still / sum(diagonal.numel() for diagonal in self.diagonal.values())


@dataclass(frozen=True)
class Compared:
    """Recorded second moments beside those of gradients in evaluation mode at the checkpoint.

    moments: the recorded ones, 0 where training has felt nothing; `unfelt` counts these values by parameter.
    ratio: the median over values of √(recorded / estimated): far from 1 where they are of losses on different scales.
    """

    moments: Parameters
    unfelt: dict[str, int]
    ratio: float

    @property
    def fits(self) -> bool:
        """Whether both are of losses on the same scale."""
        low, high = _SCALES
        return low <= self.ratio <= high

    @property
    def fitted(self) -> Parameters:
        """The moments on the scale of the task's loss."""
        return self.moments if self.fits else {name: v / self.ratio**2 for name, v in self.moments.items()}


def compare(recorded: Parameters, estimated: Parameters) -> Compared:
    """Find the values on which training has had no gradient, though evaluation mode gives them one.

    A bias before batch norm is one: in training mode the norm takes it out again, so that its gradient is rounding and
    √v̂ about 1e-8; in evaluation mode it shifts the outputs. To divide its gradient by 1e-8 would throw it far away,
    where training never moved it. Adam itself never divides a gradient by less than √(1 − β₂) of it: where √v̂ is below
    that share of the gradients here (both in units of the median ratio), they are not those it was trained with.
    """
    ratios = {name: (recorded[name].double() / e.double()).sqrt() for name, e in estimated.items()}
    known = torch.cat([r[(r > 0) & r.isfinite()].flatten() for r in ratios.values()])
    if not len(known):
        return Compared(recorded, {}, 1.0)
    median = float(known.median())
    unfelt = {name: (recorded[name] > 0) & (r < _UNFELT * median) for name, r in ratios.items()}
    kept = {name: torch.where(unfelt[name], 0.0, v) for name, v in recorded.items()}
    return Compared(kept, {name: n for name, found in unfelt.items() if (n := int(found.sum()))}, median)
