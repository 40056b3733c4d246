"""Stops a simulation whose numbers are not finite or run away, and says where that began and what to do."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from imprint.data import Data
from imprint.errors import DivergenceError, SimulationError
from imprint.simulation.curvature import Spectrum, longer
from imprint.simulation.derivatives import Weighted, gradient
from imprint.sources import Sources
from imprint.task import Functional, Parameters
from imprint.tensors.vectors import row_norms

_RUNAWAY = 1e3  # times what a steady pull, as strong as at the beginning, would have given by now
_BEGINNING = 3  # steps in which the pull of a source shows


def advise(lr: float, shift: float, momentum: float, curvature: Spectrum) -> str:
    """Say what to do about a path that diverges, given the curvature that was measured and what damping adds to it."""
    sharpest = max(curvature.largest, -curvature.smallest) + shift
    holds = f" A step below {2 * longer(momentum) / sharpest:.2g} holds;" if sharpest > 0 else ""
    return (
        f"The step is lr={lr:.3g} and the measured curvature runs from {curvature.smallest:.3g} to "
        f'{curvature.largest:.3g}.{holds} lr="auto" chooses one; fewer steps or some damping help where curvature is '
        "negative."
    )


def refuse_losses(sources: Sources, losses: Tensor, examples: Tensor, step: int) -> None:
    """Refuse losses that are not finite, and name the first."""
    position = int((~losses.isfinite()).nonzero()[0, 0])
    example, value = int(examples[position]), float(losses[position])
    owner = sources.owner(example)
    if step > 0:
        raise DivergenceError(
            f"the loss of training example {example}{owner} is {value} at step {step}: the unperturbed path left the "
            "region where the loss is finite."
        )
    raise SimulationError(
        f"the loss of training example {example}{owner} is {value} at step 0: look for NaN or infinity in that "
        "example, or a loss that is undefined there."
    )


def refuse_gradients(
    task: Functional, theta: Parameters, data: Data, sources: Sources, parts: Iterable[Weighted]
) -> None:
    """Name the example whose gradient is not finite, if there is one."""
    for part in parts:
        for position, example in enumerate(part.examples.tolist()):
            batch = data.gather(torch.tensor([example]))
            slope = gradient(task, theta, part.weights[position : position + 1], batch, plain=True)[0]
            bad = next((n for n, t in slope.items() if not bool(t.isfinite().all())), None)
            if bad is not None:
                raise SimulationError(
                    f"the gradient of training example {example}{sources.owner(example)} is not finite at step 0, "
                    f"first in parameter {bad!r}: the loss has no derivative there."
                )


class Watch:
    """Looks at the responses after every step and stops what is not finite or runs away.

    A runaway has grown far beyond its beginning, and to where removing the source (`removal` times its response) would
    move the parameters by more than their own `length`: a source that is only slow to show its pull does not.
    """

    def __init__(self, ids: Sequence[str], length: float, momentum: float, removal: float) -> None:
        self._ids, self._length, self._removal = ids, length, removal
        self._runaway = _RUNAWAY / (1 - momentum)  # which takes a while to gather speed
        self.pull: Tensor | None = None  # of each row: the largest displacement per step at the beginning

    def __call__(self, responses: Parameters, step: int) -> None:
        norms = row_norms(responses)
        largest = float(norms.max())
        if not np.isfinite(largest):
            self._refuse_infinite(responses, int((~norms.isfinite()).nonzero()[0, 0]), step)
        steady = norms / (step + 1)
        if self.pull is None or step < _BEGINNING:
            self.pull = steady if self.pull is None else torch.maximum(self.pull, steady)
        growth = torch.where(self.pull > 0, steady / self.pull, 0.0)
        growth = torch.where(self._removal * norms > self._length, growth, 0.0)
        if float(growth.max()) > self._runaway:
            index = int(growth.argmax())
            raise DivergenceError(
                f"the imprint of source {self._source(index)!r} runs away: its norm is {float(norms[index]):.3g} "
                f"at step {step}, {float(growth[index]):.1g} times what its first steps led to expect."
            )

    def _refuse_infinite(self, responses: Parameters, index: int, step: int) -> None:
        bad = next((n for n, t in responses.items() if not bool(t[index].isfinite().all())), "all parameters")
        if step > 0:
            raise DivergenceError(
                f"the imprint of source {self._source(index)!r} is not finite at step {step}, first in parameter "
                f"{bad!r}: the response has diverged."
            )
        raise SimulationError(
            f"the imprint of source {self._source(index)!r} is not finite at step 0, first in parameter {bad!r}: look "
            "for NaN or infinity in the source's examples, or a loss whose derivative is undefined there."
        )

    def _source(self, row: int) -> str:
        return self._ids[row % len(self._ids)]  # the lighter sides follow the heavier ones
