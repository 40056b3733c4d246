"""Makes ground truth by replaying recorded training runs with sets of sources at weight 0.

`replay_run` replays one run, the one that made the model: ground truth of "this_run". `replay_seeds` records a run for
each of several seeds and replays each of them: ground truth of "expected", with the same expectation as retraining but
far less noise, because a replay differs from its run by the removal alone.
"""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from imprint.attribution.scoring import attribute
from imprint.data import Collate, Data, as_tensors, is_columns, query_batches
from imprint.errors import DataError, StoreError
from imprint.evaluation.copies import DistinctRuns
from imprint.evaluation.requests import describe_request
from imprint.evaluation.subsets import Subsets, require_whole
from imprint.evaluation.together import Together
from imprint.evaluation.trials import SAME, SMALL, spread
from imprint.evaluation.truth import Truth, TruthFolder, describe_circumstances
from imprint.plan import Question
from imprint.recording.reading import Recording
from imprint.recording.records import Run
from imprint.recording.writing import RunRecorder
from imprint.runtime.progress import Advance
from imprint.simulation.recorded import complete_end, one_of_several, open_run
from imprint.simulation.runner import simulate
from imprint.sources import Sources
from imprint.task import Batch, Task, require_task
from imprint.tensors.vectors import root_mean_square

logger = logging.getLogger(__name__)
Record = Callable[[int, Path], Any]
"""record(seed, folder): trains a model on all data from a seed, and records the run in the folder."""


def replay_run(
    run: Any,
    task: Task,
    data: Any,
    queries: Any,
    subsets: Subsets,
    *,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Truth:
    """Replay a recorded run without each set of sources, and measure F of the queries: ground truth of "this_run".

    run: a RunRecorder, a Recording, or the folder of one.
    subsets: the sets to leave out, such as `Subsets.without_some(sources, 100, drop=2)`; each is one replay.
    out: the folder for the values. An interrupted call resumes when it is made again.
    """
    work = _Work(task, data, queries, subsets, batch_size, collate_fn, memory, progress)
    opened = open_run(run)
    if opened is None:
        raise DataError("there is no run to replay: give a RunRecorder, a Recording, or the folder of one.")
    request = work.describe(opened.sha256, "this_run", runs=1, seed=0)
    with _keep_runs(out, request, work) as kept:
        if 0 not in kept.runs:
            kept.write(0, work.values(opened, kept.folder / "replay-000"))
    return kept.truth(1)


def replay_seeds(
    record: Record | Together,
    task: Task,
    data: Any,
    queries: Any,
    subsets: Subsets,
    *,
    runs: int = 2,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    batch_size: int = 512,
    collate_fn: Collate | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Truth:
    """Record a run from each of several seeds and replay it without each set: ground truth of "expected".

    record: a function of (seed, folder) that trains on all data and records the run in the folder; or a `Together`. It
        seeds the initialisation, and gives the seed to its `RunRecorder`; runs that are copies of each other, or share
        the seed of the recorder, are refused.
    runs: how many seeds; they are those of `retrain` with the same `seed`.
    out: the folder for the values. An interrupted call resumes when it is made again, and more runs add to the folder.
        With a function, one finished run is recorded again first, to check that `record` is still the same.
    """
    if not callable(record):
        raise DataError(f"record must be a function of (seed, folder) or a Together, got a {type(record).__name__}.")
    runs = require_whole("runs", runs, 1)
    work = _Work(task, data, queries, subsets, batch_size, collate_fn, memory, progress)
    request = work.describe(record, "expected", runs=runs, seed=seed)
    with _keep_runs(out, request, work) as kept:
        seeds = {run: subsets.seeds(run, seed)[0] for run in range(runs)}
        missing = {run: own for run, own in seeds.items() if run not in kept.runs}
        distinct = DistinctRuns()
        if missing and kept.runs and not isinstance(record, Together):
            _refuse_changed(record, seeds[kept.runs[0]], work, kept, distinct)
        for run, recorded in _record_in_turn(record, missing, kept.folder, distinct):
            with one_of_several():
                kept.write(run, work.values(recorded, kept.folder / f"replay-{run:03}"))
    return kept.truth(runs)


@dataclass(frozen=True)
class _Work:
    """What is replayed and measured."""

    task: Task
    data: Any
    queries: Any
    subsets: Subsets
    batch_size: int
    collate_fn: Collate | None
    memory: int | str | None
    progress: bool | Advance

    def __post_init__(self) -> None:
        require_task(self.task)
        subsets = self.subsets
        if not isinstance(subsets, Subsets) or subsets.kind != "removal":
            given = f"{subsets.kind} of the sources" if isinstance(subsets, Subsets) else f"a {type(subsets).__name__}"
            raise DataError(
                f"replays leave sources out of a run on all data, got {given}: use Subsets.without_each(sources), or "
                "Subsets.without_some(sources, 100, drop=2)."
            )
        if () not in subsets.removed:
            raise DataError("effects of removals are relative to the run itself: add an empty list, the baseline.")
        if len(self.examples) != subsets.n:
            raise DataError(
                f"the subsets are made for {subsets.n} training examples, the data has {len(self.examples)}."
            )

    @cached_property
    def examples(self) -> Data:
        return Data(self.data, device=self.task.device, batch_size=self.batch_size, collate_fn=self.collate_fn)

    @cached_property
    def batches(self) -> list[tuple[int, Batch]]:
        """The queries, on the device of the task."""
        options: dict[str, Any] = {"batch_size": self.batch_size, "collate_fn": self._query_collate}
        return query_batches(self.queries, device=self.task.device, **options)

    @property
    def _query_collate(self) -> Collate | None:
        return None if is_columns(as_tensors(self.queries)) else self.collate_fn

    def describe(self, train: Record | Together | str, question: Question, *, runs: int, seed: int) -> dict[str, Any]:
        """Describe the ground truth for its folder."""
        known = (self.task, self.subsets, self.batches, self.examples)
        return describe_request(train, *known, runs=runs, seed=seed, question=question, replayed=True)

    def values(self, run: Run, place: Path) -> Tensor:
        """Replay a run without each set in turn, and measure F of the queries, shape (subsets, queries).

        place: the folder of the replayed models; an interrupted replay resumes from there.
        """
        subsets = self.subsets
        options: dict[str, Any] = {"memory": self.memory, "progress": self.progress}
        lacking = [index for index, removed in enumerate(subsets.removed) if removed]
        everyone = np.arange(subsets.n)
        sets = {str(index): np.setdiff1d(everyone, subsets.examples(index).numpy()) for index in lacking}
        store = simulate(
            self.task, self.data, Sources.groups(sets), run=run, out=place, collate_fn=self.collate_fn, **options
        )
        again = (batch for _, batch in self.batches) if isinstance(self.queries, Iterator) else self.queries
        result = attribute(self.task, store, again, collate_fn=self._query_collate, **options)
        values = self.measure(run).repeat(len(subsets), 1)
        values[lacking] += result.removal_effect.double().T
        shutil.rmtree(place)
        return values

    def measure(self, run: Run) -> Tensor:
        """Measure F of the queries under the model at the end of a run, shape (queries,)."""
        functional, theta = self.task.at(complete_end(run, self.task))
        with torch.no_grad(), self.task.evaluating():
            values = [functional.measures(theta, batch, count) for count, batch in self.batches]
        return torch.cat(values).double().cpu()


@dataclass
class _KeptRuns:
    """The values of finished runs, (subsets, queries) each, in memory and in the folder of a ground truth."""

    work: _Work
    about: dict[str, Any]
    folder: Path
    files: TruthFolder | None
    values: dict[int, Tensor] = field(default_factory=dict)

    @property
    def runs(self) -> list[int]:
        return sorted(self.values)

    def write(self, run: int, values: Tensor) -> None:
        """Keep the values of a run."""
        self.values[run] = values
        if self.files is not None:
            first = run * len(values)
            self.files.write_values(range(first, first + len(values)), values, self.about)

    def truth(self, runs: int) -> Truth:
        """Return the ground truth of the first runs."""
        values = torch.stack([self.values[run] for run in range(runs)])
        about = {**self.about, "runs": runs}
        return Truth(self.work.subsets, values, about["measure"], about, about["question"], replayed=True)


@contextlib.contextmanager
def _keep_runs(out: str | os.PathLike[str] | None, request: dict[str, Any], work: _Work) -> Iterator[_KeptRuns]:
    """Open the folder of a ground truth, or a temporary one, and read the runs that it holds."""
    about = {**request, **describe_circumstances(1, work.task.device)}
    if out is None:
        with tempfile.TemporaryDirectory(prefix="imprint-replays-") as folder:
            yield _KeptRuns(work, about, Path(folder), None)
        return
    files = TruthFolder(out)
    with files.opened(request, work.subsets) as found:
        about = {**(found or about), "runs": max((found or about)["runs"], request["runs"])}
        kept = _KeptRuns(work, about, files.path, files)
        if found:
            rows, count = files.read_values(found), len(work.subsets)
            for run in range(about["runs"]):
                models = range(run * count, (run + 1) * count)
                if all(model in rows for model in models):
                    kept.values[run] = torch.stack([rows[model] for model in models])
        files.write_request(about, work.subsets)
        yield kept


def _record_in_turn(
    record: Record | Together, seeds: Mapping[int, int], place: Path, distinct: DistinctRuns
) -> Iterator[tuple[int, Recording]]:
    """Yield a recorded run for each seed, in a folder of the place that is removed afterwards.

    The second one is recorded before the first is replayed, so that copies are refused before that.
    """
    folders = {run: place / f"run-{run:03}" for run in seeds}
    recorded: dict[int, Recording] = {}
    ahead = list(seeds)[:2]
    for run in seeds:
        for each in ahead if run in ahead[:1] else [run]:
            if each not in recorded:
                recorded[each] = record_run(record, seeds[each], folders[each])
                if not isinstance(record, Together):
                    _refuse_copy(each, recorded, folders, distinct)
        yield run, recorded.pop(run)
        shutil.rmtree(folders[run])


def _refuse_copy(
    run: int, recorded: Mapping[int, Recording], folders: Mapping[int, Path], distinct: DistinctRuns
) -> None:
    """Refuse a run that is not one of another seed, and remove it, with those that wait, before it is taken again."""
    try:
        distinct.add(run, recorded[run])
    except DataError:
        for each in recorded:
            shutil.rmtree(folders[each], ignore_errors=True)
        raise


def record_run(record: Record | Together, seed: int, folder: Path) -> Recording:
    """Record a run in a folder; one that is finished is taken as it is, an unfinished one starts over."""
    if folder.exists():
        with contextlib.suppress(StoreError):
            return Recording(folder)
        shutil.rmtree(folder)
    made = record.record(seed, folder) if isinstance(record, Together) else record(seed, folder)
    if isinstance(made, Recording):
        return made  # which knows an optimiser of the user's own
    return made.finish() if isinstance(made, RunRecorder) else Recording(folder)


def _refuse_changed(record: Record, seed: int, work: _Work, kept: _KeptRuns, distinct: DistinctRuns) -> None:
    """Record a finished run again, and refuse a `record` that no longer reproduces it."""
    run = kept.runs[0]
    with tempfile.TemporaryDirectory(prefix="imprint-replays-") as folder:
        recorded = record_run(record, seed, Path(folder) / "run")
        distinct.add(run, recorded)
        again = work.measure(recorded)
    known = kept.values[run]
    moved = root_mean_square(again - known[work.subsets.removed.index(())])
    among = spread(dict(enumerate(known)), len(known)) or 0.0
    if moved > SMALL * among:
        raise StoreError(
            f"{kept.folder} holds runs of another record(seed, folder): F under run {run}, recorded again, differs by "
            f"{moved:.2g}, where removals differ by {among:.2g}. Give the function that the folder was started with, "
            "or a new folder."
        )
    if moved > SAME * among:
        logger.warning("record(seed, folder) does not exactly reproduce run %d: F differs by %.2g", run, moved)
