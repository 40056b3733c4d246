"""Makes the witnesses of a validation: runs without some sources, chosen from what a store predicts."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.grouping import JOINT
from imprint.data import Collate, Data, as_tensors, is_columns
from imprint.errors import DataError, StoreError
from imprint.evaluation.copies import DistinctRuns
from imprint.evaluation.replaying import Record, record_run
from imprint.evaluation.subsets import VALIDATION, derive_seed
from imprint.evaluation.together import Together
from imprint.recording.records import Run
from imprint.runtime.progress import Advance
from imprint.simulation.recorded import Recorded, one_of_several, open_run
from imprint.simulation.runner import simulate
from imprint.sources import Sources
from imprint.statistics import Array
from imprint.store.fingerprint import are_sources, hash_examples, recognise_data
from imprint.store.reading import Store
from imprint.task import Task
from imprint.validation.record import WITNESSES, witness_folder


@dataclass(frozen=True)
class Made:
    """What a store was made from."""

    task: Task
    data: Any
    sources: Sources
    run: Run | None
    collate_fn: Collate | None

    @classmethod
    def of(
        cls, store: Store, task: Task | None, data: Any, sources: Sources | None, run: Recorded | None, collate: Any
    ) -> "Made":
        """Put together what the caller gave and what the store remembers; refuse what is missing or different."""
        known = store.origin
        given = {"task": task, "data": data, "sources": sources}
        found: dict[str, Any] = {name: known.get(name) if value is None else value for name, value in given.items()}
        if missing := [name for name, value in found.items() if value is None]:
            raise DataError(
                f"the store at {store.path} was opened from its folder, and does not know its {' and '.join(missing)}: "
                f"give {', '.join(f'{name}=' for name in missing)} as you gave them to simulate."
            )
        if not are_sources(found["sources"], store.manifest.request.sources):
            raise DataError(f"these are not the sources of the store at {store.path}: give those it was made with.")
        collate = collate or known.get("collate_fn")
        examples = Data(found["data"], device=found["task"].device, collate_fn=collate)
        data = recognise_data(vars(store.manifest.request.data), examples)
        if not data.same:
            raise DataError(
                f"the store at {store.path} was made from different training data{data.remark}, or from the same in "
                "another order: give the data it was made from."
            )
        opened = open_run(run if run is not None else known.get("run"))
        return cls(**found, run=opened, collate_fn=collate)

    def collate_queries(self, queries: Any) -> Collate | None:
        """Return how queries are collated: columns are batches already."""
        return None if is_columns(as_tensors(queries)) else self.collate_fn


def refuse_missing(store: Store, run: Run | None, record: Record | Together | None) -> None:
    """Refuse a validation without the trainings that it takes, and one with those of another question."""
    if store.question == "this_run":
        if record is not None:
            raise DataError(
                "the store repeats one recorded run, and is validated by that run: give run=, and leave record= out."
            )
        if run is None:
            raise DataError(
                "the store repeats a recorded run: give that run (run=, --run FOLDER), to remove sources from it "
                "together."
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
class Witnessing:
    """The removals that are made, and where their witnesses go."""

    made: Made
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
        place = self._folder / f"recording-{run:03}"
        shutil.rmtree(place, ignore_errors=True)  # it may be of another `record`
        opened = record_run(record, derive_seed(self.seed, VALIDATION, run), place)
        try:
            if not isinstance(record, Together):
                distinct.add(run, opened)
        except DataError:  # nothing of such a `record` is to be taken again
            shutil.rmtree(self._folder)
            raise
        witness = self.make_witness(run, opened)
        shutil.rmtree(place)
        return witness

    def make_witness(self, run: int, recording: Run | None) -> Store:
        """Repeat a run without each removal; return the store of it. One of the same run and removals is resumed."""
        assert recording is not None
        folder = witness_folder(self.store, run)
        try:
            return self._repeat(recording, folder, run)
        except StoreError:  # of another run, of other removals, or damaged
            if not folder.exists():
                raise
            shutil.rmtree(folder)
            return self._repeat(recording, folder, run)

    def _repeat(self, recording: Run, folder: Path, run: int) -> Store:
        groups = {f"{index}": self._list_members(removal) for index, removal in enumerate(self.removals)}
        return simulate(
            self.made.task,
            self.made.data,
            Sources.groups(groups, dict(zip(groups, self.names, strict=True))),
            self.store.manifest.plan if self.store.removes else None,  # which may start late
            run=recording,
            out=folder,
            collate_fn=self.made.collate_fn,
            memory=self.memory,
            note={"validates": self.store.sha256, "seed": self.seed, "run": run},
            progress=self.progress,
        )

    @property
    def _folder(self) -> Path:
        return self.store.path / WITNESSES

    def refuse_links(self) -> None:
        """Refuse links where witnesses go: what is written to or removed from them would be somewhere else."""
        for place in (self._folder, *(self._folder.iterdir() if self._folder.is_dir() else ())):
            if place.is_symlink():
                raise StoreError(f"{place} is a link, and witnesses are written to plain folders: remove it.")

    def _list_members(self, removal: Sequence[int]) -> Array:
        return np.unique(np.concatenate([self.made.sources.members[source] for source in removal]))


def draw_strata(effects: Tensor, count: int, draw: "np.random.Generator") -> tuple[tuple[int, ...], ...]:
    """Draw one source from each stratum of predicted size, given predicted effects (queries, sources)."""
    sizes = effects.double().square().mean(0).numpy()
    strata = np.array_split(np.argsort(sizes, kind="stable"), min(count, len(sizes)))
    return tuple((int(draw.choice(stratum)),) for stratum in strata)


def draw_sets(sources: int, count: int, draw: "np.random.Generator") -> tuple[tuple[int, ...], ...]:
    """Draw different sets of 2 to 4 sources, as many of each size as can be, or as many sets as there are.

    Sets are dealt from a shuffled deck of all sources, so that each is part of about as many: those that share few
    sources say more than those that share many.
    """
    sizes = [size for size in range(2, JOINT + 1) if size < sources] or [1]
    found: dict[tuple[int, ...], None] = {}
    deck: list[int] = []
    for attempt in range(100 * count):
        size = sizes[attempt % len(sizes)]
        if len(deck) < size:
            deck = [*deck, *(source for source in draw.permutation(sources).tolist() if source not in deck)]
        found[tuple(sorted(deck[:size]))] = None
        deck = deck[size:]
        if len(found) == count:
            break
    return tuple(found)


def hash_removed(made: Made, removals: Sequence[Sequence[int]]) -> list[bytes]:
    """Hash the training examples of all removed sources."""
    removed = np.unique(np.concatenate([made.sources.members[source] for removal in removals for source in removal]))
    data = Data(made.data, device=made.task.device, collate_fn=made.collate_fn)
    return hash_examples(data, torch.from_numpy(removed))
