"""How far a run's outputs move by chance, and which effects stand out from that.

The runs of the noise rows differ from the recorded one by a tiny change of their start alone. What they change of F is
what a removal may change of it without any meaning: an effect below twice their root mean square is not distinguishable
from 0, and a run whose noise is as large as its effects is chaotic.

The root mean square is known from few runs, so the interval of an effect has Student's quantile with one degree of
freedom per run. It holds or is too long: the noise and all effects have the recorded run in common, so that they grow
together. With two runs it contained the effect without chance in 96% of draws, and of effects that are nothing but
chance 16% exceeded twice the noise: the mark is a first look, the interval is the claim.
"""

import torch
from torch import Tensor

from imprint.display import count_of
from imprint.plan import Question
from imprint.statistics import student_quantile
from imprint.store.checkpoint import CHAOTIC
from imprint.tensors.vectors import root_mean_square

TIMES = 2.0
"""How many times its noise an effect must exceed to count as distinguishable from 0."""

INDISTINGUISHABLE: dict[Question, str] = {
    "this_run": "not distinguishable from 0: less than twice the change of F by a tiny change of the run's start",
    "expected": "not distinguishable from 0: its 95% interval contains 0",
}
"""What the mark of an effect means, by the question that it answers."""


def widen(noise: Tensor, counts: Tensor) -> Tensor:
    """Return the noise of sums of so many removals each, from that of one; the shapes broadcast.

    The k removals of a sum are compared with one and the same model. If a run deviates by chance with variance v, one
    difference has variance 2v = noise², and the sum of k has kv + k²v = noise² · k(k + 1)/2.
    """
    k = counts.double()
    return noise.double() * (k * (k + 1) / 2).sqrt()


def stands_out(effects: Tensor, noise: Tensor) -> Tensor:
    """Tell which effects are distinguishable from 0; noise has their shape, or one that broadcasts to it."""
    return effects.double().abs() > TIMES * noise


def combine(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return changes by noise, (runs, queries), whose mean square is the sum of both mean squares; None if unknown.

    Half of the runs are of the first result, half of the second; what one has more is left out.
    """
    if first is None or second is None:
        return None
    runs = min(len(first), len(second))
    return 2**0.5 * torch.cat([changes[:runs].double() for changes in (first, second)])


def find_noise_quantile(changes: Tensor, level: float, *, difference: bool = False) -> float:
    """Return Student's quantile for noise that is known from some runs.

    difference: whether `combine` made the changes of those of two results, each with half of the runs.
    """
    return student_quantile(max(1, len(changes) // 2) if difference else len(changes), level)


def describe_noise(runs: int) -> str:
    """Say what the standard errors of removals are from."""
    return f"standard errors from {count_of(runs, 'repetition')} of the run with a tiny change of its start"


def measure_chaos(noise: float, effect: float) -> float | None:
    """Return the noise over the effect, both root mean squares; None where there is no effect at all."""
    return noise / effect if effect > 0 else None


def assess_noise(changes: Tensor | None, effect: float) -> tuple[dict[str, float], list[str]]:
    """Return what a result's `details` say about noise, and its warnings.

    changes: of F by noise, (runs, queries); None where there are none. effect: the root mean square removal effect.
    """
    if changes is None:
        return {}, []
    noise = root_mean_square(changes)
    chaos, warning = measure_chaos(noise, effect), describe_chaos(noise, effect)
    return {} if chaos is None else {"chaos": chaos}, [] if warning is None else [warning]


def describe_chaos(noise: float, effect: float) -> str | None:
    """Explain that a run is chaotic, and what to do; None where it is not, or where no source does anything."""
    if effect == 0 or not noise > CHAOTIC * effect:
        return None
    return (
        f"this run is chaotic: a tiny change of its start moves these queries by {noise:.3g} (root mean square), the "
        f"removal of a source by {effect:.3g}, so that most effects say more about chance than about the source. "
        "Ask instead for the expectation over seeds: simulate from the run's checkpoints (checkpoints=run.paths), or "
        "train with a lower learning rate, which makes a run calmer."
    )
