"""What the engines that follow a path share: the choice of the step, what to do about divergence, and their cost."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import ClassVar

from imprint.errors import DivergenceError, SimulationError
from imprint.plan import Plan, Settings
from imprint.runtime.memory import tensor_bytes
from imprint.runtime.timing import measure_seconds
from imprint.simulation.curvature import Spectrum
from imprint.simulation.descent import Descent
from imprint.simulation.divergence import advise
from imprint.simulation.engines.protocol import Cost, Engine
from imprint.simulation.guards import check_step
from imprint.simulation.path import Hooks
from imprint.simulation.step_size import (
    FEW,
    LOOK_ITERATIONS,
    LOOKS,
    choose_step,
    measure_curvature,
    measure_path,
    measure_start,
)
from imprint.sources import Sources
from imprint.store.checkpoint import Decided, Measured
from imprint.task import Parameters
from imprint.tensors.vectors import minus, norm, scale

logger = logging.getLogger(__name__)
FIELDS = frozenset({"batch_size", "source_sample", "dropout", "preconditioner", "momentum"})
TRIED = ("dropout", "preconditioner", "momentum")
_STEPS = 4  # measured, of which the first, which warms up, does not count
_WALKS = 2  # of the path, until an automatic step suits it: one or two in general


class PathEngine(Engine):
    """An engine that makes the steps of a path, with rows of parameters beside it."""

    unit: ClassVar[str] = "source-steps"
    requires: ClassVar[tuple[str, ...]] = ("measured.curvature",)

    def choose_epsilon(self) -> tuple[float | None, dict[str, float]]:
        """Return the ε to perturb sources by and, for each ε tried, how far imprints at ε and 2ε disagree."""
        return None, {}

    def settle(self) -> None:
        """Choose the step from the curvature along the path, then ε, then how many sources fit memory."""
        one_by_one = self.choose_vectorised()
        tick = partial(self.work.advance, 0)
        if self.work.settings.lr == "auto":
            step, curvature = choose_step(self.descent, measure_start(self.descent), tick)
            self.descent = replace(self.descent, lr=step)
        else:
            curvature = measure_path(self.descent, tick)
        stability = curvature.growth(self.descent.lr, self.descent.shift, self.plan.momentum)
        if stability > 1 + 1e-6:
            logger.info(
                "checkpoint %d: a step multiplies some direction by %.3g, from negative curvature %.3g",
                *(self.work.index, stability, curvature.smallest),
            )
        self.measured = Measured(
            curvature=(curvature.smallest, curvature.largest),
            curvature_of="preconditioned" if self.descent.preconditioner else "hessian",
            stability=stability,
            one_by_one=one_by_one,
            moments=self.descent.preconditioner.moments if self.descent.preconditioner else None,
            unmoved=self.descent.preconditioner.unmoved if self.descent.preconditioner else None,
        )
        with self.advising():
            epsilon, disagreement = self.choose_epsilon()
        self.measured = replace(self.measured, epsilon_disagreement=disagreement)
        rows = self.rows_that_fit()
        self.decided = Decided(self.descent.lr, rows, rows, self.descent.vectorise, epsilon)

    @contextmanager
    def advising(self) -> Iterator[None]:
        """Say what to do about a path that diverges."""
        try:
            yield
        except DivergenceError as error:
            if self.measured.curvature is None:
                raise
            advice = advise(self.descent.lr, self.descent.shift, self.plan.momentum, self.curvature)
            raise SimulationError(f"{error} {advice}") from error

    def warn(self, notice: Callable[[str], None]) -> None:
        found = check_step(self.work.index, self.descent.lr, self.descent.shift, self.plan.momentum, self.curvature)
        if found is not None:
            notice(str(found))

    @property
    def curvature(self) -> Spectrum:
        """The extremes that were measured."""
        assert self.measured.curvature is not None
        return Spectrum(*self.measured.curvature)

    def measure_drift(self, end: Parameters) -> float:
        """Return how far the unperturbed path moves, relative to the norm of the parameters."""
        return norm(minus(end, self.descent.start)) / scale(self.descent.start, self.descent.task)

    @classmethod
    def units(cls, plan: Plan, settings: Settings, sources: Sources) -> int:
        return settings.path * len(sources) * cls.rows_per_source(plan)

    def cost(self, checkpoints: list[Settings]) -> Cost:
        """Measure a few steps of a chunk of sources."""
        trying, one_by_one = measure_seconds(self.choose_vectorised)
        measuring, curvature = measure_seconds(lambda: measure_start(self.descent))
        if self.work.settings.lr == "auto":
            self.descent = replace(self.descent, lr=curvature.step(self.descent.shift, self.plan.momentum))
        self.measured = Measured(curvature=(curvature.smallest, curvature.largest), one_by_one=one_by_one)
        fitting, rows = measure_seconds(self.rows_that_fit)
        settling = len(checkpoints) * (trying + measuring + fitting) + sum(self._choosing_seconds(checkpoints))
        sources = self.descent.sources
        step = self._step_seconds(self.descent.with_sources(sources.spread(rows))) / rows * len(sources)
        steps = sum(settings.path for settings in checkpoints)
        values = sum(p.numel() for p in self.descent.start.values()) * (2 if self.plan.keep_pair else 1)
        moving = tensor_bytes(self.descent.start) * (2 if self.plan.momentum else 1)
        snapshot = moving * (1 + rows * self.rows_per_source(self.plan))
        return Cost(settling + steps * step, values, rows, scratch=snapshot)

    def _choosing_seconds(self, checkpoints: list[Settings]) -> Iterator[float]:
        """Measure what it takes to choose what the plan leaves open: the step, by walking the path, and ε."""
        descent = self.descent
        walks = {True: (_WALKS, len(LOOKS), 1), False: (1, 2, FEW)}  # if a step is chosen: times, looks, fewest steps
        if any(settings.lr == "auto" or settings.path >= FEW for settings in checkpoints):
            parts = next(descent.batches())
            slope = min(measure_seconds(lambda: descent.base_gradient(descent.start, parts, 0))[0] for _ in range(2))
            look, _ = measure_seconds(lambda: measure_curvature(descent, descent.start, parts, LOOK_ITERATIONS))
            for settings in checkpoints:
                times, looks, least = walks[settings.lr == "auto"]
                if settings.path >= least:
                    yield times * (settings.path * slope + min(looks, settings.path) * look)
        if self.plan.perturbs and self.plan.epsilon == "auto":
            few = min(2, descent.steps)
            self.descent = replace(descent, steps=few)
            trial, _ = measure_seconds(self.choose_epsilon)
            self.descent = descent
            yield sum(settings.path for settings in checkpoints) * trial / few

    def _step_seconds(self, chunk: Descent) -> float:
        """Measure one step of a chunk of sources."""
        moments = [time.monotonic()]
        chunk = replace(chunk, steps=min(_STEPS, chunk.steps))
        self.simulate(chunk, Hooks(advance=lambda rows: moments.append(time.monotonic())))
        gaps = [after - before for before, after in pairwise(moments)]
        return median(gaps[1:] or gaps)
