"""What an engine is: one way to turn sources into imprints, at one checkpoint.

A new engine is a subclass of `Engine` with a name and `simulate`, passed to `register`. The runner does the rest:
checkpoints, chunks of sources, files, resuming, casting, progress and estimates. An engine overrides what it knows
better: how a checkpoint is settled, what all sources share (`prepare`), what it costs. One whose `simulate` needs
what `prepare` made overrides `attempt` and `cost` too, which come before.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch

from imprint.errors import PlanError
from imprint.plan import Curvature, EngineRules, Plan, Settings, register_rules, unregister_rules
from imprint.recording.records import Run
from imprint.runtime.timing import measure_seconds
from imprint.simulation.checkpoint_files import CheckpointFiles
from imprint.simulation.descent import Descent
from imprint.simulation.inputs import Inputs
from imprint.simulation.path import Hooks
from imprint.simulation.preflight import find_why_not_vmap, refuse_loss
from imprint.simulation.sizing import rows_that_fit
from imprint.sources import Sources
from imprint.store.checkpoint import Decided, File, Measured, ShardFigures
from imprint.store.layouts import Layout, layout
from imprint.store.request import DTYPES
from imprint.task import Parameters
from imprint.tensors.vectors import root_mean_square, six_digits

_SAMPLE = 16  # sources that are simulated to measure what all of them will take


@dataclass(frozen=True)
class Work:
    """One checkpoint to simulate, and what the runner offers for it.

    first: whether no other checkpoint comes before it.
    files: of the checkpoint, for what outlives a killed run; None where nothing is to be kept.
    advance: called with the work that is done, in the engine's unit; `announce` with what is done before it.
    run: the recorded training run that ends at this checkpoint; None for engines that do without.
    """

    index: int
    settings: Settings
    descent: Descent
    stored: torch.dtype
    first: bool = True
    memory: int | str | None = None
    files: CheckpointFiles | None = None
    advance: Callable[[int], None] = lambda amount: None
    run: Run | None = None
    announce: Callable[[str], None] = lambda phase: None


@dataclass(frozen=True)
class Chunk:
    """The imprints of some sources, one row for each.

    base: the selected parameters at the read-out point, which is the same for all chunks.
    imprints: u_b as it is kept: one tensor per parameter, or the factors of `imprint.tensors.rows`.
    exact: names of tensors in `imprints` that keep more digits than the store has.
    drift: how far the unperturbed path leads, relative to the parameters.
    midpoints: (θ⁺ + θ⁻)/2 − base, where both perturbed end points are kept.
    linearity: ‖θ⁺ + θ⁻ − 2θ⁰‖ / ‖θ⁺ − θ⁻‖ per source, where there are two trajectories; 0 is perfectly linear.
    norms: of the imprints, where they are not rows of parameters; `whole` is what they were before a projection.
    noise: rows like imprints, of runs that differ in a perturbed start alone; with the first sources (`Hooks.first`),
        `Decided.noise_rows` of them.
    effects: the root mean square change of F by each removal; `noise_effect` that of the noise rows, `deviation` that
        between the unperturbed replay and the recorded end, on the same examples.
    """

    base: Parameters
    imprints: Parameters
    exact: frozenset[str] = frozenset()
    drift: float = 0.0
    midpoints: Parameters | None = None
    linearity: list[float] = field(default_factory=list)
    norms: list[float] | None = None
    whole: list[float] = field(default_factory=list)
    noise: Parameters | None = None
    effects: list[float] = field(default_factory=list)
    noise_effect: float | None = None
    deviation: float | None = None


@dataclass(frozen=True)
class Simulated:
    """All imprints of one checkpoint: what `Engine.conclude` sees of them.

    shards: what the files say about their sources, in order.
    notice: reports what makes the imprints doubtful.
    remarks: returns the engine's `remark`, which may take long where it was not settled in this process.
    """

    index: int
    plan: Plan
    choices: Decided
    measured: Measured
    shards: Sequence[ShardFigures]
    notice: Callable[[str], None]
    remarks: Callable[[], Mapping[str, str]]

    def collect(self, name: Literal["norms", "linearity", "whole", "effects"]) -> list[float]:
        """Return one of the figures of every source."""
        return [value for shard in self.shards for value in getattr(shard, name)]


@dataclass(frozen=True)
class Cost:
    """What a simulation takes, beside reading the inputs and writing the store.

    values: numbers that each source has in the store, per checkpoint; `shared` bytes belong to all sources of one.
    scratch: bytes on disk while it runs; `memory` those that were not seen in the measured part.
    training_seconds: how long one plain training takes, where a recorded run was there to measure it; `training_bytes`
        its peak memory.
    """

    seconds: float
    values: int
    rows_at_once: int
    shared: int = 0
    scratch: int = 0
    memory: int = 0
    training_seconds: float | None = None
    training_bytes: int | None = None


@dataclass(frozen=True)
class AutoPath:
    """A path that `Plan.auto` has chosen for a checkpoint, and how much that counts."""

    steps: int
    lr: float
    weight: float


@dataclass(frozen=True)
class AutoFindings:
    """What `Plan.auto` has found, from which engines propose a plan.

    grouped: whether some source has more than one example.
    curvature: what the task lets see, and responses are to see.
    preconditioner: the metric in which everything was measured.
    dampings, weights: of infinitely many steps at each checkpoint.
    paths: chooses a path for each checkpoint.
    """

    grouped: bool
    curvature: Curvature
    preconditioner: Literal["adam"] | None
    dampings: tuple[float, ...]
    weights: tuple[float, ...]
    dropout: bool
    paths: Callable[[], list[AutoPath]]


class Engine(ABC):
    """An engine at one checkpoint. Class attributes say which plans it takes.

    rules: the fields of a plan that mean something to this engine, and what it does with the common ones.
    unit: in which progress is counted.
    requires: what must have been decided or measured for a checkpoint to be resumed.
    """

    name: ClassVar[str]
    rules: ClassVar[EngineRules] = EngineRules()
    unit: ClassVar[str] = "sources"
    requires: ClassVar[tuple[str, ...]] = ()

    def __init__(self, work: Work) -> None:
        self.work = work
        self.descent = work.descent
        self.decided: Decided | None = None
        self.measured = Measured()

    @abstractmethod
    def simulate(self, descent: Descent, hooks: Hooks) -> Chunk:
        """Simulate the imprints of a descent's sources."""

    def settle(self) -> None:
        """Decide how the checkpoint is simulated, and measure what that takes."""
        if self.work.settings.lr == "auto" and self.rules.question != "this_run":  # which has those of the run
            raise PlanError(f'the {self.name} engine has no rule for lr="auto": give lr a number.')
        self.measured = Measured(one_by_one=self.choose_vectorised())
        rows = self.rows_that_fit()
        self.decided = Decided(self.descent.lr, rows, rows, self.descent.vectorise)

    def take_over(self, decided: Decided, measured: Measured) -> None:
        """Use what an earlier run has decided."""
        self.decided, self.measured = decided, measured
        self.descent = replace(self.descent, lr=decided.lr, vectorise=decided.vectorised)

    def choose_vectorised(self) -> str | None:
        """Simulate many sources at once if `vmap` takes the model; otherwise return why not."""
        refuse_loss(self.descent, next(self.descent.batches()))
        reason = find_why_not_vmap(self.descent, self.attempt)
        self.descent = replace(self.descent, vectorise=reason is None)
        return reason

    def attempt(self, trial: Descent) -> None:
        """Run a first step of a few sources, to see whether it works."""
        self.simulate(trial, Hooks())

    def rows_that_fit(self, before: int | None = None) -> int:
        """Return how many sources fit the memory budget together; `before` is what an earlier run took."""
        return rows_that_fit(self.descent, self.work.memory, self.attempt, self.rows_per_source(self.plan), before)

    def prepare(self) -> File | None:
        """Make what all sources share; return the basis that their imprints are kept on, if there is one."""
        return None

    def layout(self, rows: int) -> Layout | None:
        """Return the tensors that a file of so many imprints holds; None where that is known only by their rows."""
        return layout(self.descent.start, rows, self.work.stored)

    @classmethod
    def conclude(cls, found: Simulated) -> Measured:
        """Add to what was measured what follows from all imprints, and report what makes them doubtful.

        Noise and deviation of removals are relative to their root mean square effect. No engine is ready for the
        checkpoint here: where parts of a simulation are merged, none has been.
        """
        if not (effects := found.collect("effects")):
            return found.measured
        size = root_mean_square(effects)

        def relate(effect: float | None) -> float | None:
            return None if effect is None or size == 0 else six_digits([effect / size])[0]

        first = found.shards[0]
        return replace(found.measured, chaos=relate(first.noise_effect), deviation=relate(first.deviation))

    def gather(self, shards: Sequence[ShardFigures], notice: Callable[[str], None]) -> Simulated:
        """Return what `conclude` sees of this checkpoint, given what the files say about all sources."""
        return Simulated(self.work.index, self.plan, self.choices, self.measured, shards, notice, self.remark)

    def remark(self) -> dict[str, str]:
        """Return texts by which `conclude` explains what it reports, and which only this engine, settled, knows."""
        return {}

    def warn(self, notice: Callable[[str], None]) -> None:  # noqa: B027
        """Report what makes the checkpoint's imprints doubtful, given what was decided and measured."""

    def cost(self, checkpoints: list[Settings]) -> Cost:
        """Measure a few sources, and count how many there will be at these checkpoints."""
        settling, _ = measure_seconds(self.settle)
        rows = self.choices.rows_at_once
        few = self.descent.sources.spread(min(rows, _SAMPLE))
        taken, _ = measure_seconds(lambda: self.simulate(self.descent.with_sources(few), Hooks()))
        seconds = len(checkpoints) * (settling + taken / len(few) * len(self.descent.sources))
        return Cost(seconds, sum(p.numel() for p in self.descent.start.values()), rows)

    def recognise(self) -> None:  # noqa: B027
        """Refuse a task that is not the one that was simulated before, where a request does not show it."""

    def look_ahead(self, patient: bool) -> None:  # noqa: B027
        """Refuse a checkpoint that `simulate` would refuse only after long; `patient` if looking closely is cheap."""

    @property
    def plan(self) -> Plan:
        return self.descent.plan

    @property
    def choices(self) -> Decided:
        """What was decided."""
        assert self.decided is not None
        return self.decided

    @classmethod
    def rows_per_source(cls, plan: Plan) -> int:
        """Return how many rows of parameters each source takes in memory."""
        return 1

    @classmethod
    def shared_units(cls, plan: Plan, n: int) -> int:
        """Return how much work comes before the sources, with n training examples, in the engine's unit."""
        return 0

    @classmethod
    def units(cls, plan: Plan, settings: Settings, sources: Sources) -> int:
        """Return how much work some sources are at a checkpoint."""
        return len(sources)

    @classmethod
    def trainings(cls, sources: Sources) -> int | None:
        """Return how many trainings a simulation of some sources amounts to; None where it trains no model."""
        return None

    @classmethod
    def propose(cls, found: AutoFindings) -> Plan | None:
        """Return a plan for what `Plan.auto` has found, where this engine is the one to take."""
        return None

    @classmethod
    def trial(cls, plan: Plan) -> Plan:
        """Return a plan of one short step, with which `check` tries this engine beside or instead of a user's plan."""
        kept = {name: getattr(plan, name) for name in cls.rules.tried} if plan.engine == cls.name else {}
        return Plan(engine=cls.name, **{"steps": 1, "lr": 1e-3, **cls.rules.trial, **kept})


_engines: dict[str, type[Engine]] = {}


def register(engine: type[Engine], *, default: bool = False) -> type[Engine]:
    """Make an engine known to plans and to the runner, by its name."""
    register_rules(engine.name, engine.rules, default=default)
    _engines[engine.name] = engine
    return engine


def unregister(engine: type[Engine]) -> None:
    """Forget an engine."""
    del _engines[engine.name]
    unregister_rules(engine.name)


def get(plan: Plan) -> type[Engine]:
    """Return the engine of a plan."""
    return _engines[plan.engine]


def registered() -> tuple[type[Engine], ...]:
    """Return all engines, in the order of their registration."""
    return tuple(_engines.values())


def at_checkpoint(
    inputs: Inputs,
    index: int,
    state: Parameters,
    memory: int | str | None = None,
    files: CheckpointFiles | None = None,
    advance: Callable[[int], None] = lambda amount: None,
    announce: Callable[[str], None] = lambda phase: None,
) -> Engine:
    """Make the engine of a plan ready for one of its checkpoints."""
    descent, stored = inputs.descent(index, state), DTYPES[inputs.stored_as]
    first, settings = index == inputs.first, inputs.settings[index]
    work = Work(index, settings, descent, stored, first, memory, files, advance, inputs.run, announce)
    return get(inputs.plan)(work)


def join(chunks: list[Chunk]) -> Chunk:
    """Put the sources of several chunks into one; what they share is that of the first."""
    if len(chunks) == 1:
        return chunks[0]

    def stack(parts: list[Parameters]) -> Parameters:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    pairs = [chunk.midpoints for chunk in chunks if chunk.midpoints is not None]
    norms = [chunk.norms for chunk in chunks if chunk.norms is not None]
    return replace(
        chunks[0],
        imprints=stack([chunk.imprints for chunk in chunks]),
        midpoints=stack(pairs) if pairs else None,
        linearity=[value for chunk in chunks for value in chunk.linearity],
        norms=[value for each in norms for value in each] if norms else None,
        whole=[value for chunk in chunks for value in chunk.whole],
        effects=[value for chunk in chunks for value in chunk.effects],
    )
