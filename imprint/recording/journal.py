"""The list of a recording's steps: one line of JSON each, which begins with a checksum of its own.

Settings of the optimiser stand in a line only if they differ from those of the step before, and those that its own step
changes beside them.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from imprint.errors import PlanError, StoreError
from imprint.recording.records import Clipping, MicroBatch, Settings, Step
from imprint.recording.settings import find_changes
from imprint.store.files import append, refuse_unreadable
from imprint.store.records import NotNegative, Positive, read
from imprint.store.values import Value, parsed

STEPS = "steps.jsonl"
_LONGEST = 4 << 30  # bytes: some eight million steps of 64 examples
Position = tuple[int, int]
"""Where a step left the order of the training data: the epoch, and how many of its batches were used."""


@dataclass(frozen=True)
class _Batch:
    """A micro-batch as a line has it."""

    examples: Annotated[tuple[int, ...], Value.wholes]
    normaliser: Positive
    loss: float | None


@dataclass(frozen=True)
class _Clipping:
    """`Clipping` as a line has it: JSON has no infinite number."""

    kind: Literal["norm", "value"]
    limit: NotNegative
    norm_type: Positive | Literal["inf"]

    @classmethod
    def of(cls, given: Clipping) -> "_Clipping":
        return cls(given.kind, given.limit, "inf" if given.norm_type == math.inf else given.norm_type)

    def restore(self) -> Clipping:
        return Clipping(self.kind, self.limit, float(self.norm_type))


@dataclass(frozen=True)
class _Line:
    """A step as a line has it; `changed` are the settings of each group that differ from the step before."""

    step: int
    seed: int
    batches: tuple[_Batch, ...]
    changed: tuple[dict[str, Any], ...]
    gradient_norm: NotNegative | None
    clipping: _Clipping | None
    missing: tuple[str, ...]
    closure: bool
    position: tuple[int, int] | None
    left: tuple[dict[str, Any], ...] | None


@dataclass(frozen=True)
class Entry:
    """A step of the list, where it left the order of the data, and at which byte of the file its line ends."""

    step: Step
    position: Position | None
    end: int


class Journal:
    """Appends steps to the list of a folder."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / STEPS
        self._groups: tuple[Settings, ...] = ()
        self.steps = 0

    def resume(self, entries: Sequence[Entry]) -> None:
        """Continue after these entries, the first of the file; later ones are dropped."""
        try:
            if entries or self.place.exists():
                refuse_unreadable(self.place)
                with self.place.open("r+b") as file:
                    file.truncate(entries[-1].end if entries else 0)
                    os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{self.place} cannot be written: {error.strerror}.") from error
        self.steps = len(entries)
        self._groups = entries[-1].step.groups if entries else ()

    def add(self, step: Step, position: Position | None) -> None:
        """Append a step. It survives the end of the process, and with `sync` the end of the machine."""
        line = {
            "step": self.steps + 1,
            "seed": step.seed,
            "batches": [vars(batch) for batch in step.batches],
            "changed": _compare(self._groups, step.groups),
            "gradient_norm": step.gradient_norm,
            "clipping": None if step.clipping is None else vars(_Clipping.of(step.clipping)),
            "missing": sorted(step.missing),
            "closure": step.closure,
            "position": position,
            "left": step.left,
        }
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        append(self.place, f"{_checksum(text.encode())} {text}\n", durable=False)
        self.steps += 1
        self._groups = step.groups

    def sync(self) -> None:
        """Have everything up to here survive the end of the machine."""
        append(self.place, "")


def _compare(before: tuple[Settings, ...], now: tuple[Settings, ...]) -> tuple[Settings, ...]:
    """Return the settings of each group that are new or other ones."""
    if not before:
        return now
    for index, (old, new) in enumerate(zip(before, now, strict=True)):
        if gone := sorted(old.keys() - new.keys()):
            raise PlanError(
                f"the optimiser's parameter group {index} lost its setting {gone[0]!r} during the run, which a "
                "recording cannot keep: leave the names of its settings as they are."
            )
    return find_changes(before, now)


def read_journal(folder: Path, groups: Sequence[Sequence[str]], n: int) -> list[Entry]:
    """Read the steps of a folder. A last line that was cut short is left out.

    groups: the names of the parameters in each group; n: the number of training examples.
    """
    place = folder / STEPS
    try:
        refuse_unreadable(place, _LONGEST)
        *lines, _ = place.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{place} cannot be read: {error.strerror}.") from error
    entries: list[Entry] = []
    names = frozenset(name for group in groups for name in group)
    settings: tuple[Settings, ...] = tuple({} for _ in groups)
    end = 0
    for number, line in enumerate(lines, 1):
        checksum, _, text = line.partition(b" ")
        end += len(line) + 1
        if checksum != _checksum(text).encode():
            if number == len(lines):
                break
            raise StoreError(f"{place} is damaged in line {number}: the recording ends before it.")
        value = parsed(text, place)
        parsed_line = read(_Line, _upgrade(value))
        _check(parsed_line, number, names, len(groups), n, value)
        settings = tuple({**old, **new} for old, new in zip(settings, parsed_line.changed, strict=True))
        entries.append(Entry(_make_step(parsed_line, settings), parsed_line.position, end))
    return entries


def _upgrade(value: Value) -> Value:
    """Return a line with what earlier versions did not write."""
    return replace(value, content={"left": None, **value.content}) if isinstance(value.content, dict) else value


def _make_step(line: _Line, settings: tuple[Settings, ...]) -> Step:
    return Step(
        batches=tuple(MicroBatch(batch.examples, batch.normaliser, batch.loss) for batch in line.batches),
        seed=line.seed,
        groups=settings,
        gradient_norm=line.gradient_norm,
        clipping=None if line.clipping is None else line.clipping.restore(),
        missing=frozenset(line.missing),
        closure=line.closure,
        left=line.left,
    )


def _check(line: _Line, number: int, names: frozenset[str], groups: int, n: int, value: Value) -> None:
    """Refuse a line that does not fit the recording."""
    if line.step != number:
        value.fail(f"line {number} is step {line.step}: steps are missing or stand twice")
    if not line.batches or not all(batch.examples for batch in line.batches):
        value.fail(f"line {number} has a batch without examples")
    if (largest := max(max(batch.examples) for batch in line.batches)) >= n:
        value.fail(f"line {number} has example {largest}, of {n}")
    if len(line.changed) != groups:
        value.fail(f"line {number} has {len(line.changed)} parameter groups, of {groups}")
    if line.left and len(line.left) != groups:
        value.fail(f"line {number} has {len(line.left)} parameter groups after its step, of {groups}")
    if unknown := sorted(set(line.missing) - names):
        value.fail(f"line {number} has no gradient of an unknown parameter {unknown[0]!r}")


def _checksum(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
