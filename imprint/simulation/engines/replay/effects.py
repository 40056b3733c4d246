"""What removals, and perturbed starts, do to F on some training examples: the size of an effect, and of noise."""

import torch
from torch import Tensor

from imprint.data import Data, spread_examples
from imprint.sources import Members
from imprint.task import Functional, Parameters
from imprint.tensors.vectors import root_mean_square

_EXAMPLES = 256


class Effects:
    """Measures F on up to 256 training examples, in evaluation mode, relative to its values at the recorded end."""

    def __init__(self, functional: Functional, end: Parameters, data: Data) -> None:
        self._functional, self._data = functional, data
        self._examples = spread_examples(len(data), _EXAMPLES)
        self._at_end = self._measure(end)

    def _measure(self, theta: Parameters) -> Tensor:
        with torch.no_grad(), self._functional.task.evaluating():
            parts = self._examples.split(self._data.batch_size)
            found = [self._functional.measures(theta, self._data.gather(part), len(part)) for part in parts]
            return torch.cat(found).double().cpu()

    def change(self, theta: Parameters, without: Members | None = None) -> float:
        """Return the root mean square change of F at other parameters, on examples that are not among `without`."""
        return self.difference(self._measure(theta), self._at_end, without)

    def compare(self, theta: Parameters, other: Parameters, without: Members | None = None) -> float:
        """Return the root mean square difference of F between two ends."""
        return self.difference(self._measure(theta), self._measure(other), without)

    def difference(self, one: Tensor, two: Tensor, without: Members | None) -> float:
        counted = torch.ones(len(one), dtype=torch.bool)
        if without is not None:
            counted = ~torch.isin(self._examples, torch.from_numpy(without))
        if not bool(counted.any()):  # the source is all there is
            counted[:] = True
        return root_mean_square((one - two)[counted])
