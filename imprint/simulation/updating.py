"""Brings a store up to date: simulates the sources or checkpoints that it lacks, and keeps all others as they are.

The sources that are given are those that the store will have, as a simulation of them would have made it. Members of a
source are compared by digests: one that has others is another source, and is simulated again.
"""

import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from imprint.about import NOTHING, About
from imprint.data import Collate
from imprint.display import name_some
from imprint.errors import PlanError, ReliabilityWarning, SourcesError, StoreError
from imprint.plan import Checkpoints, Plan, Settings
from imprint.runtime.progress import Advance
from imprint.simulation import engines
from imprint.simulation.inputs import Inputs
from imprint.simulation.recorded import Recorded
from imprint.simulation.revising import Next, changing
from imprint.simulation.runner import settle_inputs, simulate_into
from imprint.simulation.states import flatten
from imprint.simulation.taking_over import check_choices
from imprint.sources import Sources, require_sources
from imprint.store.assembling import Origin, Row, adopt
from imprint.store.comparison import compare_losses, compare_training_data, difference
from imprint.store.describing import describe_changed
from imprint.store.draws import Draws, refuse_other_draws
from imprint.store.fingerprint import Likeness, are_sources, how_hashed, of_members, of_sources
from imprint.store.manifest import Manifest, add_costs, find_other_circumstance
from imprint.store.reading import Store
from imprint.store.request import DTYPES, Request
from imprint.store.supplement import UPDATE, Supplement, holds_other_work, remove_supplement
from imprint.store.table import Table
from imprint.task import Task

logger = logging.getLogger(__name__)


@torch.inference_mode(False)
def update(
    store: Store | str | os.PathLike[str],
    task: Task,
    data: Any,
    sources: Sources,
    *,
    checkpoints: Checkpoints | None = None,
    run: Recorded | None = None,
    plan: Plan | None = None,
    drop: bool = False,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    memory: int | str | None = None,
    progress: bool | Advance = True,
) -> Store:
    """Bring a store up to date with its sources, or with further checkpoints; return its new version.

    Only what the store lacks is simulated: sources that are new, or whose members have changed, and checkpoints that
    follow those it has. The result is what `simulate` makes of the same sources, within rounding.

    task, data, checkpoints, run, collate_fn: as the store was made with them. Other training data is another base, and
        is refused: every imprint would change.
    sources: all sources that the store is to have, in their order. A source is split by giving its pieces in its
        place, and two are united by giving their union: it is simulated, since removals do not add.
    checkpoints: those of the store and then further ones, for all of its sources.
    plan: that of the store by default. One is needed for further checkpoints if it has settings for each of them.
    drop: whether sources of the store that are not among `sources` are dropped. Without it they are refused.

    What the first simulation decided (learning rates, ε, basis) is used again. The same call again resumes an
    interrupted update, and returns the store if there is nothing to do; even then, all that is given is compared with
    what the store was made from. Until the update is complete the store is read
    as it was.
    """
    require_sources(sources)
    named = {"checkpoints": checkpoints, "run": run, "collate_fn": collate_fn, "device": device}
    given = _Basis(task, data, plan, named, memory, progress)
    with changing(store) as version:
        found = _Change.find(version.store, sources, checkpoints)
        found.refuse_dropping(drop)
        if run is None and version.store.removes:
            raise PlanError(
                f"{version.store.path} repeats the recorded run {str(version.store.manifest.request.recording)[:12]}: "
                "give its recording as run= (--run), as when the store was made."
            )
        made = _apply(version, found, given)
        if found.simulates or not holds_other_work(made):
            remove_supplement(made.path)
        else:
            logger.warning("%s is of another update, and is kept: finish that, or delete it", made.path / UPDATE)
    made.origin = {"task": task, "data": data, "sources": sources, "run": run, "collate_fn": collate_fn}
    made.origin["before"] = store  # a temporary folder lives as long as its first store
    return made


@dataclass(frozen=True)
class _Basis:
    """What the sources of an update are simulated from.

    plan: None for that of the store. named: arguments that `settle_inputs` and `simulate_into` have in common.
    """

    task: Task
    data: Any
    plan: Plan | None
    named: Mapping[str, Any]
    memory: int | str | None
    progress: bool | Advance

    def plan_for(self, before: Manifest) -> Plan:
        return before.plan if self.plan is None else self.plan

    def options_for(self, before: Manifest) -> dict[str, Any]:
        """Return options of a simulation, among them those that the store was made with."""
        return {
            **self.named,
            "batch_size": before.execution.batch_size,
            "dtype": DTYPES[before.dtype],
            "hash_data": how_hashed(vars(before.request.data)),
            "progress": self.progress,
        }


@dataclass(frozen=True)
class _Change:
    """What has to be done to a store.

    sources: those that it will have.
    kept: for each of them its place in the store; None for one that is simulated.
    checkpoints: how many it will have.
    """

    store: Store
    sources: Sources
    kept: tuple[int | None, ...]
    checkpoints: int

    @classmethod
    def find(cls, store: Store, sources: Sources, checkpoints: Checkpoints | None) -> "_Change":
        """Compare the sources and the checkpoints of a store with those that are given."""
        table, now = store.table, Table.of(sources)
        if not table.members:
            table = _recognise(store, sources)
        places = table.by_id()
        kept = tuple(
            place if now.is_same(row, table, place := places.get(identity)) else None
            for row, identity in enumerate(now.ids)
        )
        count = len(store.checkpoints) if checkpoints is None else len(flatten(list(checkpoints))[0])
        found = cls(store, sources, kept, count)
        if count < len(store.checkpoints):
            raise PlanError(
                f"{store.path} has {len(store.checkpoints)} checkpoints, and {count} are given: give those of the "
                "store, and then further ones."
            )
        if count > len(store.checkpoints) and (None in kept or set(kept) != set(range(len(store)))):
            raise SourcesError(
                "sources and checkpoints cannot change at once: update the sources first, and add checkpoints then."
            )
        return found

    @property
    def new(self) -> Sources:
        """The sources that are simulated."""
        return self.sources.select([row for row, place in enumerate(self.kept) if place is None])

    @property
    def all(self) -> Sources:
        """All sources of the store, in its order."""
        rows = {place: row for row, place in enumerate(self.kept)}
        return self.sources.select([rows[place] for place in range(len(self.store))])

    @property
    def rows(self) -> list[Row]:
        """The sources as rows of the store, and of what is simulated."""
        fresh = iter(range(len(self.kept)))
        return [(1, next(fresh)) if place is None else (0, place) for place in self.kept]

    @property
    def about(self) -> Mapping[str, About]:
        return dict(zip(self.sources.ids, self.sources.about or (NOTHING,) * len(self.sources), strict=True))

    def refuse_dropping(self, drop: bool) -> None:
        """Refuse to lose sources, unless the caller says so."""
        kept = set(self.kept)
        lost = [identity for place, identity in enumerate(self.store.source_ids) if place not in kept]
        if not lost or drop:
            return
        known = set(self.sources.ids)
        other = [identity for identity in lost if identity in known]
        if other:
            raise SourcesError(
                f"{name_some(other, 5)} had other members in the store: if these are right, and imprints of the former "
                "are to be dropped, give drop=True (--drop)."
            )
        raise SourcesError(
            f"the sources given lack {name_some(lost, 5)}, which the store has. Give all sources that the store is to "
            "have, and drop=True (--drop) if imprints of the others are to be dropped."
        )

    @property
    def simulates(self) -> bool:
        """Whether something has to be simulated: a source, or a checkpoint."""
        return None in self.kept or self.checkpoints > len(self.store.checkpoints)

    def is_nothing(self) -> bool:
        """Tell whether the store is what is asked for."""
        same = self.kept == tuple(range(len(self.store))) and self.sources.names == self.store.source_names
        return same and bool(self.store.table.members) and self.checkpoints == len(self.store.checkpoints)


def _recognise(store: Store, sources: Sources) -> Table:
    """Return the table of a store that does not keep digests of members, as they are recognised from all sources."""
    places = {identity: place for place, identity in enumerate(sources.ids)}
    own = [places[identity] for identity in store.source_ids if identity in places]
    whole = sources.select(own) if len(own) == len(store) else None
    if whole is None or not are_sources(replace(whole, names=store.source_names), store.manifest.request.sources):
        raise SourcesError(
            f"{store.path} was made by a version that did not record which examples each source has: give all of its "
            "sources, unchanged, and new ones beside them. Then others can be dropped or changed."
        )
    return Table.of(replace(whole, names=store.source_names))


def _apply(version: Next, found: _Change, given: _Basis) -> Store:
    """Simulate what is lacking and write the next version of a store; return it as it is if nothing is to be done."""
    store, before = version.store, version.store.manifest
    fresh = found.checkpoints > len(store.checkpoints)
    if not found.simulates:
        _check_given(found, given)
    if found.is_nothing():
        describe_changed(store.path, store.source_ids, found.about)
        return Store(store.path)
    manifest = replace(
        before,
        request=replace(before.request, sources=of_sources(found.sources), members=of_members(found.sources)),
        shared=found.sources.shared,
    )
    origins = [version.origin]
    own = _simulate(found, found.all if fresh else found.new, given) if found.simulates else None
    version.clear()
    if own is not None:
        origins.append(Origin.of(store.path / UPDATE, own))
        manifest = _add_up(manifest, own, before)
        if fresh:
            request = replace(
                own.request,
                **{name: getattr(manifest.request, name) for name in ("sources", "members", "probes", "fixed")},
            )
            added = adopt(store.path, origins[1], range(len(store.checkpoints), found.checkpoints))
            manifest = replace(manifest, request=request, checkpoints=(*before.checkpoints, *added))
            origins = [replace(version.origin, checkpoints=manifest.checkpoints)]
    return version.write(manifest, origins, found.rows, Table.of(found.sources), "updated", found.about, given.progress)


def _check_given(found: _Change, given: _Basis) -> None:
    """Refuse what the store was not made from, where nothing is simulated that would be compared with it."""
    before = found.store.manifest
    known = (given.task, given.data, found.sources, given.plan_for(before))
    inputs, _ = settle_inputs(*known, **given.options_for(before), repeat=None)
    with given.task.evaluating():
        _compare(found.store, inputs.request(), inputs, 0)
        for index, settings in enumerate(inputs.settings):
            if settings.weight > 0:
                engines.at_checkpoint(inputs, index, inputs.state(index), given.memory).recognise()


def _simulate(found: _Change, sources: Sources, given: _Basis) -> Manifest:
    """Simulate some sources as those of a store were; return what is in the folder of the update then."""
    store, before = found.store, found.store.manifest
    layers = [name for checkpoint in store.checkpoints if checkpoint.decided for name in checkpoint.decided.layers]
    if layers and max(sources.sizes) > 1:
        group = next(i for i, size in zip(sources.ids, sources.sizes, strict=True) if size > 1)
        raise SourcesError(
            f"{store.path} keeps imprints of single examples as factors, and source {group!r} has several examples: "
            'simulate a new store, or one with form="dense" or "projected" for both kinds.'
        )
    if given.plan is None:
        _refuse_short_plan(before.plan, found.checkpoints)
    first = len(store.checkpoints) if found.checkpoints > len(store.checkpoints) else 0

    def open_supplement(request: Request, inputs: Inputs) -> Supplement:
        likeness = _compare(store, request, inputs, first)
        by_end = (likeness.by != "all" or request.plan.dropout) and inputs.data.changing_example() is None
        wanted, request = range(first, found.checkpoints), replace(request, fixed=before.request.fixed)
        made_with = Draws(before.execution.batch_size, torch.device(before.execution.device).type)
        refuse_other_draws(made_with, inputs.draws, request.n, f"{store.path} has imprints", "simulate a new store")
        return Supplement(
            *(store, request, inputs.seen, check_choices, wanted, inputs.draws), compares_ends=bool(by_end)
        )

    known = (given.task, given.data, sources, given.plan_for(before))
    made, _ = simulate_into(open_supplement, *known, **given.options_for(before), memory=given.memory)
    return made


def _refuse_short_plan(plan: Plan, checkpoints: int) -> None:
    """Refuse the plan of a store that has settings for each of its checkpoints, and none for those that are added."""
    try:
        plan.at(0, checkpoints)
    except PlanError as error:
        raise PlanError(
            f"{str(error).rstrip('.')}: give plan= (--plan) with a value for each of them, the first as in the store."
        ) from error


def _compare(store: Store, request: Request, inputs: Inputs, first: int) -> Likeness:
    """Refuse to add to a store what was simulated from something else. Sources may differ, and later checkpoints."""
    before, likeness = store.manifest.request, compare_training_data(store.manifest.request, request)
    if before.n != request.n or not likeness.same:
        what = f"{before.n} training examples, now {request.n}" if before.n != request.n else "other training data"
        raise StoreError(
            f"{store.path} cannot be updated: it was made from {what}. More or other data is another base, with which "
            "every imprint changes: simulate a new store."
        )
    count = len(before.states)
    expected = replace(before, sources=request.sources, members=request.members, fixed=request.fixed)
    if first:
        later = {name: getattr(before, name) + getattr(request, name)[count:] for name in ("states", "moments", "runs")}
        same = all(before.plan.at(k, count) == request.plan.at(k, len(request.states)) for k in range(count))
        settings = {each.name: getattr(request.plan, each.name) for each in fields(Settings)} if same else {}
        expected = replace(expected, **later, plan=replace(before.plan, **settings))
    if different := difference(expected, request, inputs.seen):
        raise StoreError(f"{store.path} cannot be updated: {different}.")
    if likeness.by == "none" and inputs.data.changing_example() is None:  # losses of other data tell nothing
        _compare_unhashed(store, inputs)
    else:
        likeness.warn()
    return likeness


def _compare_unhashed(store: Store, inputs: Inputs) -> None:
    """Refuse data that was not hashed and has other losses than before; it reads the same each time."""
    before = store.manifest.request.probes
    if different := compare_losses(before.values, inputs.seen(before.examples)):
        raise StoreError(
            f"{store.path} cannot be updated: {different}. It was made from other training data, or with another loss "
            "function: simulate a new store."
        )
    warnings.warn(
        f"the training data is taken to be the same: it was not hashed, and losses of {len(before.examples)} of its "
        f"{store.manifest.request.n:,} examples were compared.",
        ReliabilityWarning,
        stacklevel=2,
    )


def _add_up(manifest: Manifest, own: Manifest, before: Manifest) -> Manifest:
    """Add what was simulated to the costs and the warnings of a store."""
    messages = [*before.warnings, *own.warnings]
    if (other := find_other_circumstance(before, own)) is not None:
        messages.append(
            f"the store was updated under other circumstances than it was made under ({other}): imprints agree with "
            "those of one simulation up to rounding."
        )
    return replace(manifest, cost=add_costs([before.cost, own.cost]), warnings=tuple(dict.fromkeys(messages)))
