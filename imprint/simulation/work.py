"""The work of a simulation: every checkpoint, every chunk of sources, into a folder.

It knows the protocol of engines, and no engine by name; and the folder, whether that will be a store or a part of one.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from imprint.errors import StoreError
from imprint.plan import Settings
from imprint.runtime.progress import Progress
from imprint.simulation import engines
from imprint.simulation.checkpoint_files import CheckpointFiles
from imprint.simulation.engines import Chunk, Engine
from imprint.simulation.figures import check_rows, summarise
from imprint.simulation.inputs import Inputs
from imprint.simulation.path import Hooks
from imprint.simulation.sizing import refit
from imprint.simulation.snapshot import Snapshot
from imprint.sources import Sources
from imprint.store.checkpoint import Checkpoint, File, Measured, ShardFigures, read_figures
from imprint.store.layouts import coefficients_dtype, layout
from imprint.store.manifest import Probes
from imprint.store.path_ends import END, summarise_end
from imprint.store.probing import evaluate_probes
from imprint.store.request import DTYPES
from imprint.store.values import Value
from imprint.store.workspace import Workspace
from imprint.task import Parameters


class Simulation:
    """A simulation under way: every checkpoint, every chunk of sources that belongs to the folder."""

    def __init__(self, inputs: Inputs, memory: int | str | None, workspace: Workspace[Any], bar: Progress) -> None:
        self.inputs, self.memory, self.workspace, self.bar = inputs, memory, workspace, bar
        self._reached = 0  # units of work that are behind, whoever did them

    def checkpoint(self, index: int, settings: Settings) -> Checkpoint:
        """Simulate and write one checkpoint: all of it, or those of its chunks that belong to the folder."""
        planned, everyone = Checkpoint.planned(settings), self.inputs.sources
        if settings.weight == 0 or not self.workspace.simulates(index) or not self.workspace.chunks(len(everyone)):
            return planned
        state, files = self.inputs.state(index), CheckpointFiles(self.workspace, index)
        resumed = self.workspace.settled(index) is not None
        engine, basis, here = self._settle(index, planned, state, files)
        engine.warn(self.inputs.notices.add)
        self._reach(engine.shared_units(engine.plan, len(self.inputs.data)), fresh=not resumed)
        fit = min(engine.choices.rows_at_once, len(everyone))
        if not here and (self.memory is not None or not self.workspace.is_whole):  # another machine may have had more
            fit = refit(fit, engine.rows_that_fit(fit), self.memory)
        expected, units = (
            count_units(self.inputs, settings, self.workspace, r) for r in (1, engine.choices.rows_per_file)
        )
        self.bar.total += units - expected
        shards = list(self._shards(engine, files, state, fit))
        first = shards[0] if shards and shards[0].base is not None else None
        return replace(
            planned,
            decided=engine.choices,
            measured=self._conclude(engine, shards),
            base=first.base if first else None,
            imprints=tuple(shard.imprints for shard in shards),
            midpoints=tuple(shard.midpoints for shard in shards if shard.midpoints is not None),
            basis=basis,
            noise=first.noise if first else None,
        )

    def _settle(
        self, index: int, planned: Checkpoint, state: Parameters, files: CheckpointFiles
    ) -> tuple[Engine, File | None, bool]:
        """Return an engine that is ready for the sources of a checkpoint, and the basis that it keeps imprints on.

        The last value tells whether its choices were made just now, and not by an earlier run or another process.
        """
        workspace = self.workspace
        engine, settled = self._engine(index, state, files), workspace.settled(index)
        if settled is None:
            engine.settle()
            engine.decided = workspace.bound(engine.choices, len(self.inputs.sources))
            workspace.settle(index, replace(planned, decided=engine.choices, measured=engine.measured))
        else:
            engine.take_over(settled.choices, settled.measured)
        basis = engine.prepare()
        mine = replace(planned, decided=engine.choices, measured=engine.measured, basis=basis)
        agreed = workspace.agree(index, mine, engine.remark)
        if agreed is mine:
            return engine, basis, settled is None
        engine = self._engine(index, state, files)  # another process has settled it first
        engine.take_over(agreed.choices, agreed.measured)
        return engine, engine.prepare(), False

    def _engine(self, index: int, state: Parameters, files: CheckpointFiles) -> Engine:
        hears = self.bar.advance, self.bar.announce
        return engines.at_checkpoint(self.inputs, index, state, self.memory, files, *hears)

    def _conclude(self, engine: Engine, shards: "list[_Shard]") -> Measured:
        """Add to what was measured what all imprints say, where they are all here."""
        if not self.workspace.is_whole:
            return engine.measured
        figures = [shard.figures for shard in shards]
        return summarise(type(engine), engine.gather(figures, self.inputs.notices.add))

    def _shards(self, engine: Engine, files: CheckpointFiles, state: Parameters, fit: int) -> "Iterator[_Shard]":
        """Simulate the sources file by file; those that an earlier run has finished are taken from it."""
        rows = engine.choices.rows_per_file
        for number in self.workspace.chunks(-(-len(self.inputs.sources) // rows)):
            start = number * rows
            sources = self.inputs.sources.rows(start, start + rows)
            place = _Place(files, number, (start, start + len(sources)), number == 0 and self.workspace.begins)
            shard = self._find(engine, place, state)
            found = shard is not None
            if shard is None:
                chunk, snapshots = self._simulate(engine, place, sources, fit)
                self._check_end(files.index, chunk, snapshots)
                shard = self._write(place, state, chunk, check_rows(engine, sources, chunk))
                for snapshot in snapshots:
                    snapshot.clear()
            self._reach(engine.units(engine.plan, engine.work.settings, sources), fresh=not found)
            yield shard

    def _simulate(self, engine: Engine, place: "_Place", sources: Sources, fit: int) -> tuple[Chunk, list[Snapshot]]:
        """Simulate the sources of a file, so many at once; return also where their state was kept meanwhile."""
        chunks, snapshots = [], []
        for first in range(0, len(sources), fit):
            if path := self.workspace.snapshot(place.files.folder):
                snapshots.append(Snapshot(path, place.rows[0] + first))
            begins = place.begins and first == 0
            hooks = Hooks(self.bar.advance, self.bar.skip, snapshots[-1] if snapshots else None, begins)
            chunks.append(engine.simulate(engine.descent.with_sources(sources.rows(first, first + fit)), hooks))
        return engines.join(chunks), snapshots

    def _check_end(self, index: int, chunk: Chunk, snapshots: list[Snapshot]) -> None:
        """Refuse sources that are of other data than those in the folder; nothing is resumed from them."""
        try:
            self.workspace.check_end(index, chunk.base)
        except StoreError:
            for snapshot in snapshots:
                snapshot.clear()
            raise

    def _write(self, place: "_Place", state: Parameters, chunk: Chunk, figures: ShardFigures) -> "_Shard":
        """Write the imprints of a file. They come last: where they are, all of it is."""
        base = midpoints = noise = None
        if place.begins:
            base = place.files.write("base", self.inputs.without_fixed({**state, **chunk.base}))
            noise = place.files.write("noise", self._cast(chunk.noise)) if chunk.noise is not None else None
        if chunk.midpoints is not None:
            midpoints = place.files.write(place.name("midpoints"), self._cast(chunk.midpoints), place.rows)
        if self.workspace.keeps_ends:
            place.files.write(place.name(END), summarise_end(state, chunk.base), place.rows)
        tensors = self._cast(chunk.imprints, chunk.exact)
        imprints = place.files.write(place.name("imprints"), tensors, place.rows, asdict(figures))
        return _Shard(imprints, figures, base, midpoints, noise)

    def _find(self, engine: Engine, place: "_Place", state: Parameters) -> "_Shard | None":
        """Find what an earlier run has left of a file of imprints, if it finished it."""
        count, keeps_pair = place.rows[1] - place.rows[0], self.inputs.plan.keep_pair
        base = midpoints = noise = None
        noise_rows = engine.choices.noise_rows if place.begins else 0
        if noise_rows:
            stack = layout(engine.descent.start, noise_rows, engine.work.stored)
            noise = place.files.find("noise", None, stack, Value.mapping)
        if place.begins:
            whole = layout(self.inputs.without_fixed({**state, **engine.descent.start}))
            base = place.files.find("base", None, whole, Value.mapping)
        if keeps_pair:
            stack = layout(engine.descent.start, count, engine.work.stored)
            midpoints = place.files.find(place.name("midpoints"), place.rows, stack, Value.mapping)
        imprints = place.files.find(
            place.name("imprints"), place.rows, engine.layout(count), partial(read_figures, count=count)
        )
        if imprints is None or place.begins != bool(base) or keeps_pair != bool(midpoints):
            return None
        if bool(noise_rows) != bool(noise):
            return None
        return _Shard(*imprints, *(found[0] if found else None for found in (base, midpoints, noise)))

    def _reach(self, units: int, *, fresh: bool) -> None:
        """Bring the progress to where so much more work is behind."""
        self._reached += units
        if (left := self._reached - self.bar.done) > 0:
            (self.bar.advance if fresh else self.bar.skip)(left)

    def _cast(self, tensors: Parameters, exact: frozenset[str] = frozenset()) -> Parameters:
        stored = DTYPES[self.inputs.stored_as]
        return {name: t.to(coefficients_dtype(stored) if name in exact else stored) for name, t in tensors.items()}

    def probes(self, checkpoints: tuple[Checkpoint, ...]) -> Probes | None:
        """Keep a few training examples, with their losses where the first checkpoint is read out."""
        index = next(k for k, checkpoint in enumerate(checkpoints) if checkpoint.weight > 0)
        base = CheckpointFiles(self.workspace, index).load("base", self.inputs.task.device)
        examples = self.workspace.request.probes.examples
        batch = self.inputs.data.gather(torch.tensor(examples))
        at_base = self.inputs.task.at({**self.inputs.fixed, **base})
        return self.workspace.probes(batch, evaluate_probes(*at_base, batch, len(examples)))


def count_units(inputs: Inputs, settings: Settings, workspace: Workspace[Any], rows: int = 1) -> int:
    """Return how much work the sources of a checkpoint are in a folder, in files of so many sources."""
    numbers = workspace.chunks(-(-len(inputs.sources) // rows))
    if not numbers:
        return 0
    own = inputs.sources.rows(numbers.start * rows, numbers.stop * rows)
    return engines.get(inputs.plan).units(inputs.plan, settings, own)


@dataclass(frozen=True)
class _Place:
    """Where a chunk of sources goes: the number of its file, its rows, and whether the base comes with it."""

    files: CheckpointFiles
    number: int
    rows: tuple[int, int]
    begins: bool

    def name(self, what: str) -> str:
        return f"{what}-{self.number:05}"


@dataclass(frozen=True)
class _Shard:
    """The files of one chunk of sources, and what was measured on it."""

    imprints: File
    figures: ShardFigures
    base: File | None
    midpoints: File | None
    noise: File | None
