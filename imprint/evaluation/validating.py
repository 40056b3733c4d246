"""Validates a store: makes removals for real, compares predicted effects with them, and keeps the outcome.

Path and spectral engines predict single removals, so single sources are removed, one from each stratum of predicted
size, in several training runs. A replay has made every single removal already; there, the sums of its removals are
compared with a few sources removed together.
"""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.grouping import JOINT
from imprint.attribution.scoring import attribute
from imprint.data import Collate, Data, as_tensors, is_columns, query_batches
from imprint.display import count_of, for_terminal
from imprint.errors import DataError, StoreError
from imprint.evaluation.copies import DistinctRuns
from imprint.evaluation.replaying import Record, record_run
from imprint.evaluation.subsets import VALIDATION, derive_seed, require_whole
from imprint.evaluation.together import Together
from imprint.recording.records import Run
from imprint.runtime.progress import Advance
from imprint.simulation.recorded import Recorded, one_of_several, open_run
from imprint.simulation.runner import register_validator, simulate
from imprint.sources import Sources
from imprint.statistics import Array
from imprint.store.fingerprint import hash_examples, hash_rows, of_batches, of_sources
from imprint.store.folder import locked
from imprint.store.reading import Store
from imprint.task import Batch, Task
from imprint.validation.record import WITNESSES, Validation, witness_folder, write_validation
from imprint.validation.verdict import SEEDS, judge
from imprint.validation.witnesses import predict_removals, read_effects

_REMOVALS = 8


class Row(NamedTuple):
    """One removal: its predicted effect beside the actual one."""

    name: str
    predicted: float
    actual: float
    error: float | None


@dataclass(frozen=True)
class Comparison:
    """Predicted effects (queries, removals) beside actual ones (runs, queries, removals), and what follows."""

    validation: Validation
    names: tuple[str, ...]
    predicted: Array
    actual: Array

    @property
    def outcome(self) -> str:
        """What was validated: "sizes validated", "ranks validated", "failed" or "undecided"."""
        return self.validation.verdict.outcome

    @property
    def rows(self) -> "list[Row]":
        """Predicted and actual effect of each removal, mean over queries, with the error over runs if there are any."""
        found = []
        for index, name in enumerate(self.names):
            actual = self.actual[:, :, index].mean(1)
            error = float(actual.std(ddof=1)) / len(actual) ** 0.5 if len(actual) > 1 else None
            found.append(Row(name, float(self.predicted[:, index].mean()), float(actual.mean()), error))
        return found

    def describe_left_out(self) -> list[str]:
        """Say how many queries were left out; nothing if none was."""
        left = self.validation.left_out
        return [f"{count_of(left, 'query', 'queries')} left out: training examples of removed sources"] * bool(left)

    def __repr__(self) -> str:
        width = max(map(len, (*self.names, "removed")))
        lines = [f"{'removed':{width}}  predicted    actual   (change of {self.validation.measure}, mean over queries)"]
        for row in self.rows:
            error = "" if row.error is None else f" ± {row.error:.2g}"
            lines.append(f"{for_terminal(row.name):{width}}  {row.predicted:+9.3g} {row.actual:+9.3g}{error}")
        return "\n".join([str(self.validation.verdict), *lines, *self.describe_left_out()])

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values: the verdict, and the effects of each removal."""
        rows, removals = self.rows, self.validation.removals
        each = [{**row._asdict(), "sources": list(places)} for row, places in zip(rows, removals, strict=True)]
        return {**self.validation.verdict.to_json(), "measure": self.validation.measure, "removed": each}


def validate(
    store: Store | str,
    queries: Any,
    *,
    task: Task | None = None,
    data: Any = None,
    sources: Sources | None = None,
    run: Recorded | None = None,
    record: Record | Together | None = None,
    runs: int = SEEDS,
    removals: int = _REMOVALS,
    seed: int = 0,
    batch_size: int = 64,
    collate_fn: Collate | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Comparison:
    """Compare the effects that a store predicts with removals that are really made, and keep the outcome in the store.

    The runs without a source stay in the store's folder as witnesses, so that `attribute` judges its own queries too,
    with one forward pass per removal and run.

    queries: at least 20, of the kind that will be asked; training examples of a removed source are left out.
    task, data, sources: what the store was made from. A store that `simulate` returned in this process knows them.
    run: the recorded run, for a store that repeats one. Sets of 2 to 4 sources are removed together.
    record: for stores that estimate the expectation over seeds: a function of (seed, folder) that trains on all data
        and records the run in the folder, or a `Together`. Single sources are removed from runs of other seeds.
    runs: how many seeds; fewer than three decide nothing.
    removals: how many removals each run is repeated with.
    """
    began = time.monotonic()
    store = Store.of(store)
    made = _Made.of(store, task, data, sources, run, collate_fn)
    removals, runs = require_whole("removals", removals, 2), require_whole("runs", runs, 1)
    _refuse_missing(store, made.run, record)
    batches = query_batches(
        queries, device=made.task.device, batch_size=batch_size, collate_fn=made.collate_queries(queries)
    )
    result = attribute(made.task, store, iter([batch for _, batch in batches]), memory=memory, progress=progress)
    draw = np.random.default_rng(derive_seed(seed, VALIDATION))
    chosen = (
        draw_sets(len(store), removals, draw) if store.removes else draw_strata(result.removal_effect, removals, draw)
    )
    work = _Work(made, store, chosen, seed, memory, progress)
    with locked(store.path):
        witnesses = [work.make_witness(0, made.run)] if record is None else work.make_witnesses(record, runs)
        actual = read_effects(made.task, witnesses, batches, memory)
        own = _find_own_examples(made, chosen, batches)
        if own.all():
            raise DataError("every query is a training example of a removed source: give queries that are not.")
        effects, actual = result.removal_effect.double().cpu()[~own], actual[:, ~own]
        measured, sizes = store.checkpoints[0].measured, np.array(store.source_sizes)
        known = (store.question, measured.chaos, measured.deviation)
        verdict = judge(effects.numpy(), chosen, actual, sizes, *known)
        validation = Validation(
            store=store.sha256,
            removals=chosen,
            witnesses=tuple(witness.sha256 for witness in witnesses),
            measure=made.task.measure_name,
            queries=of_batches(batches),
            left_out=int(own.sum()),
            verdict=verdict,
            seed=seed,
            seconds=round(time.monotonic() - began, 3),
        )
        write_validation(store, validation)
    return Comparison(validation, work.names, predict_removals(effects, chosen), actual)


register_validator(validate)


@dataclass(frozen=True)
class _Made:
    """What a store was made from."""

    task: Task
    data: Any
    sources: Sources
    run: Run | None
    collate_fn: Collate | None

    @classmethod
    def of(
        cls, store: Store, task: Task | None, data: Any, sources: Sources | None, run: Recorded | None, collate: Any
    ) -> "_Made":
        """Put together what the caller gave and what the store remembers; refuse what is missing or different."""
        known = store.origin
        given = {"task": task, "data": data, "sources": sources}
        found: dict[str, Any] = {name: known.get(name) if value is None else value for name, value in given.items()}
        if missing := [name for name, value in found.items() if value is None]:
            raise DataError(
                f"the store at {store.path} was opened from its folder, and does not know its {' and '.join(missing)}: "
                f"give {', '.join(f'{name}=' for name in missing)} as you gave them to simulate."
            )
        if of_sources(found["sources"]) != store.manifest.request.sources:
            raise DataError(f"these are not the sources of the store at {store.path}: give those it was made with.")
        opened = open_run(run if run is not None else known.get("run"))
        return cls(**found, run=opened, collate_fn=collate or known.get("collate_fn"))

    def collate_queries(self, queries: Any) -> Collate | None:
        """Return how queries are collated: columns are batches already."""
        return None if is_columns(as_tensors(queries)) else self.collate_fn


def _refuse_missing(store: Store, run: Run | None, record: Record | Together | None) -> None:
    """Refuse a validation without the trainings that it takes, and one with those of another question."""
    if store.question == "this_run":
        if record is not None:
            raise DataError(
                "the store repeats one recorded run, and is validated by that run: give run=, and leave record= out."
            )
        if run is None:
            raise DataError(
                "the store repeats a recorded run: give that run as run=, to remove sources from it together."
            )
        if run.sha256 != store.manifest.request.recording:
            raise DataError("the recorded run is another one than the store was made from: give that run.")
    elif record is None:
        raise DataError(
            "the store estimates the expectation over seeds, which is validated by training with several seeds: give "
            "record=, a function of (seed, folder) that trains on all data and records the run in the folder with "
            "imprint.RunRecorder."
        )


@dataclass(frozen=True)
class _Work:
    """The removals that are made, and where their witnesses go."""

    made: _Made
    store: Store
    removals: tuple[tuple[int, ...], ...]
    seed: int
    memory: int | str | None
    progress: bool | Advance

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the removed sources."""
        return tuple(" + ".join(self.store.source_names[source] for source in each) for each in self.removals)

    def make_witnesses(self, record: Record | Together, runs: int) -> list[Store]:
        """Record a run from each of several seeds and repeat it without each removal."""
        distinct = DistinctRuns()
        with one_of_several():
            return [self._make_from(record, run, distinct) for run in range(runs)]

    def _make_from(self, record: Record | Together, run: int, distinct: DistinctRuns) -> Store:
        place = self.store.path / WITNESSES / f"recording-{run:03}"
        if (finished := self._find_finished(run)) is not None:
            return finished
        opened = record_run(record, derive_seed(self.seed, VALIDATION, run), place)
        try:
            if not isinstance(record, Together):
                distinct.add(run, opened)
        except DataError:  # nothing of such a `record` is to be taken again
            for folder in (place, *(witness_folder(self.store, earlier) for earlier in range(run))):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        witness = self.make_witness(run, opened)
        shutil.rmtree(place)
        return witness

    def make_witness(self, run: int, recording: Run | None) -> Store:
        """Repeat a run without each removal; return the store of it."""
        assert recording is not None
        if (finished := self._find_finished(run)) is not None:
            return finished
        groups = {f"{index}": self._list_members(removal) for index, removal in enumerate(self.removals)}
        names = dict(zip(groups, self.names, strict=True))
        return simulate(
            self.made.task,
            self.made.data,
            Sources.groups(groups, names),
            run=recording,
            out=witness_folder(self.store, run),
            collate_fn=self.made.collate_fn,
            memory=self.memory,
            note=self._note(run),
            progress=self.progress,
        )

    def _list_members(self, removal: Sequence[int]) -> Array:
        return np.unique(np.concatenate([self.made.sources.members[source] for source in removal]))

    def _note(self, run: int) -> dict[str, Any]:
        """Return what a store of witnesses belongs to."""
        return {
            "validates": self.store.sha256,
            "seed": self.seed,
            "run": run,
            "removals": [list(r) for r in self.removals],
        }

    def _find_finished(self, run: int) -> Store | None:
        """Find witnesses that an earlier call has made of the same removals; others make way."""
        folder = witness_folder(self.store, run)
        if folder.is_symlink():
            raise StoreError(f"{folder} is a link, and witnesses are written to plain folders: remove it.")
        try:
            found = Store(folder)
        except StoreError:
            return None  # missing, or unfinished: simulate resumes it
        if found.manifest.note == self._note(run):
            return found
        shutil.rmtree(folder)
        return None


def draw_strata(effects: Tensor, count: int, draw: "np.random.Generator") -> tuple[tuple[int, ...], ...]:
    """Draw one source from each stratum of predicted size, given predicted effects (queries, sources)."""
    sizes = effects.double().square().mean(0).numpy()
    strata = np.array_split(np.argsort(sizes, kind="stable"), min(count, len(sizes)))
    return tuple((int(draw.choice(stratum)),) for stratum in strata)


def draw_sets(sources: int, count: int, draw: "np.random.Generator") -> tuple[tuple[int, ...], ...]:
    """Draw different sets of 2 to 4 sources, as many of each size as can be, or as many sets as there are."""
    sizes = [size for size in range(2, JOINT + 1) if size < sources] or [1]
    found: dict[tuple[int, ...], None] = {}
    for attempt in range(100 * count):
        size = sizes[attempt % len(sizes)]
        found[tuple(sorted(draw.choice(sources, size, replace=False).tolist()))] = None
        if len(found) == count:
            break
    return tuple(found)


def _find_own_examples(made: _Made, removals: Sequence[Sequence[int]], batches: Sequence[tuple[int, Batch]]) -> Any:
    """Tell which queries are training examples of a removed source, shape (queries,)."""
    removed = np.unique(np.concatenate([made.sources.members[source] for removal in removals for source in removal]))
    data = Data(made.data, device=made.task.device, collate_fn=made.collate_fn)
    known = set(hash_examples(data, torch.from_numpy(removed)))
    own = [each in known for count, batch in batches for each in hash_rows(batch, count)]
    return np.array(own)
