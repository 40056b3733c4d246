"""Simulates in parts that an executor makes somewhere, and merges them: what `simulate(executor=...)` does."""

import os
from functools import partial
from typing import Any, Literal

from imprint.display import name_some
from imprint.errors import PlanError
from imprint.plan import Plan
from imprint.runtime.memory import budget
from imprint.runtime.progress import Advance
from imprint.simulation import engines
from imprint.simulation.executors import Executor, Place, Recipe, run_parts
from imprint.simulation.inputs import Inputs
from imprint.simulation.merging import merge
from imprint.simulation.parts import simulate_part
from imprint.simulation.runner import refuse_note, settle_inputs
from imprint.sources import Sources
from imprint.store.addresses import elsewhere
from imprint.store.manifest import JOURNAL, MANIFEST
from imprint.store.part_writing import SharedCheckpoint
from imprint.store.parts import Part, PartsFolder, Share
from imprint.store.reading import Store
from imprint.store.shared_plan import find_plan
from imprint.task import Task


def simulate_on(
    executor: Executor,
    task: Task,
    data: Any,
    sources: Sources,
    plan: Plan | Literal["auto"] | None = None,
    *,
    out: str | os.PathLike[str] | None,
    note: Any = None,
    memory: int | str | None = None,
    repeat: Store | str | os.PathLike[str] | None = None,
    progress: bool | Advance = True,
    **given: Any,
) -> tuple[Store, Inputs]:
    """Simulate in parts on an executor, and merge them; return the store, and what it was made from.

    What every part would refuse is refused here, before any of them begins.
    """
    folder = open_folder(out)
    repeat = None if repeat is None else Store.of(repeat)
    inputs, checkpoints = settle_inputs(
        task,
        data,
        sources,
        plan,
        repeat=repeat,
        progress=progress,
        agree=lambda choose: find_plan(folder, task, sources) or choose(),
        **given,
    )
    refuse_note(note)
    settled = {"plan": inputs.plan, "run": inputs.run, "checkpoints": checkpoints, "note": note, "memory": memory}
    settled |= {"repeat": None if repeat is None else elsewhere(repeat.place), "out": str(folder.out)}
    whole: dict[str, Any] = {**given, **settled, "task": task, "data": data, "sources": sources}
    if folder.holds(MANIFEST):
        simulate_part("1/1", **whole, progress=progress)  # which compares the store with what is asked for
    else:
        folder.refuse_other_use("the store", JOURNAL)
        describe = partial(name_sources, folder, sources, inputs.first)
        how = ("simulating", engines.get(inputs.plan).unit, task.device.type)
        recipe = Recipe(make_part, whole, folder, len(sources), *how, describe)
        run_parts(executor, recipe, progress, inputs.notices.messages)
    return merge(folder.out, progress=progress is True), inputs


def open_folder(out: str | os.PathLike[str] | None) -> PartsFolder:
    """Return the folder in which parts meet that are made in several places."""
    if out is None:
        raise PlanError("an executor makes parts in several places, and they meet in a folder: give it as out=.")
    return PartsFolder(PartsFolder(out).out.absolute())  # the inner one refuses an address, which no path is


def make_part(part: str, place: Place, *, task: Task, memory: int | str | None, **given: Any) -> Part:
    """Simulate a part wherever an executor runs it."""
    if place.device is not None:
        task.model.to(place.device)
        given["device"] = None
    if memory is None and place.at_once > 1:
        memory = budget(None, task.device) // place.at_once
    return simulate_part(part, task, memory=memory, **given)


def name_sources(folder: PartsFolder, sources: Sources, checkpoint: int, share: Share) -> str:
    """Name the sources of a part, by their ids."""
    found = SharedCheckpoint.find(folder, checkpoint)
    rows = 1 if found is None else found[0].checkpoint.choices.rows_per_file
    chunks = share.of_chunks(-(-len(sources) // rows))
    ids = sources.ids[chunks.start * rows : chunks.stop * rows]
    return f"{'source' if len(ids) == 1 else 'sources'} {name_some(ids, 6)}" if ids else "no sources"
