"""The request of a store: everything its imprints depend on, as far as it can be known.

A store is resumed, reused and repeated for the same request only; `imprint.store.comparison` names the difference.
"""

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch

from imprint.errors import PlanError
from imprint.plan import Plan
from imprint.store.probe_examples import PROBES
from imprint.store.probing import ELSEWHERE, GROUPS, ProbeValues
from imprint.store.records import Checksum, Count, read
from imprint.store.values import Value, clipped
from imprint.task import Task

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_PARAMETER_DTYPES = {str(dtype): dtype for dtype in (*DTYPES.values(), torch.float16)}


def read_plan(value: Value) -> Plan:
    """Read a plan; refuse what is none by its place in the file."""
    value.mapping()
    try:
        return Plan.from_json(value.content)
    except (PlanError, TypeError, ValueError) as error:
        value.fail(clipped(f"plan: {str(error).rstrip('.')}", 200))


def _read_shape(value: Value) -> tuple[int, ...]:
    if math.prod(shape := value.wholes()) > 2**62:
        value.refuse("the shape of a tensor")
    return shape


def _read_stored_dtype(value: Value) -> str:
    if value.text() not in DTYPES:
        value.refuse(f"one of {', '.join(DTYPES)}")
    return value.text()


def _read_dtype(value: Value) -> str:
    if value.text() not in _PARAMETER_DTYPES:
        value.refuse(f"one of {', '.join(sorted(_PARAMETER_DTYPES))}")
    return value.text()


@dataclass(frozen=True)
class ParameterSpec:
    """The shape and the dtype of a parameter."""

    shape: Annotated[tuple[int, ...], _read_shape]
    dtype: Annotated[str, _read_dtype]

    def __str__(self) -> str:
        return f"{self.shape} of {self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as an object of torch."""
        return _PARAMETER_DTYPES[self.dtype]

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": self.dtype}


def specify(task: Task) -> dict[str, ParameterSpec]:
    """Return shapes and dtypes of the selected parameters: what a store must be read with."""
    selected = {name: task.model.get_parameter(name) for name in task.names}
    return {name: ParameterSpec(tuple(p.shape), str(p.dtype)) for name, p in selected.items()}


def describe(task: Task) -> dict[str, dict[str, Any]]:
    """Return the same in plain JSON values."""
    return {name: spec.to_json() for name, spec in specify(task).items()}


@dataclass(frozen=True)
class DataHashes:
    """Two hashes of one dataset: of `all` of it, and of 1,024 `sampled` examples; None for one that was not taken."""

    all: Checksum | None
    sampled: Checksum | None


@dataclass(frozen=True)
class Probed:
    """The training examples that the task is recognised by, and its values at the first checkpoint."""

    examples: list[int]
    values: ProbeValues


@dataclass(frozen=True)
class Request:
    """Everything the imprints depend on, as far as it can be known.

    fixed: hashes of the parameters that the store does not keep. Training does not change them, so they come from the
        model.
    states, moments: hashes of the checkpoints, and of the second moments recorded with them.
    modules: the plain settings of the model's modules.
    regulariser: its values at and around the first checkpoint.
    buffers: the floating-point buffers that a recorded run changed, such as running statistics: rows of imprints have
        them beside the parameters.
    recording: identifies the recorded run that was repeated.
    runs: the training run that each checkpoint is of, counted from 0. Imprints do not depend on it, their errors do.
    sources, members: hashes of ids, names and members of the sources, the second from the digests of members that the
        store keeps: it can still be taken when sources are dropped. Earlier versions had only the first; where sources
        were dropped or stores merged, both are the second.
    """

    n: Count
    dtype: Annotated[str, _read_stored_dtype]
    plan: Annotated[Plan, read_plan]
    parameters: dict[str, ParameterSpec]
    fixed: dict[str, Checksum]
    states: tuple[Checksum, ...]
    moments: tuple[Checksum | None, ...]
    sources: Checksum
    data: DataHashes
    probes: Probed
    modules: dict[str, dict[str, Any]]
    regulariser: tuple[float, ...]
    buffers: dict[str, ParameterSpec] = field(default_factory=dict)
    recording: Checksum | None = None
    runs: tuple[int, ...] = ()
    members: Checksum | None = None

    @property
    def displaced(self) -> dict[str, ParameterSpec]:
        """Everything that imprints displace: the selected parameters, and buffers."""
        return {**self.parameters, **self.buffers}

    @classmethod
    def from_json(cls, value: Value) -> "Request":
        request, values = read(cls, value), value.record(*cls.__dataclass_fields__)
        if not request.parameters:
            values["parameters"].refuse("at least one parameter")
        if both := request.fixed.keys() & request.parameters.keys():
            values["fixed"].fail(f"fixed has {min(both)!r}, which has imprints")
        if both := request.buffers.keys() & {*request.parameters, *request.fixed}:
            values["buffers"].fail(f"buffers has {min(both)!r}, which is a parameter")
        if (request.plan.rules.question == "this_run") != (request.recording is not None):
            values["recording"].refuse("there for engines that repeat a recorded run, and for no others")
        if len(request.moments) != len(request.states):
            values["moments"].refuse("one for each checkpoint")
        if len(request.runs) != len(request.states):
            values["runs"].refuse("one for each checkpoint")
        for module in values["modules"].mapping().values():
            module.mapping().get("kind", Value(None, module.file, f"{module.field}.kind")).text()
        _check_probes(request.probes, request.n, values["probes"])
        return request


def _check_probes(probes: Probed, n: int, value: Value) -> None:
    """Refuse probes that are no examples of the data, or too many, and values of others."""
    values, found = probes.values, value.record("examples", "values")
    if not len(probes.examples) == len(values.losses) <= PROBES or max(probes.examples, default=0) >= n:
        found["examples"].refuse(f"as many of the {n} examples as there are losses, and at most {PROBES}")
    check_values(values, found["values"])
    if values.outputs is not None and len(values.outputs) > len(ELSEWHERE):
        found["values"].fail(f"{found['values'].field}.outputs must be values at {len(ELSEWHERE)} places at most")
    if len(values.gradients) > 2 * GROUPS:
        found["values"].fail(f"{found['values'].field}.gradients must be {2 * GROUPS} numbers at most")


def check_values(values: ProbeValues, value: Value) -> None:
    """Refuse losses around a checkpoint that are of other probes than those at it."""
    if len(values.moved) > len(ELSEWHERE):
        value.fail(f"{value.field}.moved must be values at {len(ELSEWHERE)} places at most")
    for index, found in enumerate(values.moved):
        if len(found) != len(values.losses):
            value.fail(f"{value.field}.moved[{index}] must be {len(values.losses)} values, one for each probe")
