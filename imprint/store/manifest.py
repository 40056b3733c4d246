"""The manifest: everything about a store but its tensors, and how it is read without being believed.

A manifest is written once, with a checksum of its own, by `writing`, and read by `reading`. A later schema adds to
`_UPGRADES` a function that brings manifests of this one up to it: every store from version 0.1 on stays readable.
"""

import contextlib
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch

from imprint.errors import PlanError, StoreError
from imprint.plan import Plan, Question
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.history import MOST, Revision
from imprint.store.probing import ProbeValues
from imprint.store.records import Count, NotNegative, read
from imprint.store.request import ParameterSpec, Request, check_values
from imprint.store.values import Value, read_json, sealed, shown
from imprint.tensors.rows import parameters_of

SCHEMA = 11
MANIFEST = "manifest.json"
JOURNAL = "unfinished.json"  # in its place while the simulation runs
SOURCES = "sources.json"
LONGEST = 64 << 20  # bytes: it has hundreds of thousands of shards then


def _read_structure(value: Value) -> Any:
    """Read the structure of a batch, as `imprint.store.structure.flatten` makes it."""
    parts = value.mapping()
    if len(parts) != 1 or (kind := next(iter(parts))) not in ("tensor", "value", "dict", "list", "tuple"):
        value.refuse("one tensor, value, dict, list or tuple")
    content = parts[kind]
    if kind == "tensor":
        content.text()
    elif kind == "value" and isinstance(content.content, dict | list):
        content.refuse("a plain value")
    elif kind != "value":
        for item in content.mapping().values() if kind == "dict" else content.items():
            _read_structure(item)
    return value.content


@dataclass(frozen=True)
class Probes:
    """A few training examples, as a batch, and what the task computes on them at the first checkpoint's read-out point.

    See `imprint.store.probing`.
    """

    file: File
    structure: Annotated[Any, _read_structure]
    values: ProbeValues


@dataclass(frozen=True)
class Execution:
    """Where and how a simulation ran."""

    device: str
    threads: Count
    batch_size: Count


@dataclass(frozen=True)
class Cost:
    """What a simulation took, since it was last resumed if it was."""

    seconds: NotNegative
    peak_bytes: int | None
    resumed: bool


def add_costs(costs: Sequence[Cost]) -> Cost:
    """Add up what parts of a simulation took; the peak is that of the largest."""
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    return Cost(sum(cost.seconds for cost in costs), max(peaks, default=None), any(cost.resumed for cost in costs))


def find_other_circumstance(before: "Manifest", now: "Manifest") -> str | None:
    """Describe the first difference in where and how two simulations ran; None if there is none."""
    was, found = ({**vars(each.execution), **each.versions} for each in (before, now))
    names = (name for name in sorted({*was, *found}) if was.get(name) != found.get(name))
    return next((f"{name} was {was.get(name)}, then {found.get(name)}" for name in names), None)


def versions() -> dict[str, str]:
    """Return the versions of everything a result may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("imprint-attribution", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@dataclass(frozen=True)
class Manifest:
    """Everything about a store but its tensors.

    question: what scores read from the store answer.
    shared: how many training examples belong to more than one source; None if an earlier version wrote the store.
    history: how the store was changed since it was made, the latest at the end; `forgotten` earlier changes are no
        longer kept.
    note: whatever the caller wanted to keep, as JSON.
    warnings: what a reader must know before believing the imprints; repeated with every result.
    """

    request: Request
    sources: File
    probes: Probes | None
    checkpoints: tuple[Checkpoint, ...]
    execution: Execution
    cost: Cost
    question: Question = "expected"
    shared: int | None = None
    note: Any = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    history: tuple[Revision, ...] = ()
    forgotten: int = 0

    @property
    def n(self) -> int:
        """The number of training examples."""
        return self.request.n

    @property
    def dtype(self) -> str:
        """The dtype of the stored imprints."""
        return self.request.dtype

    @property
    def plan(self) -> Plan:
        return self.request.plan

    @property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Shapes and dtypes of the parameters that have imprints."""
        return self.request.parameters

    @property
    def fixed(self) -> dict[str, str]:
        """Hashes of the parameters that are not kept."""
        return self.request.fixed

    def files(self) -> Iterator[File]:
        """Go through all files of the store but the manifest."""
        yield self.sources
        if self.probes is not None:
            yield self.probes.file
        for checkpoint in self.checkpoints:
            yield from checkpoint.files()

    def to_json(self) -> dict[str, Any]:
        return sealed({"schema": SCHEMA, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest in a file."""
        return cls.from_json(read_json(path, LONGEST))

    @classmethod
    def from_json(cls, value: Value) -> "Manifest":
        content = {name: item for name, item in _unseal(value).content.items() if name != "schema"}
        value = Value(content, value.file)
        manifest = read(cls, value)
        _check_whole(manifest, value.record(*cls.__dataclass_fields__))
        return manifest


def _unseal(value: Value) -> Value:
    """Return the values under the seal of a manifest, as this schema has them."""
    schema = value.mapping().get("schema")
    if schema is None:
        value.fail("it has no schema version, so it is no manifest of a store")
    if schema.whole(1) > SCHEMA:
        raise StoreError(
            f"{value.file} has schema {schema.content}, this version reads up to {SCHEMA}: upgrade imprint."
        )
    if schema.content < _FIRST:
        raise StoreError(
            f"{value.file} was made before version 0.1, whose stores are the first to stay readable: make it again."
        )
    value = value.unsealed()
    for older in range(schema.content, SCHEMA):
        value = Value(_UPGRADES[older](value), value.file)
    return value


_FIRST = 7  # the schema of version 0.1


def _add_removals(value: Value) -> dict[str, Any]:
    """Return a manifest of schema 7, which knew no recorded runs, as schema 8 has it."""
    content = value.record("request", "checkpoints", *(set(value.mapping()) - {"request", "checkpoints"}))
    checkpoints = []
    for checkpoint in content["checkpoints"].items():
        parts = checkpoint.mapping()
        for name, added in (("decided", {"noise_rows": 0}), ("measured", _UNMEASURED)):
            if name in parts and parts[name].content is not None:
                parts[name] = Value({**added, **_plain(parts[name])}, value.file)
        checkpoints.append({"noise": None, **{name: part.content for name, part in parts.items()}})
    request = {"buffers": {}, "recording": None, **_plain(content["request"])}
    return {"question": "expected", **value.content, "request": request, "checkpoints": checkpoints}


def _add_runs(value: Value) -> dict[str, Any]:
    """Return a manifest of schema 8, which did not tell training runs apart, as schema 9 has it: all are of one run."""
    request = value.record("request", *(set(value.mapping()) - {"request"}))["request"].mapping()
    states = request["states"].items() if "states" in request else ()
    runs = {"runs": [0] * len(states)}
    return {**value.content, "request": {**runs, **{name: item.content for name, item in request.items()}}}


def _add_shared(value: Value) -> dict[str, Any]:
    """Return a manifest of schema 9, which did not say whether sources overlap, as schema 10 has it."""
    return {"shared": None, **value.content}


def _add_history(value: Value) -> dict[str, Any]:
    """Return a manifest of schema 10, whose store could not be changed, as schema 11 has it."""
    request = value.record("request", *(set(value.mapping()) - {"request"}))["request"].mapping()
    content = {"members": None, **{name: item.content for name, item in request.items()}}
    return {"history": [], "forgotten": 0, **value.content, "request": content}


def _plain(value: Value) -> dict[str, Any]:
    return {name: item.content for name, item in value.mapping().items()}


_UNMEASURED = {"chaos": None, "deviation": None, "start_lost": None}
_UPGRADES: dict[int, Callable[[Value], dict[str, Any]]] = {
    **{7: _add_removals, 8: _add_runs, 9: _add_shared, 10: _add_history}
}
"""For each earlier schema a function that returns the content of a manifest as the next schema has it."""


def _check_whole(manifest: Manifest, values: dict[str, Value]) -> None:
    """Refuse fields that do not fit each other."""
    checkpoints, request = values["checkpoints"], manifest.request
    if "torch" not in manifest.versions:
        values["versions"].fail("versions.torch is missing")
    if manifest.question != request.plan.rules.question:
        values["question"].refuse(f"{request.plan.rules.question!r}, which the engine of the plan answers")
    if manifest.shared is not None and manifest.shared > request.n:
        values["shared"].refuse(f"at most the {request.n} training examples")
    if len(manifest.history) > MOST:
        values["history"].refuse(f"at most {MOST} changes")
    if len(request.states) != len(manifest.checkpoints):
        checkpoints.fail("checkpoints and request.states are not equally many")
    if not 0 < sum(checkpoint.weight for checkpoint in manifest.checkpoints) < math.inf:
        checkpoints.fail("the weights of the checkpoints have no positive and finite sum")
    if manifest.probes is not None:
        values["probes"] = values["probes"].record("file", "structure", "values")["values"]
        check_values(manifest.probes.values, values["probes"])
        if len(manifest.probes.values.losses) != len(request.probes.examples):
            values["probes"].fail("probes.values.losses and request.probes.examples are not equally many")
    for index, (checkpoint, value) in enumerate(zip(manifest.checkpoints, checkpoints.items(), strict=True)):
        check_planned(checkpoint, index, manifest.plan, len(manifest.checkpoints), value)
        _check_files(checkpoint, manifest.plan, value)
        for layer in checkpoint.decided.layers if checkpoint.decided else ():
            weight = request.parameters.get(parameters_of(layer)[0])
            if weight is None or len(weight.shape) != 2:
                value.fail(f"{value.field}.decided.layers has {layer!r}, which is no linear layer of its parameters")
    for file in (manifest.sources, *([manifest.probes.file] if manifest.probes else [])):
        if file.rows is not None:
            checkpoints.fail(f"{file.path} holds no imprints and cannot have rows")
    path, entries = Counter(file.path for file in manifest.files()).most_common(1)[0]
    if entries > 1:
        checkpoints.fail(f"{entries} entries stand for the same file {path}")


def check_planned(checkpoint: Checkpoint, index: int, plan: Plan, count: int, value: Value) -> None:
    """Refuse a checkpoint, of so many, that was simulated otherwise than the plan says."""
    try:
        settings = plan.at(index, count)
    except PlanError as error:
        value.fail(f"plan: {str(error).rstrip('.')}")
    planned: dict[str, float | str | None] = {"damping": settings.damping, "weight": settings.weight}
    if plan.rules.question != "this_run":  # whose steps are those of the recording
        planned["steps"] = settings.steps
    if (settings.weight > 0) != (checkpoint.decided is not None):
        value.fail(f"{value.field}.decided must be there where the weight is above 0, and nowhere else")
    for name, expected in planned.items():
        if (found := getattr(checkpoint, name)) != expected:
            value.fail(f"{value.field}.{name} is {shown(found)}, by the plan it is {shown(expected)}")
    if checkpoint.decided is None:
        return
    decided: dict[str, float | None] = {}
    if settings.lr != "auto":
        decided["lr"] = settings.lr
    if not plan.perturbs:
        decided["epsilon"] = None
    elif plan.epsilon != "auto":
        decided["epsilon"] = float(plan.epsilon)
    elif checkpoint.decided.epsilon is None:
        value.fail(f"{value.field}.decided.epsilon is missing")
    for name, expected in decided.items():
        if (found := getattr(checkpoint.decided, name)) != expected:
            value.fail(f"{value.field}.decided.{name} is {shown(found)}, by the plan it is {shown(expected)}")


def _check_files(checkpoint: Checkpoint, plan: Plan, value: Value) -> None:
    """Refuse a checkpoint that counts without all of its files, and one that does not count with any."""
    wanted = {
        "base": checkpoint.weight > 0,
        "imprints": checkpoint.weight > 0,
        "midpoints": checkpoint.weight > 0 and plan.keep_pair,
    }
    for name, want in wanted.items():
        if bool(getattr(checkpoint, name)) != want:
            value.fail(f"{value.field}.{name} {'is missing' if want else 'has no place in this plan'}")
    if bool(checkpoint.noise) != bool(checkpoint.decided and checkpoint.decided.noise_rows):
        value.fail(f"{value.field}.noise and {value.field}.decided.noise_rows belong together")
    for name in ("base", "basis", "noise"):
        if (file := getattr(checkpoint, name)) is not None and file.rows is not None:
            value.fail(f"{value.field}.{name}.rows must be null: a {name} holds no sources")
    layers = checkpoint.decided.layers if checkpoint.decided else ()
    if plan.form == "projected" and (bool(checkpoint.basis) != (checkpoint.weight > 0) or layers):
        value.fail(f"{value.field} has a basis and no layers where imprints are projected")
    if plan.form != "projected" and bool(checkpoint.basis) != bool(layers):
        value.fail(f"{value.field}.basis and {value.field}.decided.layers belong together")
    if checkpoint.basis is not None and (checkpoint.decided is None or checkpoint.decided.directions is None):
        value.fail(f"{value.field}.basis has no place without directions")
    for name in ("imprints", "midpoints"):
        stop = 0
        for index, file in enumerate(getattr(checkpoint, name)):
            if file.rows is None or file.rows[0] != stop:
                value.fail(f"{value.field}.{name}[{index}].rows must begin at {stop}, got {file.rows}")
            stop = file.rows[1]
