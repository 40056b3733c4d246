"""What a recording says about each step of a training run, and about its optimiser."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from imprint.store.fingerprint import DataPrint
from imprint.task import Parameters

Settings = dict[str, Any]
"""The settings of a parameter group, such as lr, betas and weight_decay, as plain JSON values."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of a step: the sum of the examples' losses, divided by `normaliser`.

    examples: the indices of its training examples, in order; a replay never splits or pads them in another way.
    loss: the value that was minimised, if the training loop reported it.
    """

    examples: tuple[int, ...]
    normaliser: float
    loss: float | None = None


@dataclass(frozen=True)
class Clipping:
    """How gradients were clipped before a step: by their total norm, or value by value."""

    kind: Literal["norm", "value"]
    limit: float
    norm_type: float = 2.0


@dataclass(frozen=True)
class Step:
    """One step of the optimiser.

    seed: seeds the random numbers of the step; micro-batch i draws from `micro_seed(seed, i)`.
    groups: the settings of each parameter group at this step.
    gradient_norm: the Euclidean norm of all gradients before clipping; None if it is unknown (`closure`).
    missing: the optimiser's parameters that had no gradient (None), which a step leaves alone.
    closure: whether the optimiser evaluates the loss itself, several times (such as LBFGS).
    left: the settings of each parameter group that the optimiser changed itself in this step, as it left them, such as
        a step size that it adapts: it remembers them, and each run has its own. Empty if there are none; None if that
        is not known, as in recordings of versions that did not look.
    """

    batches: tuple[MicroBatch, ...]
    seed: int
    groups: tuple[Settings, ...]
    gradient_norm: float | None = None
    clipping: Clipping | None = None
    missing: frozenset[str] = frozenset()
    closure: bool = False
    left: tuple[Settings, ...] | None = None


@dataclass(frozen=True)
class OptimiserState:
    """What an optimiser remembers between steps: for each parameter, tensors and plain numbers by their name."""

    tensors: dict[str, dict[str, torch.Tensor]]
    numbers: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Circumstances:
    """How forward passes ran in training.

    evaluating: names of the modules that were in evaluation mode ("" is the model itself).
    autocast: the dtype that torch.autocast used, such as "bfloat16"; None if it was off.
    matmul_precision: of float32 matrix products, as torch.get_float32_matmul_precision() says.
    """

    device: str
    evaluating: frozenset[str] = frozenset()
    autocast: str | None = None
    matmul_precision: str = "highest"


class Run(Protocol):
    """A finished recording as a replay reads it; `imprint.recording.reading.Recording` is one on disk.

    n: the number of training examples.
    groups: the names of the parameters in each group of the optimiser.
    checkpoints: after how many steps a whole state was kept; the first is 0, the last is the number of steps.
    sha256: identifies the recording in stores.
    data: hashes of the training data, as `imprint.store.fingerprint` makes them; None if they are not known.
    seconds: how long the training took; 0 if that is not known.
    """

    @property
    def n(self) -> int: ...
    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def optimiser(self) -> type[torch.optim.Optimizer]: ...
    @property
    def groups(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def circumstances(self) -> Circumstances: ...
    @property
    def checkpoints(self) -> tuple[int, ...]: ...
    @property
    def sha256(self) -> str: ...
    @property
    def data(self) -> DataPrint | None: ...
    @property
    def seconds(self) -> float: ...

    def state(self, step: int) -> Parameters:
        """Load the trained parameters and the buffers after so many steps, which must be one of `checkpoints`."""

    def optimiser_state(self, step: int) -> OptimiserState:
        """Load what the optimiser remembered after so many steps, which must be one of `checkpoints`."""


def micro_seed(seed: int, batch: int) -> int:
    """Return the seed of a micro-batch of a step: an own stream for each, whatever is drawn between them.

    >>> micro_seed(7, 0)
    7
    """
    return (seed + batch * 0x9E3779B97F4A7C15) % 2**63
