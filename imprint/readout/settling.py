"""Settle how a model is read: by `vmap` or a loop, by forward mode or by differences, by factors or in full.

`Reader` begins with the settings that are asked for. `settle` tries them on the first queries and some sources, and
falls back where the model or its measurement does not support them.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import get_args

from torch import Tensor

from imprint.batches import Batch
from imprint.checks.measuring import check_derivative, measure_first_queries, natural_scale
from imprint.errors import ReadoutError
from imprint.readout.base import Base
from imprint.readout.budget import Activations, measure_activations
from imprint.readout.calibration import TRIAL_STEP, calibrate_step, step_lengths
from imprint.readout.choice import list_readouts, refuse_readout
from imprint.readout.factored import FactoredReadout
from imprint.readout.guards import Observed
from imprint.readout.kernels import ReadoutName, difference, find_changed, removed_score
from imprint.runtime.turns import jvp
from imprint.store.reading import Store
from imprint.task import Parameters
from imprint.tensors.batching import attempt, vectorise_or_loop
from imprint.tensors.vectors import over_rows, row

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadoutSettings:
    """How imprints are read.

    step: of `central`, relative; None until it is calibrated.
    factors: factored imprints are read by their factors where the readout is linear in them, and otherwise in full.
    vectorise: many sources are read at once, by `vmap`.
    settled: whether the first queries have shown that this works.
    details: what results say about it.
    warnings: about the measurement's derivative.
    """

    readout: ReadoutName
    step: float | None = None
    factors: bool = False
    vectorise: bool = True
    settled: bool = False
    details: dict[str, float | str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether scores are derivatives, and therefore linear in imprints."""
        return self.readout in ("jvp", "gradient")

    @property
    def by_factors(self) -> bool:
        """Whether factored imprints are read as they are kept."""
        return self.factors and self.vectorise and self.linear

    def reading(
        self, store: Store, base: Base, imprints: Parameters, midpoints: Parameters | None
    ) -> Callable[[Batch, int], Tensor]:
        """Return what scores imprints in full, unless by "gradient"; whatever looks at their values is done before."""
        if self.readout == "jvp":
            return partial(base.jvp, imprints, vectorise=self.vectorise)
        if self.readout == "central":
            c = step_lengths(base.scale, imprints, self.step or TRIAL_STEP)
            return partial(base.central, imprints, c, vectorise=self.vectorise)
        if self.readout == "removed":
            return partial(base.removed, imprints, store.n, changed=find_changed(imprints), vectorise=self.vectorise)
        assert self.readout == "literal"  # by "gradient" `Reader` reads itself: it keeps gradients for the next sources
        epsilon = store.checkpoints[base.index].choices.epsilon
        assert epsilon is not None
        one_sided = store.manifest.plan.variant == "one_sided"
        return partial(base.literal, imprints, midpoints, epsilon / store.n, one_sided, vectorise=self.vectorise)

    def measure(self, base: Base, batch: Batch, count: int) -> Activations:
        """Measure what reading some queries computes."""
        forward_mode = self.readout == "jvp" and self.vectorise and not self.by_factors
        evaluations = 1 if self.readout == "removed" else 2
        return measure_activations(base, batch, count, forward_mode=forward_mode, evaluations=evaluations)


@dataclass(frozen=True)
class Trial:
    """What settings are tried on: the first sources at one checkpoint, and the first queries.

    score: reads so many sources with these settings, shape (sources, queries).
    load: returns the imprints of so many sources.
    """

    base: Base
    factored: FactoredReadout | None
    batch: Batch
    count: int
    score: Callable[[ReadoutSettings, int], Tensor]
    load: Callable[[int], Parameters]


def choose_settings(store: Store, readout: ReadoutName | None, step: float | None) -> ReadoutSettings:
    """Return the settings that are asked for, by default with the readout that is right for a store."""
    readout = list_readouts(store)[0] if readout is None else readout
    if readout not in get_args(ReadoutName):
        raise ReadoutError(f"readout {readout!r} is unknown: use one of {', '.join(get_args(ReadoutName))}.")
    if step is not None and not (step > 0 and math.isfinite(step)):
        raise ReadoutError(f"step must be a positive number, got {step}.")
    refuse_readout(store, readout)
    return ReadoutSettings(readout, step)


def observe_first(store: Store, base: Base, batch: Batch, count: int) -> Observed:
    """Return what guards compare scores with: F of the first queries and, where F is the loss, of some examples."""
    functional, task = base.functional, base.functional.task
    values = measure_first_queries(functional, base.theta, batch, count)
    if (functional.measure or task.measure) is task.loss and store.manifest.probes is not None:
        values += store.manifest.probes.values.losses
    return Observed(values, natural_scale(task, batch))


def settle(settings: ReadoutSettings, trial: Trial) -> ReadoutSettings:
    """Return settings that work, the given ones if they do; refuse a model that cannot be read."""
    settings = _settle_factors(settings, trial)
    settings, failure = _settle_loop(settings, trial)
    if failure is not None:
        if settings.readout != "jvp":
            raise ReadoutError(f"the model cannot be read out by {settings.readout}: {failure}.")
        settings, worse = _settle_loop(replace(settings, readout="central"), trial)
        if worse is not None:
            raise ReadoutError(f"the model can be read out neither by jvp nor by central: {worse}.")
        logger.warning("this model does not support forward mode, reading out by central differences: %s", failure)
        settings = replace(settings, details={**settings.details, "fallback": f"jvp is not possible: {failure}"})
    if settings.readout == "central":
        settings = _settle_step(settings, trial)
    if settings.linear:
        given = (trial.base.functional, trial.base.theta, trial.batch, trial.count, row(trial.load(1), 0))
        settings = replace(settings, warnings=check_derivative(*given, backward=settings.readout == "gradient"))
    return replace(settings, settled=True)


def _settle_factors(settings: ReadoutSettings, trial: Trial) -> ReadoutSettings:
    """Have factored imprints multiplied out where their factors do not serve this measurement."""
    if not settings.by_factors or trial.factored is None:
        return settings
    in_full = partial(trial.base.jvp, batch=trial.batch, count=trial.count, vectorise=True)
    reason = trial.factored.why_unusable(in_full, settings.readout == "jvp", trial.batch, trial.count)
    if reason is None:
        return settings
    logger.warning("factored imprints are multiplied out to be read: %s", reason)
    return replace(settings, factors=False)


def _settle_loop(settings: ReadoutSettings, trial: Trial) -> tuple[ReadoutSettings, str | None]:
    """Read two sources by `vmap`, or else in a loop; return the settings that work and None, or why neither does."""
    _, reason = attempt(lambda: trial.score(settings, 2))
    if reason is None:
        return settings, None
    one_by_one = replace(settings, vectorise=False, details={**settings.details, "one_by_one": reason})
    _, failure = attempt(lambda: trial.score(one_by_one, 2))
    if failure is not None:
        return settings, failure
    logger.warning("this model does not run under vmap, sources are read one by one: %s", reason)
    return one_by_one, None


def _settle_step(settings: ReadoutSettings, trial: Trial) -> ReadoutSettings:
    """Calibrate the step of `central`, unless it was given."""
    step = settings.step
    if step is None:
        step = calibrate_step(trial.base, trial.load(4), trial.batch, trial.count, vectorise=settings.vectorise)
    return replace(settings, step=step, details={**settings.details, "central_step": step})


def read_pairs(
    settings: ReadoutSettings, base: Base, n: int, imprints: Parameters, single: Batch
) -> tuple[Tensor, ReadoutSettings]:
    """Score each imprint on the query in its own row; return the settings that work, too.

    Here `vmap` runs over the queries as well, and may fail where it did not before.
    """

    def one(u: Parameters, c: Tensor, sample: Batch) -> Tensor:
        def measure(theta: Parameters) -> Tensor:
            return base.functional.measures(theta, sample, 1)[0]

        if settings.readout == "jvp":
            return jvp(measure, (base.theta,), (u,))[1]  # type: ignore[no-any-return]
        if settings.readout == "removed":
            return removed_score(measure, base.theta, u, n)
        return difference(measure, base.theta, u, c, c)

    given = (imprints, step_lengths(base.scale, imprints, settings.step or 1.0), single)
    if not settings.vectorise:
        return over_rows(one, *given, vectorise=False), settings
    found, reason = vectorise_or_loop(lambda vectorise: over_rows(one, *given, vectorise=vectorise))
    if reason is None:
        return found, settings
    logger.warning("this model does not run under vmap, examples are read one by one: %s", reason)
    return found, replace(settings, vectorise=False)
