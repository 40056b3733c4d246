"""The replay engine: the recorded run once per source, with that source at weight 0.

θ₋b is where the run ends without b, all else equal: start, order, normalisers, random numbers, learning rates. The row
of b is u_b = N(θ − θ₋b), with θ the recorded end; of parameters, and of buffers that training changes.

First the run is replayed as it was (`settle`), and compared with the recording step by step. Then come the rows:
stacked where the model and the optimiser allow it, otherwise one by one (`ways.py`). With the first sources go two runs
from slightly perturbed starts, which say how much of an effect is chaos.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from statistics import median
from typing import ClassVar

import torch

from imprint.display import count_of
from imprint.errors import SimulationError
from imprint.plan import EngineRules, Plan, Settings
from imprint.recording.records import Run
from imprint.runtime.memory import Peak, budget, tensor_bytes
from imprint.runtime.timing import measure_seconds
from imprint.simulation.descent import Descent
from imprint.simulation.engines.protocol import Chunk, Cost, Engine, Simulated, Work
from imprint.simulation.engines.replay.agreement import Agreement
from imprint.simulation.engines.replay.deviation import (
    MATERIAL,
    PRECISION,
    Deviation,
    describe_missed,
    describe_stacked,
    explain,
    half_precision,
    refuse_unexplained,
)
from imprint.simulation.engines.replay.effects import Effects
from imprint.simulation.engines.replay.room import TOO_MANY, Room
from imprint.simulation.engines.replay.rows import NOISE_ROWS, Lineup, replay_one_by_one, replay_together
from imprint.simulation.engines.replay.stack import OwnRouteError, Stack, bound_row
from imprint.simulation.engines.replay.training import (
    Repetition,
    Training,
    as_recorded,
    find_regularised,
)
from imprint.simulation.engines.replay.unperturbed import (
    Unperturbed,
    compare_first_steps,
    replay_unperturbed,
    withholds,
)
from imprint.simulation.engines.replay.ways import Way, find_dependence, find_unkept_state, find_way, leave_out
from imprint.simulation.path import Hooks
from imprint.simulation.recorded import find_begin
from imprint.simulation.snapshot import Snapshot
from imprint.sources import Sources
from imprint.store.checkpoint import CHAOTIC, Decided, Measured
from imprint.task import Parameters
from imprint.tensors.vectors import minus, norm, repeated, root_mean_square, scale, six_digits

logger = logging.getLogger(__name__)
_LOST = 0.3  # of a removal's effect: by so much a later start may change it without a warning
_SPREAD = 2  # sources that are replayed from step 0 too, where a plan starts later
_STEPS = 6  # measured, of which the first two, which warm up, do not count


class Replay(Engine):
    """The recorded run without each source, for few sources and any training that can be repeated."""

    name = "replay"
    rules = EngineRules(frozenset({"start", "stacked"}), second_order=False, question="this_run", removes=True)
    unit: ClassVar[str] = "source-steps"

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._way: Way | None = None
        self._unkept: str | None = None  # what training changes beside parameters and persistent buffers

    @property
    def run(self) -> Run:
        """The recorded run."""
        assert self.work.run is not None  # a plan for this engine is refused without one
        return self.work.run

    @cached_property
    def repetition(self) -> Repetition:
        """What is repeated: the steps from the last checkpoint on that is not after the plan's start."""
        return self.repetition_from(find_begin(self.run, self.plan.start))

    def repetition_from(self, begin: int) -> Repetition:
        """Return the repetition of the run from one of its checkpoints on."""
        return Repetition(self.descent.task.task, self.descent.data, self.run, begin, self._regularised)

    @cached_property
    def _regularised(self) -> bool:
        """Whether the loss was regularised, as the first step tells."""
        begin = find_begin(self.run, self.plan.start)
        return find_regularised(Repetition(self.descent.task.task, self.descent.data, self.run, begin))

    @cached_property
    def effects(self) -> Effects:
        """Measures changes of F relative to the recorded end."""
        return Effects(self.descent.task, self.descent.start, self.descent.data)

    @property
    def way(self) -> Way:
        """How rows are replayed, once that is decided."""
        assert self._way is not None
        return self._way

    # --- before the rows

    def settle(self) -> None:
        """Choose how rows are replayed, replay the run as it was and compare it with the recording."""
        self.choose_way()
        snapshots = self.work.files.snapshots() if self.work.files else []
        try:
            self.unperturbed = self._replay_unperturbed(*snapshots[:1])
            lost = self.measure_start_lost(*snapshots[1:]) if self.repetition.begin else None
        except SimulationError:  # which would come again
            _clear(snapshots)
            raise
        _clear(snapshots)
        deviation = self.unperturbed.deviation  # `conclude` relates it to the effect of a removal
        self.measured = Measured(one_by_one=self.way.one_by_one, deviation=deviation, start_lost=lost)
        rows = self.rows_that_fit()
        rate = self.repetition.find_highest_rate()
        self.decided = Decided(
            lr=self.descent.lr if rate is None else rate,
            rows_per_file=rows,
            rows_at_once=rows,
            vectorised=self.way.one_by_one is None,
            noise_rows=NOISE_ROWS,
        )

    def choose_way(self) -> None:
        """Find out how rows can be replayed."""
        tried = "runs can be replayed together" if self.plan.stacked else "examples of a batch see each other"
        self.work.announce(f"trying whether {tried}")
        with as_recorded(self.run.circumstances):
            self._way = find_way(self.repetition, stacks=self.plan.stacked)
            self._unkept = find_unkept_state(self.repetition, twice=self._way.leaves_out)
        if self._way.one_by_one is None and (reason := self._room.find_lack()) is not None:
            logger.warning("runs are replayed one by one: %s", reason)
            self._way = replace(self._way, one_by_one=reason)

    def take_over(self, decided: Decided, measured: Measured) -> None:
        self.decided, self.measured = decided, measured
        with as_recorded(self.run.circumstances):
            if decided.vectorised:
                self._way = replace(find_way(self.repetition), one_by_one=None)
            elif find_dependence(self.repetition) is not None:
                self._way = leave_out(self.repetition, measured.one_by_one or "")
            else:
                self._way = Way(False, measured.one_by_one)
            self._unkept = find_unkept_state(self.repetition, twice=False)
        self.recognise()
        if decided.vectorised and (reason := self._room.find_lack()) is not None:  # another machine may have had more
            logger.warning("runs are replayed together, as was decided before, although %s", reason)
        if measured.norms is not None:  # of a finished store, whose deviation is relative to the effects already
            self.measured = replace(measured, deviation=self.unperturbed.deviation)

    def recognise(self) -> None:
        if "unperturbed" not in vars(self):  # which compares all steps
            compare_first_steps(self.repetition, leaves_out=self._way is not None and self._way.leaves_out)

    @cached_property
    def unperturbed(self) -> Unperturbed:
        """The run as it was, replayed and compared with the recording."""
        return self._replay_unperturbed()

    def _replay_unperturbed(self, snapshot: Snapshot | None = None) -> Unperturbed:
        return replay_unperturbed(
            self.repetition,
            hear=self._hear_step,
            compare=lambda end: self.effects.change(self._displaced(end)),
            snapshot=snapshot,
        )

    def _hear_step(self, name: str) -> None:
        """Tell of a step that belongs to no source."""
        self.work.announce(name)
        self.work.advance(0)

    def measure_start_lost(self, late_snapshot: Snapshot | None = None, snapshot: Snapshot | None = None) -> float:
        """Return how much of a removal's effect a later start loses: rms change of F over the rms effect."""
        few, made = self.descent.sources.spread(_SPREAD), count(1)

        def hear(rows: int) -> None:
            self._hear_step(f"measuring what a later start loses, step {next(made):,}")

        late = self._replay(self.repetition, Lineup(few), Hooks(hear, snapshot=late_snapshot))
        early = self._replay(self.repetition_from(0), Lineup(few), Hooks(hear, snapshot=snapshot))
        changes, effects = [], []
        for members, one, other in zip(few.members, late, early, strict=True):
            changes.append(self.effects.compare(self._displaced(one), self._displaced(other), members))
            effects.append(self.effects.change(self._displaced(other), members))
        return six_digits([root_mean_square(changes) / root_mean_square(effects)])[0] if any(effects) else 0.0

    # --- rows

    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        """Replay the run without each of some sources; with the first ones, from slightly perturbed starts too."""
        stacked, sources = self.way.one_by_one is None, descent.sources
        lineup = Lineup(sources, self.plan.seed if hooks.first else None, control=hooks.first and stacked)
        if stacked:
            self.work.announce(f"beginning {count_of(len(lineup.rows), 'run')} at once")
        hooks = replace(hooks, announce=self.work.announce)
        ends = [self._displaced(end) for end in self._replay(self.repetition, lineup, hooks)]
        own, others = ends[: len(sources)], ends[len(sources) :]
        effects = [self.effects.change(e, members) for e, members in zip(own, sources.members, strict=True)]
        noise, control = others[: NOISE_ROWS if hooks.first else 0], others[NOISE_ROWS:]
        unperturbed = control[0] if control else descent.start  # what a perturbed start is compared with
        moved = root_mean_square([self.effects.compare(end, unperturbed) for end in noise])
        missed = max(map(self.effects.change, control), default=0.0)
        deviation = Deviation(self.measured.deviation or 0.0, missed, moved, root_mean_square(effects))
        if hooks.first and deviation.plain > MATERIAL * deviation.effect:
            refuse_unexplained(deviation, self.unperturbed, self.repetition)
        start = {**descent.start, **self._displaced(self.repetition.start())}
        return Chunk(
            base=descent.start,
            imprints=self._rows(own),
            drift=norm(minus(descent.start, start)) / scale(descent.start, descent.task),
            noise=self._rows(noise, unperturbed) if noise else None,
            effects=effects,
            noise_effect=moved if noise else None,
            deviation=deviation.largest if hooks.first else None,
        )

    def _replay(self, repetition: Repetition, lineup: Lineup, hooks: Hooks) -> list[Parameters]:
        if withholds(self.repetition):
            repetition = replace(repetition, routes=self.unperturbed.routes)
        if self.way.one_by_one is None:
            try:
                return replay_together(repetition, lineup, hooks, plain_attention=self.way.plain_attention)
            except OwnRouteError as error:
                logger.warning("runs are replayed one by one: %s", error)
                self._way = replace(self.way, one_by_one=str(error))
                self.measured = replace(self.measured, one_by_one=str(error))
        return replay_one_by_one(repetition, lineup, hooks, leaves_out=self.way.leaves_out)

    def _displaced(self, end: Parameters) -> Parameters:
        """Return what of an end the imprints hold: parameters, and buffers that the run changed."""
        return {name: end.get(name, tensor) for name, tensor in self.descent.start.items()}

    def _rows(self, ends: Sequence[Parameters], theta: Parameters | None = None) -> Parameters:
        """Return u = N(θ − θ₋b) for each end, as a stack; θ is the recorded end by default."""
        theta = theta or self.descent.start
        rows = {name: theta[name].new_empty((len(ends), *theta[name].shape)) for name in self.descent.start}
        with torch.no_grad():
            for name, stacked in rows.items():  # in place: the ends take enough memory as it is
                for row, end in zip(stacked, ends, strict=True):
                    torch.sub(theta[name], end[name], out=row).mul_(self.descent.n)
        return rows

    # --- what makes them doubtful

    def warn(self, notice: Callable[[str], None]) -> None:
        if self._unkept is not None:
            notice(
                f"training changes {self._unkept}, which no checkpoint keeps: effects leave out what a source does to "
                "it. Register it as a persistent buffer before training, if predictions depend on it."
            )
        if self.way.fresh_draws is not None:
            notice(
                f"{self.way.fresh_draws}: where a source is left out of a batch, the other examples get other random "
                "numbers than in training, which every effect contains, and which the noise does not show."
            )
        if self.measured.start_lost is not None and self.measured.start_lost > _LOST:
            notice(
                f"a replay that begins after {self.repetition.begin} steps differs from one of the whole run by "
                f"{self.measured.start_lost:.2g} of a removal's effect: replay from an earlier start= for exact "
                "effects."
            )

    def remark(self) -> dict[str, str]:
        return {**explain(self.unperturbed.agreement), PRECISION: half_precision(self.repetition) or ""}

    @classmethod
    def conclude(cls, found: Simulated) -> Measured:
        measured = super().conclude(found)
        if measured.chaos is not None and measured.chaos > CHAOTIC:
            found.notice(
                f"this run is chaotic: a start that differs by a thousandth moves predictions by {measured.chaos:.2g} "
                f"times what removing a source does (above {CHAOTIC}, removals no longer predict each other). What "
                "this very run would have been without a source is then mostly chance. Ask what training like this "
                "does (engines that start at checkpoints), or train with a smaller learning rate."
            )
        if measured.deviation is not None and measured.deviation > MATERIAL:
            plain = found.measured.deviation or 0.0  # of the unperturbed replay
            describe = describe_stacked if (found.shards[0].deviation or 0.0) > 2 * plain else describe_missed
            found.notice(describe(measured.deviation, measured.chaos, found.remarks()))
        return measured

    # --- what it takes

    @classmethod
    def units(cls, plan: Plan, settings: Settings, sources: Sources) -> int:
        return settings.path * len(sources)

    @classmethod
    def trainings(cls, sources: Sources) -> int:
        return len(sources) + NOISE_ROWS + 1  # the run as it was is repeated too

    def rows_that_fit(self, before: int | None = None) -> int:
        """Return how many sources fit the memory budget together, beside the other rows of the first chunk."""
        if self.way.one_by_one is None:
            fit = self._room.together
        else:  # only the ends of rows, and their differences, are there at once
            fit = self._allowed // (3 * tensor_bytes(self.descent.start)) - NOISE_ROWS
        return max(1, min(len(self.descent.sources), fit))

    @property
    def _allowed(self) -> int:
        return budget(self.work.memory, self.descent.data.device)

    @cached_property
    def _room(self) -> Room:
        """What memory allows of a stack; on a CPU by a bound of what a row takes."""
        self.work.announce("measuring how many sources fit into memory")
        count, others = len(self.descent.sources), NOISE_ROWS + 1
        if self.descent.data.device.type == "cuda":
            return Room(self._allowed, count, others, self._measure_rows)
        each = bound_row(self.repetition, self.descent.start)
        return Room(self._allowed, count, others, lambda rows: rows * each)

    def _measure_rows(self, rows: int) -> int:
        """Measure what a step of so many rows takes on CUDA, beside what is allocated already."""
        device = self.descent.data.device
        there, peak = torch.cuda.memory_allocated(device), Peak(device)
        try:
            self._time_steps(self.descent.sources.spread(min(rows, len(self.descent.sources))), 2, rows)
        except torch.OutOfMemoryError:
            return TOO_MANY
        return (peak.bytes or 0) - there

    def cost(self, checkpoints: list[Settings]) -> Cost:
        """Measure a few steps of a plain training and of a chunk of sources."""
        trying, _ = measure_seconds(self.choose_way)
        self.measured = Measured(one_by_one=self.way.one_by_one)
        fitting, rows = measure_seconds(self.rows_that_fit)
        sources, steps = self.descent.sources, len(self.repetition.steps)
        training = Peak(self.descent.data.device)
        plain, alone = self._time_plain(), training.bytes
        measuring, _ = measure_seconds(lambda: self.effects)
        others = NOISE_ROWS + (self.way.one_by_one is None)
        total = len(sources) + others
        at_once = min(rows + others, total)
        if self.way.one_by_one is None:
            step = self._time_steps(sources.spread(min(rows, len(sources))), _STEPS, at_once) * total / at_once
        else:
            step = plain * total
        seconds = trying + fitting + steps * (plain + step) + measuring * total
        if self.repetition.begin:
            seconds += _SPREAD * (steps + len(self.run.steps)) * plain
        values = sum(p.numel() for p in self.descent.start.values())
        noise = NOISE_ROWS * values * self.work.stored.itemsize
        memory = sum(map(tensor_bytes, self.run.optimiser_state(self.run.checkpoints[-1]).tensors.values()))
        ends = tensor_bytes(self.descent.start)
        found = Cost(seconds, values, rows, noise, training_seconds=plain * len(self.run.steps), training_bytes=alone)
        if self.way.one_by_one is None:
            return replace(found, scratch=at_once * (ends + memory))
        held = (at_once + min(rows, len(sources))) * ends  # the ends of a chunk, and its rows
        return replace(found, scratch=total * ends + memory, memory=held)

    def _time_plain(self) -> float:
        """Measure a step of a plain training; refuse the first ones if they differ from the recording."""
        training, agreement = Training(self.repetition, leaves_out=self.way.leaves_out), Agreement(self.repetition)

        def step(number: int) -> None:
            agreement.add(number, training.step(number, measure=True))

        with as_recorded(self.run.circumstances):
            taken = [self._measure(partial(step, number)) for number in self.repetition.steps[:_STEPS]]
        return median(taken[2:] or taken)

    def _time_steps(self, sources: Sources, count: int, rows: int | None = None) -> float:
        """Measure a step of a stack of sources, with as many other rows beside them as make up `rows`."""
        lineup = Lineup(sources).rows.padded(rows or len(sources))
        stack = Stack(
            self.repetition,
            lineup,
            repeated(self.repetition.start(), len(lineup)),  # which nothing else holds, as in a replay
            plain_attention=self.way.plain_attention,
        )
        with as_recorded(self.run.circumstances):
            taken = [self._measure(partial(stack.step, number)) for number in self.repetition.steps[:count]]
        return median(taken[2:] or taken)

    def _measure(self, call: Callable[[], object]) -> float:
        begin = time.monotonic()
        call()
        if self.descent.data.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - begin


def _clear(snapshots: Sequence[Snapshot]) -> None:
    for snapshot in snapshots:
        snapshot.clear()
