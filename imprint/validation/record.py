"""Keeps a validation in the folder of its store: `validation.json`, and the witnesses.

A witness is a run that was really made without some sources. Those of one training run are a store of their own, in
`witnesses/000`, `witnesses/001` and so on: its sources are the removals, and it is read and verified like any other.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from imprint.errors import StoreError
from imprint.model.measures import MEASURES
from imprint.plan import Question
from imprint.store.files import refuse_unreadable, sha256, write_tensors
from imprint.store.folder import write_sealed
from imprint.store.manifest import versions
from imprint.store.reading import Store
from imprint.store.records import Checksum, Count, NotNegative, read
from imprint.store.values import Value, read_hashed
from imprint.validation.verdict import Outcome, Verdict

VALIDATION = "validation.json"
WITNESSES = "witnesses"
SCHEMA = 2
_LONGEST = 16 << 20  # bytes
_EXAMPLES = "examples.safetensors"
_MOST, _LARGEST = 1000, 4  # removals, and sources of one


def _read_removals(value: Value) -> tuple[tuple[int, ...], ...]:
    return tuple(item.wholes() for item in value.items())


def _read_typical(value: Value) -> tuple[float, ...] | None:
    return None if value.content is None else value.numbers()


@dataclass(frozen=True)
class Validation:
    """Predicted effects compared with removals that were really made.

    store: the checksum of the validated store.
    removals: which sources were removed, by their places in the store, together where there are several.
    witnesses: the checksums of the stores of witnesses, one for each run.
    examples: the checksum of the file with hashes of the removed training examples.
    verdict: on the queries that were given, whose hash is `queries`, and how many were left out because they are
        training examples of a removed source, or repeated.
    earlier: how earlier validations of the same store ended. Trying seeds until one passes proves nothing.
    typical: how large effects are on the queries: the smallest, the deciles and the largest of their root mean squares
        over sources, by which a service notices other queries. None in files of schema 1.
    """

    store: Checksum
    removals: Annotated[tuple[tuple[int, ...], ...], _read_removals]
    witnesses: tuple[Checksum, ...]
    examples: Checksum
    measure: str
    queries: Checksum
    left_out: int
    verdict: Verdict
    earlier: tuple[Outcome, ...]
    seed: int
    seconds: NotNegative
    typical: Annotated[tuple[float, ...] | None, _read_typical] = None
    versions: dict[str, str] = field(default_factory=versions)
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def question(self) -> Question:
        """What the removals answer, and so the question for which scores were validated."""
        return self.verdict.question

    def __str__(self) -> str:
        return str(self.verdict)

    def describe_earlier(self) -> list[str]:
        """Say how earlier validations of the store ended; nothing if there were none."""
        return [f"earlier validations of this store: {', '.join(self.earlier)}"] * bool(self.earlier)


@dataclass(frozen=True)
class _File:
    schema: Count
    validation: Validation


def witness_folder(store: Store, run: int) -> Path:
    """Return the folder of the witnesses of one run."""
    return store.path / WITNESSES / f"{run:03}"


def has_witnesses(store: Store) -> bool:
    """Tell whether the witnesses of a store are there: they may be left behind where it is copied."""
    return (store.path / WITNESSES).is_dir()


def write_examples(store: Store, hashes: Sequence[bytes]) -> str:
    """Write the hashes of the removed training examples, 8 bytes of each; return the checksum of the file."""
    file = store.path / WITNESSES / _EXAMPLES
    write_tensors(file, {"examples": torch.tensor([shorten_hash(each) for each in hashes], dtype=torch.int64)}, {})
    return sha256(file)


def read_examples(store: Store, validation: Validation) -> set[int]:
    """Read the hashes of the removed training examples."""
    file = store.path / WITNESSES / _EXAMPLES
    store.bring(file)
    try:
        refuse_unreadable(file)
        if sha256(file) != validation.examples:
            raise StoreError(f"{file} is damaged: it differs from its checksum. Validate the store again.")
        return set(load_file(file)["examples"].tolist())
    except (OSError, SafetensorError, KeyError) as error:
        raise StoreError(f"{file} cannot be read: {error}. Validate the store again.") from error


def shorten_hash(digest: bytes) -> int:
    """Return the first 8 bytes of a hash as a number."""
    return int.from_bytes(digest[:8], "little", signed=True)


def list_outcomes(store: Store) -> tuple[Outcome, ...]:
    """Return how the validations of a store ended so far; none where they cannot be read."""
    try:
        before = _read_latest(store)
    except StoreError:
        return ()
    return () if before is None else (*before.earlier, before.verdict.outcome)


def remove_validation(store: Store) -> None:
    """Remove the verdict of a store, before its witnesses are made anew."""
    (store.path / VALIDATION).unlink(missing_ok=True)


def write_validation(store: Store, validation: Validation) -> None:
    """Write a validation into the folder of its store."""
    write_sealed(store.path / VALIDATION, {"schema": SCHEMA, "validation": asdict(validation)})


def read_validation(store: Store) -> Validation | None:
    """Read the validation of a store; None where it has none, or was changed since. One of another store is refused."""
    validation = _read_latest(store)
    return validation if validation is not None and validation.store == store.sha256 else None


def find_outdated(store: Store) -> Validation | None:
    """Return the validation of a store as it was before it was changed; None where it has none, or one that counts."""
    validation = _read_latest(store)
    return validation if validation is not None and validation.store != store.sha256 else None


def _read_latest(store: Store) -> Validation | None:
    """Read the latest validation of a store, or of one of its earlier versions."""
    file = store.path / VALIDATION
    value, digest = read_hashed(file, _LONGEST) if file.exists() else (None, None)
    if store.signed is not None:
        store.signed.check_validation(store.path, digest)
    if value is None:
        return None
    schema = value.mapping().get("schema")
    if schema is None or schema.whole(1) > SCHEMA:
        found = "none" if schema is None else schema.content
        raise StoreError(f"{file} has schema {found}, this version reads up to {SCHEMA}: upgrade imprint.")
    try:
        validation = read(_File, _upgrade(value.unsealed(), schema.whole(1))).validation
    except StoreError as error:
        raise StoreError(f"{error} Delete {VALIDATION}, or validate the store again.") from error
    if validation.store in (earlier for revision in store.manifest.history for earlier in revision.before):
        return validation
    if validation.store != store.sha256:
        raise StoreError(f"{file} is the validation of another store than {store.path}: delete it, and validate again.")
    _check_whole(validation, store, value)
    return validation


def _upgrade(value: Value, schema: int) -> Value:
    """Return what a file of an earlier schema says, in the fields of this one."""
    kept = value.mapping().get("validation")
    if schema > 1 or kept is None:
        return value
    fields = {name: item.content for name, item in kept.mapping().items()}
    return replace(value, content={**value.content, "validation": {**fields, "typical": None}})


def find_verdict(store: Store, measure: str) -> Verdict | None:
    """Return the verdict that a store carries for effects on a measurement; None where it has none.

    Functions of the user's are known by their names alone, which two of them may share.
    """
    validation = read_validation(store)
    named = measure in ("loss", "log-likelihood") or measure in MEASURES
    return validation.verdict if validation is not None and named and validation.measure == measure else None


def _check_whole(validation: Validation, store: Store, value: Value) -> None:
    """Refuse fields that do not fit each other, or the store."""
    figures, removals = validation.verdict.figures, validation.removals
    if validation.question != store.question:
        value.fail(f"it answers {validation.question!r}, and the store {store.question!r}")
    if not all(removals) or any(len(set(each)) < len(each) or max(each) >= len(store) for each in removals):
        value.fail(f"its removals must be sets of the {len(store)} sources")
    if len(removals) > _MOST or max(map(len, removals)) > _LARGEST:
        value.fail(f"it has more than {_MOST} removals, or one of more than {_LARGEST} sources")
    if len(removals) != figures.removals or len(validation.witnesses) != figures.runs:
        value.fail("its removals and witnesses are not as many as its verdict says")
