"""Describes devices by a few measured constants, each with its source, and says how long work takes on them.

`benchmarks/cost_model.py measure` measures them; files of such profiles lie beside it.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from imprint.advice.shapes import Operations, Work
from imprint.errors import ImprintError


class ProfileError(ImprintError):
    """A profile of a device that cannot be used."""


@dataclass(frozen=True)
class Constant:
    """A measured value, and where it was measured."""

    value: float
    source: str


NAMES = {
    "dispatch": "seconds to start an operation",
    "bandwidth": "bytes of imprints read from memory per second",
    "block operations, forward": "operations that a block's forward pass starts",
    "block operations, training": "operations that a block's forward and backward passes start",
    "optimiser bytes": "bytes that Adam moves per value and step",
    "recording": "seconds that recording adds to a step, beside reading the gradient",
    "recording bytes": "bytes that recording moves per value and step, for the gradient norm",
    "preparation": "seconds of a simulation before its first step and after its last, beside passes of the model",
    "stacked work": "FLOPs of a row of a stack, over those of a plain training",
    "stacked operations": "operations of a step of a stack, over those of a plain step",
    "response": "forward passes of a source's response, per step and example",
    "response, adapter": "the same where the base is frozen under an adapter",
    "settling": "forward passes of a batch that look at the curvature before a path, beside one step",
    "settling, adapter": "the same where the base is frozen under an adapter",
    "product": "forward passes of a curvature product, per example",
    "settling, spectral": "forward passes of all examples in a spectral simulation, beside products and gradients",
    "jvp": "forward passes of the blocks behind, per source and query",
    "jvp, adapter": "the same where the base is frozen under an adapter",
    "jvp operations": "operations of a readout, over those of a forward pass",
    "disk": "bytes of a store written per second",
    "memory": "bytes of memory",
}
"""What the constants of a profile are."""


@dataclass(frozen=True)
class Device:
    """A device, as its constants describe it.

    overlaps: whether starting, computing and moving go on at the same time, as on a GPU; on a CPU they take turns.
    rates: (width, FLOP/s) of the forward pass of blocks and of forward and backward passes, by rising width.
    """

    name: str
    overlaps: bool
    constants: Mapping[str, Constant]
    forward_rates: Sequence[tuple[float, float]]
    training_rates: Sequence[tuple[float, float]]
    rates_source: str

    def value(self, name: str) -> float:
        """Return a constant; an error says which measurement is missing."""
        if name not in self.constants:
            raise ProfileError(
                f"the profile of {self.name} has no {name!r} ({NAMES.get(name, 'unknown to the model')}): measure it "
                "with benchmarks/cost_model.py measure."
            )
        return self.constants[name].value

    def knows(self, *names: str) -> bool:
        """Tell whether these constants were measured."""
        return all(name in self.constants for name in names)

    @property
    def operations(self) -> Operations:
        """How many operations the framework starts here."""
        return Operations(self.value("block operations, forward"), self.value("block operations, training"))

    def parts(self, work: Work, width: float) -> dict[str, float]:
        """Return the seconds of each resource that some work takes alone; of the disk only where its rate is known."""
        found = {
            "starting operations": work.operations * self.value("dispatch"),
            "computing": work.forward / interpolate(self.forward_rates, width)
            + work.training / interpolate(self.training_rates, width),
            "memory bandwidth": work.moved / self.value("bandwidth"),
        }
        if self.knows("disk"):
            found["disk"] = work.written / self.value("disk")
        return found

    def seconds(self, work: Work, width: float) -> float:
        """Return how long some work takes: all of its parts in turn, or as long as the longest where they overlap."""
        parts = self.parts(work, width)
        if not self.overlaps:
            return sum(parts.values())
        written = parts.pop("disk", 0.0)  # stores are written when their rows are ready
        return max(parts.values()) + written

    def binding(self, work: Work, width: float) -> str:
        """Name the resource that takes longest."""
        parts = self.parts(work, width)
        return max(parts, key=lambda name: parts[name])

    def to_json(self) -> dict[str, Any]:
        """Return the profile as plain values."""
        return {
            "name": self.name,
            "overlaps": self.overlaps,
            "constants": {
                name: {"value": each.value, "source": each.source, "what": NAMES[name]}
                for name, each in self.constants.items()
            },
            "forward_rates": [list(each) for each in self.forward_rates],
            "training_rates": [list(each) for each in self.training_rates],
            "rates_source": self.rates_source,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Device":
        """Read a profile; one that names constants without a source, or unknown ones, is refused."""
        try:
            constants = {
                name: Constant(float(each["value"]), str(each["source"])) for name, each in content["constants"].items()
            }
            rates = {
                name: tuple((float(width), float(rate)) for width, rate in content[name])
                for name in ("forward_rates", "training_rates")
            }
            found = cls(
                str(content["name"]),
                bool(content["overlaps"]),
                constants,
                **rates,
                rates_source=content["rates_source"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ProfileError(f"this is no profile of a device: {type(error).__name__} {error}.") from error
        if unknown := constants.keys() - NAMES:
            raise ProfileError(f"the profile of {found.name} has unknown constants: {', '.join(sorted(unknown))}.")
        if bad := [name for name, each in constants.items() if not (each.source and math.isfinite(each.value))]:
            raise ProfileError(f"constants of {found.name} without a source, or not finite: {', '.join(sorted(bad))}.")
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Device":
        """Read the profile from a file that `measure` wrote."""
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls.from_json(content.get("profile", content))


def interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate between points on logarithmic axes; beyond the first and the last, their values hold.

    >>> interpolate([(64, 1.0), (256, 4.0)], 128)
    2.0
    >>> interpolate([(64, 1.0), (256, 4.0)], 4096)
    4.0
    """
    if not points:
        raise ProfileError("the profile has no rates.")
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            share = math.log(x / left) / math.log(right / left)
            return low * math.exp(share * math.log(high / low))
    return points[0][1] if x < points[0][0] else points[-1][1]
