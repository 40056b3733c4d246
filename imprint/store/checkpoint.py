"""One checkpoint of a store: its settings, what was decided and measured when it was simulated, and its files."""

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Annotated, Literal

from imprint.plan import Settings, Steps
from imprint.store.records import Checksum, Count, NotNegative, Positive, read
from imprint.store.values import Value

CHAOTIC = 0.3  # chaos figure above which a perturbed start moves F about as a removal does, and results say so
LEFT_OUT = "so that sources are left out of batches"
"""How the reason for replaying one by one ends where a source was not given weight 0: `Measured.leaves_out`."""
INSIDE = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*", re.ASCII)  # relative, and of parts that do not begin with a dot


def _read_path(value: Value) -> str:
    if not INSIDE.fullmatch(path := value.text()):
        value.refuse("a path inside the store, of letters, digits, '_', '-', '.' and '/'")
    return path


def _read_rows(value: Value) -> tuple[int, int]:
    rows = value.wholes()
    if len(rows) != 2 or rows[0] >= rows[1]:
        value.refuse("the first row and the one after the last")
    return rows[0], rows[1]


@dataclass(frozen=True)
class File:
    """A file of the store, relative to its folder; `rows` are the sources it holds, where it holds some."""

    path: Annotated[str, _read_path]
    sha256: Checksum
    bytes: int
    rows: Annotated[tuple[int, int], _read_rows] | None = None


@dataclass(frozen=True)
class Spread:
    """The least, the median and the largest of some figures."""

    least: float
    median: float
    largest: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        return cls(min(values), median(values), max(values))


@dataclass(frozen=True)
class Decided:
    """What a simulation decided before it began with a checkpoint. A resumed or repeated one takes it over.

    lr: the size of a step; of a recorded run that is repeated, its highest learning rate.
    rows_per_file: how many sources a file of imprints holds; `rows_at_once` of them are simulated together.
    vectorised: whether that is done by `vmap`, or in a loop.
    epsilon: by how much a source was up- and down-weighted, where it was.
    directions: how many directions of the curvature the imprints rest on, where they do.
    layers: the linear layers whose parts are kept as products, in factored imprints (see `imprint.tensors.rows`).
    noise_rows: how many runs with a perturbed start are kept beside the imprints.
    """

    lr: NotNegative
    rows_per_file: Count
    rows_at_once: Count
    vectorised: bool = True
    epsilon: Positive | None = None
    directions: Count | None = None
    layers: tuple[str, ...] = ()
    noise_rows: int = 0


@dataclass(frozen=True)
class Measured:
    """Figures measured on the way. They describe a simulation and explain its failures; no imprint depends on them.

    curvature: the smallest and the largest that was met, of the matrix `curvature_of`; a preconditioned one is
        M⁻¹(H + λI).
    stability: by how much a step multiplies some direction.
    one_by_one: why sources were not simulated together, where they were not.
    moments: where a preconditioner's second moments come from; `unmoved` is the share of values it left alone.
    epsilon_disagreement: how far imprints at ε and 2ε differ, by ε, where it was chosen.
    rest, share: the mean curvature outside the directions, and the share of squared gradients that lies there.
    drift: how far the unperturbed path leads, relative to the parameters.
    norms, linearity: of the imprints, and how far the two sides of each are from mirroring each other.
    lost: the share of squared length that a projection lost.
    chaos, deviation: of removals: how far a perturbed start moves F, and how far the unperturbed replay ends from the
        recorded end, each as a share of the root mean square effect of a removal on training examples.
    start_lost: the share of a removal's effect that is lost where a replay begins after the first step.
    """

    curvature: tuple[float, float] | None = None
    curvature_of: Literal["hessian", "gauss-newton", "preconditioned"] | None = None
    stability: float | None = None
    one_by_one: str | None = None
    moments: Literal["recorded", "estimated"] | None = None
    unmoved: float | None = None
    epsilon_disagreement: dict[str, float] = field(default_factory=dict)
    rest: float | None = None
    share: float | None = None
    drift: float | None = None
    norms: Spread | None = None
    linearity: Spread | None = None
    lost: float | None = None
    chaos: NotNegative | None = None
    deviation: NotNegative | None = None
    start_lost: NotNegative | None = None

    @property
    def leaves_out(self) -> bool:
        """Whether sources were left out of batches, whose examples see each other, instead of given weight 0."""
        return self.one_by_one is not None and self.one_by_one.endswith(LEFT_OUT)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its settings, what was decided and measured, and its files. One of weight 0 has settings alone.

    basis: directions that imprints are combinations of, where they are kept factored or projected.
    noise: rows of runs whose start was perturbed, as many as were decided.
    """

    weight: NotNegative
    steps: Steps
    damping: NotNegative
    decided: Decided | None = None
    measured: Measured = field(default_factory=Measured)
    base: File | None = None
    imprints: tuple[File, ...] = ()
    midpoints: tuple[File, ...] = ()
    basis: File | None = None
    noise: File | None = None

    @classmethod
    def planned(cls, settings: Settings) -> "Checkpoint":
        """Make a checkpoint with the settings that a plan has for it."""
        return cls(settings.weight, settings.steps, settings.damping)

    @property
    def choices(self) -> Decided:
        """What was decided, of a checkpoint that was simulated."""
        assert self.decided is not None
        return self.decided

    def files(self) -> tuple[File, ...]:
        """All files of the checkpoint."""
        shared = (file for file in (self.base, self.basis, self.noise) if file is not None)
        return (*shared, *self.imprints, *self.midpoints)


@dataclass(frozen=True)
class ShardFigures:
    """What the file of some sources says about their imprints: one number for each source, or none.

    noise_effect, deviation: as in a `Chunk`, with the first sources.
    """

    drift: float
    norms: tuple[float, ...]
    linearity: tuple[float, ...]
    whole: tuple[float, ...]
    effects: tuple[NotNegative, ...] = ()
    noise_effect: NotNegative | None = None
    deviation: NotNegative | None = None


def read_figures(about: Value, count: int) -> ShardFigures:
    """Read the figures of a file of so many sources."""
    found = read(ShardFigures, about)
    if len(found.norms) != count or {len(found.linearity), len(found.whole), len(found.effects)} - {0, count}:
        about.fail(f"its figures must be of {count} sources")
    return found
