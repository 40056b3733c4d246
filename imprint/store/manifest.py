"""The manifest: everything about a store but its tensors, and how it is read without being believed.

A manifest is written once, with a checksum of its own, by `writing`, and read by `reading`. A later schema
brings a function that turns this one into it, so that every store from version 0.1 on stays readable.
"""

import contextlib
import math
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from imprint.errors import PlanError, StoreError
from imprint.plan import Plan
from imprint.store.checkpoint import Checkpoint, File
from imprint.store.probing import ELSEWHERE, GROUPS, PROBES, SINGLE, Seen, Values
from imprint.store.records import read
from imprint.store.values import Value, clipped, read_json, sealed, shown

SCHEMA = 7
MANIFEST = "manifest.json"
SOURCES = "sources.json"
FINGERPRINTS = ("states", "moments", "sources", "data", "losses", "probes", "modules", "regulariser")
_ASKED = ("n", "dtype", "plan", "parameters", "fixed")
LONGEST = 64 << 20  # bytes: it has hundreds of thousands of shards then
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_PARAMETER_DTYPES = {str(dtype) for dtype in (*DTYPES.values(), torch.float16)}


@dataclass(frozen=True)
class Probes:
    """A few training examples, as a batch, and their losses at the first checkpoint's read-out point.

    moved: losses at places around it, and `precision` the coarsest rounding on the way; see `imprint.store.probing`.
    """

    file: File
    structure: Any
    losses: list[float]
    moved: list[Values] = field(default_factory=list)
    precision: float = SINGLE

    @property
    def seen(self) -> Seen:
        """What the task of the store computed on them."""
        return Seen(self.losses, self.moved, None, self.precision)

    @classmethod
    def from_json(cls, value: Value) -> "Probes":
        values = value.record(*_names(cls))
        _check_structure(values["structure"])
        losses = list(values["losses"].numbers())
        _check_moved(values["moved"], len(losses))
        precision = values["precision"].positive()
        return cls(read(File, values["file"]), values["structure"].content, losses, values["moved"].content, precision)


@dataclass(frozen=True)
class Manifest:
    """Everything about a store but its tensors.

    fixed: hashes of the parameters that are not kept, since training leaves them alone: they are the model's own.
    fingerprints: what could be known of the inputs, under the names in `FINGERPRINTS`.
    execution: where and how the simulation ran, and `cost` what it took.
    note: whatever the caller wanted to keep, as JSON.
    warnings: what a reader must know before believing the imprints; repeated with every result.
    """

    n: int
    dtype: str
    plan: Plan
    parameters: dict[str, dict[str, Any]]
    fixed: dict[str, str]
    fingerprints: dict[str, Any]
    sources: File
    probes: Probes | None
    checkpoints: tuple[Checkpoint, ...]
    execution: dict[str, Any]
    cost: dict[str, Any] = field(default_factory=dict)
    note: Any = None
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=lambda: versions())
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def request(self) -> dict[str, Any]:
        """Everything the imprints depend on, as far as it could be known."""
        asked = {name: getattr(self, name) for name in _ASKED}
        return {**asked, "plan": self.plan.to_json(), **self.fingerprints}

    def files(self) -> Iterator[File]:
        """All files of the store but the manifest."""
        yield self.sources
        if self.probes is not None:
            yield self.probes.file
        for checkpoint in self.checkpoints:
            yield from checkpoint.files()

    def to_json(self) -> dict[str, Any]:
        return sealed({"schema": SCHEMA, **asdict(self), "plan": self.plan.to_json()})

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read the manifest in a file."""
        return cls.from_json(read_json(path, LONGEST))

    @classmethod
    def from_json(cls, value: Value) -> "Manifest":
        values = _opened(value).record("schema", *_names(cls))
        _check_asked(values)
        _check_fingerprints(values["fingerprints"].record(*FINGERPRINTS), values["n"].content)
        _check_execution(values["execution"].mapping())
        _check_cost(values["cost"])
        versions = {name: item.text() for name, item in values["versions"].mapping().items()}
        if "torch" not in versions:
            values["versions"].fail("versions.torch is missing")
        manifest = cls(
            n=values["n"].content,
            dtype=values["dtype"].content,
            plan=_plan(values["plan"]),
            parameters=values["parameters"].content,
            fixed=values["fixed"].content,
            fingerprints=values["fingerprints"].content,
            sources=read(File, values["sources"]),
            probes=None if values["probes"].content is None else Probes.from_json(values["probes"]),
            checkpoints=tuple(read(Checkpoint, item) for item in values["checkpoints"].items()),
            execution=values["execution"].content,
            cost=values["cost"].content,
            note=values["note"].content,
            warnings=values["warnings"].texts(),
            versions=versions,
            created=values["created"].text(),
        )
        _check_whole(manifest, values)
        return manifest


def _names(kind: type) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


def _opened(value: Value) -> Value:
    """Return the values under the seal of a manifest of this schema."""
    schema = value.mapping().get("schema")
    if schema is None:
        value.fail("it has no schema version, so it is no manifest of a store")
    if schema.whole(1) > SCHEMA:
        raise StoreError(
            f"{value.file} has schema {schema.content}, this version reads up to {SCHEMA}: upgrade imprint."
        )
    if schema.content < SCHEMA:
        raise StoreError(
            f"{value.file} was made before version 0.1, whose stores are the first to stay readable: make it again."
        )
    return value.unsealed()


# --- each field for itself


def check_request(value: Value) -> None:
    """Look at everything that imprints depend on, as a journal has it."""
    values = value.record(*_ASKED, *FINGERPRINTS)
    _check_asked(values)
    _check_fingerprints(values, values["n"].content)


def _check_asked(values: dict[str, Value]) -> None:
    values["n"].whole(1)
    if values["dtype"].text() not in DTYPES:
        values["dtype"].refuse(f"one of {', '.join(DTYPES)}")
    _plan(values["plan"])
    parameters = values["parameters"].mapping()
    if not parameters:
        values["parameters"].refuse("at least one parameter")
    for parameter in parameters.values():
        about = parameter.record("shape", "dtype")
        if math.prod(about["shape"].wholes()) > 2**62:
            about["shape"].refuse("the shape of a tensor")
        if about["dtype"].text() not in _PARAMETER_DTYPES:
            about["dtype"].refuse(f"one of {', '.join(sorted(_PARAMETER_DTYPES))}")
    for known in values["fixed"].mapping().values():
        known.checksum()


def _check_execution(execution: dict[str, Value]) -> None:
    for name in execution.keys() & {"threads", "batch_size"}:
        execution[name].whole(1)


def _check_cost(value: Value) -> None:
    if not value.mapping():  # stores of the first schema do not tell
        return
    cost = value.record("seconds", "peak_bytes", "resumed")
    cost["seconds"].at_least_zero()
    cost["resumed"].flag()
    if cost["peak_bytes"].content is not None:
        cost["peak_bytes"].whole()


def _check_fingerprints(values: dict[str, Value], n: int) -> None:
    for state in values["states"].items():
        state.checksum()
    for moments in values["moments"].items():
        if moments.content is not None:
            moments.checksum()
    if len(values["moments"].content) != len(values["states"].content):
        values["moments"].refuse("one for each checkpoint")
    values["sources"].checksum()
    for known in values["data"].record("all", "sampled").values():
        if known.content is not None:
            known.checksum()
    _check_probes(values["probes"], len(values["losses"].numbers()), n)
    if values["modules"].content is not None:
        for module in values["modules"].mapping().values():
            module.mapping().get("kind", Value(None, module.file, f"{module.field}.kind")).text()
    if values["regulariser"].content is not None:
        values["regulariser"].numbers()


def _check_probes(value: Value, count: int, n: int) -> None:
    """Look at which examples are probes, and what was seen of them beside their losses."""
    if value.content is None:  # stores up to schema 5 do not tell
        return
    known = value.record("examples", "moved", "outputs", "precision", "gradients")
    examples = known["examples"].wholes()
    if len(examples) != count or count > PROBES or max(examples, default=0) >= n:
        known["examples"].refuse(f"as many of the {n} examples as there are losses, and at most {PROBES}")
    _check_moved(known["moved"], count)
    if known["outputs"].content is not None:
        for values in known["outputs"].items():
            _check_values(values, None)
        if len(known["outputs"].content) > len(ELSEWHERE):
            known["outputs"].refuse(f"values at {len(ELSEWHERE)} places at most")
    known["precision"].positive()
    if len(known["gradients"].numbers()) > 2 * GROUPS:
        known["gradients"].refuse(f"{2 * GROUPS} numbers at most")


def _check_moved(value: Value, count: int) -> None:
    if len(places := value.items()) > len(ELSEWHERE):
        value.refuse(f"values at {len(ELSEWHERE)} places at most")
    for values in places:
        _check_values(values, count)


def _check_values(value: Value, count: int | None) -> None:
    """Look at numbers that may be missing, one for each probe."""
    items = value.items()
    if count is not None and len(items) != count:
        value.refuse(f"{count} values, one for each probe")
    for item in items:
        if item.content is not None:
            item.number()


def _plan(value: Value) -> Plan:
    value.mapping()
    try:
        return Plan.from_json(value.content)
    except (PlanError, TypeError, ValueError) as error:
        value.fail(clipped(f"plan: {str(error).rstrip('.')}", 200))


def _check_structure(value: Value) -> None:
    """Look at the structure of a batch, as `imprint.store.structure.flattened` makes it."""
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
            _check_structure(item)


# --- whether the fields fit each other


def _check_whole(manifest: Manifest, values: dict[str, Value]) -> None:
    checkpoints = values["checkpoints"]
    if len(manifest.fingerprints["states"]) != len(manifest.checkpoints):
        checkpoints.fail("checkpoints and fingerprints.states are not equally many")
    if not 0 < sum(checkpoint.weight for checkpoint in manifest.checkpoints) < math.inf:
        checkpoints.fail("the weights of the checkpoints have no positive and finite sum")
    if manifest.probes is not None and len(manifest.probes.losses) != len(manifest.fingerprints["losses"]):
        values["probes"].fail("probes.losses and fingerprints.losses are not equally many")
    for index, (checkpoint, value) in enumerate(zip(manifest.checkpoints, checkpoints.items(), strict=True)):
        check_planned(checkpoint, index, manifest.plan, len(manifest.checkpoints), value)
        _check_files(checkpoint, manifest.plan, value)
    for file in (manifest.sources, *([manifest.probes.file] if manifest.probes else [])):
        if file.rows is not None:
            checkpoints.fail(f"{file.path} holds no imprints and cannot have rows")
    if both := manifest.fixed.keys() & manifest.parameters.keys():
        values["fixed"].fail(f"fixed has {min(both)!r}, which has imprints")
    path, entries = Counter(file.path for file in manifest.files()).most_common(1)[0]
    if entries > 1:
        checkpoints.fail(f"{entries} entries stand for the same file {path}")


def check_planned(checkpoint: Checkpoint, index: int, plan: Plan, count: int, value: Value) -> None:
    """Refuse a checkpoint, of so many, that was simulated otherwise than the plan says."""
    try:
        settings = plan.at(index, count)
    except PlanError as error:
        value.fail(f"plan: {str(error).rstrip('.')}")
    planned: dict[str, float | str | None] = {
        "steps": settings.steps,
        "damping": settings.damping,
        "weight": settings.weight,
    }
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
    """A checkpoint that counts has its files, with all rows from 0 on; one that does not has none."""
    wanted = {
        "base": checkpoint.weight > 0,
        "imprints": checkpoint.weight > 0,
        "midpoints": checkpoint.weight > 0 and plan.keep_pair,
    }
    for name, want in wanted.items():
        if bool(getattr(checkpoint, name)) != want:
            value.fail(f"{value.field}.{name} {'is missing' if want else 'has no place in this plan'}")
    for name in ("base", "basis"):
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


def versions() -> dict[str, str]:
    """Of everything a result may depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("imprint-attribution", "numpy", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
