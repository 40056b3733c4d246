"""Validates a store: makes removals for real, compares predicted effects with them, and keeps the outcome.

Path and spectral engines predict single removals, so single sources are removed, one from each stratum of predicted
size, in several training runs. A replay has made every single removal already; there, the sums of its removals are
compared with a few sources removed together.
"""

import os
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from imprint.attribution.scoring import attribute
from imprint.data import Collate, query_batches
from imprint.display import count_of, for_terminal
from imprint.errors import DataError
from imprint.evaluation.replaying import Record
from imprint.evaluation.subsets import VALIDATION, derive_seed, require_whole
from imprint.evaluation.together import Together
from imprint.evaluation.witnessing import Made, Witnessing, draw_sets, draw_strata, hash_removed, refuse_missing
from imprint.runtime.progress import Advance
from imprint.simulation.recorded import Recorded
from imprint.simulation.runner import register_validator
from imprint.sources import Sources
from imprint.statistics import Array
from imprint.store.fingerprint import of_batches
from imprint.store.folder import locked
from imprint.store.reading import Store
from imprint.task import Task
from imprint.validation.drift import find_typical
from imprint.validation.record import (
    WITNESSES,
    Validation,
    list_outcomes,
    remove_validation,
    write_examples,
    write_validation,
)
from imprint.validation.verdict import SEEDS, judge
from imprint.validation.witnesses import find_uncounted, predict_removals, read_effects

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
        """Say how many queries were left out, and how earlier validations ended; nothing if there is none."""
        left = self.validation.left_out
        text = f"{count_of(left, 'query', 'queries')} left out: training examples of removed sources, or repeated"
        return [text] * bool(left) + self.validation.describe_earlier()

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
    store: Store | str | os.PathLike[str],
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
    runs: how many seeds; fewer than three leave the verdict undecided.
    removals: how many removals each run is repeated with.
    """
    began = time.monotonic()
    store = Store.of(store)
    made = Made.of(store, task, data, sources, run, collate_fn)
    removals, runs = require_whole("removals", removals, 2), require_whole("runs", runs, 1)
    refuse_missing(store, made.run, record)
    batches = query_batches(
        queries, device=made.task.device, batch_size=batch_size, collate_fn=made.collate_queries(queries)
    )
    draw = np.random.default_rng(derive_seed(seed, VALIDATION))
    with store.editing(replaced=WITNESSES), locked(store.path):
        earlier = list_outcomes(store)
        remove_validation(store)  # whatever happens from here on, no verdict stands without its witnesses
        given = iter([batch for _, batch in batches])
        result = attribute(made.task, store, given, memory=memory, progress=progress)
        effects = result.removal_effect.double().cpu()
        chosen = draw_sets(len(store), removals, draw) if store.removes else draw_strata(effects, removals, draw)
        removed = hash_removed(made, chosen)
        own = find_uncounted(removed, batches)
        if own.all():
            raise DataError("every query is a training example of a removed source: give queries that are not.")
        work = Witnessing(made, store, chosen, seed, memory, progress)
        work.refuse_links()
        witnesses = [work.make_witness(0, made.run)] if record is None else work.make_witnesses(record, runs)
        actual = read_effects(made.task, witnesses, batches, memory)
        effects, actual = effects[~own], actual[:, ~own]
        measured, sizes = store.checkpoints[0].measured, np.array(store.source_sizes)
        known = (store.question, measured.chaos, measured.deviation)
        verdict = judge(effects.numpy(), chosen, actual, sizes, *known)
        validation = Validation(
            store=store.sha256,
            removals=chosen,
            witnesses=tuple(witness.sha256 for witness in witnesses),
            examples=write_examples(store, removed),
            measure=made.task.measure_name,
            queries=of_batches(batches),
            left_out=int(own.sum()),
            verdict=verdict,
            earlier=earlier,
            seed=seed,
            seconds=round(time.monotonic() - began, 3),
            typical=find_typical(effects),
        )
        write_validation(store, validation)
    return Comparison(validation, work.names, predict_removals(effects, chosen), actual)


register_validator(validate)
