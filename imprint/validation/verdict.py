"""Judges predicted effects by removals that were really made.

For queries q and removals b, with predicted effects P and actual ones A, both centred per query over the removals,

    r = Σ PA / √(ΣP² ΣA²),    slope = Σ PA / ΣP²,    both summed over all q and b.

Queries share the imprints of their sources, so a hundred queries are not a hundred pieces of evidence. The p-value
therefore permutes whole sources: it is the share of all assignments of predictions to the removed sources under which r
is at least as large. With sets of sources removed together, permuting the sets instead would pass scores that are right
about nothing but the number of sources in a set. The interval of the slope leaves out one source at a time, with all
removals it is part of: sets that share a source err together.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import numpy as np

from imprint.display import count_of
from imprint.plan import Question
from imprint.statistics import Array, Chosen, ceiling, centre, jackknife
from imprint.store.checkpoint import CHAOTIC
from imprint.store.records import Count, NotNegative

Removals = Sequence[Sequence[int]]
Outcome = Literal["sizes validated", "ranks validated", "failed", "undecided"]
QUERIES = 20  # fewer leave the verdict undecided
SOURCES = 5  # removed ones: with four, the smallest p-value is 1/24
SEEDS = 3  # runs that "expected" is averaged over, at least
LEVEL = 0.025  # of a one-sided test, the usual 5% of a two-sided one
WITHIN = (0.5, 2.0)  # slopes whose sizes are validated
CERTAIN = (0.25, 4.0)  # where the interval of such a slope must lie
DEVIATES = 0.1  # of the rms effect: by so much a replay may miss its recording for effects to have their size
CALIBRATES = 4.0  # by how much the ends of a slope's interval may differ, at most, for it to set a scale
_ENUMERATED = 8  # sources up to which all permutations are counted: there are 40,320 of 8
_DRAWN = 20_000  # permutations of more
_AT_ONCE = 4_000_000  # numbers


@dataclass(frozen=True)
class Figures:
    """What a comparison measured.

    sources: how many different ones are removed.
    correlation, p, slope: see the module; None where predicted or actual effects do not differ between removals.
    slope_low, slope_high: the 95% interval of the slope, over removals.
    by_size: the correlation that a guess by the size of the removed sources reaches, whatever its sign.
    ceiling: about what a perfect prediction would reach, from the agreement of several runs; None with one.
    agreement: the p-value of the runs among each other: each against the mean of the others; None with one.
    """

    queries: Count
    removals: Count
    sources: Count
    runs: Count
    correlation: float | None = None
    p: NotNegative | None = None
    slope: float | None = None
    slope_low: float | None = None
    slope_high: float | None = None
    by_size: float | None = None
    ceiling: float | None = None
    agreement: NotNegative | None = None


@dataclass(frozen=True)
class Verdict:
    """Whether predictions were validated, on what, and why or why not.

    chaos, deviation: of a repeated run, see `imprint.store.checkpoint.Measured`; None for other predictions.
    own: whether the queries are those of the result that shows the verdict, not those of an earlier validation.
    calibrated: whether the scale of the predictions was set by these very removals, which then say nothing about it.
    """

    question: Question
    figures: Figures
    chaos: NotNegative | None = None
    deviation: NotNegative | None = None
    own: bool = False
    calibrated: bool = False

    @property
    def outcome(self) -> Outcome:
        """What the figures validate."""
        return self._decision[0]

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self._decision[1]

    @property
    def _decision(self) -> tuple[Outcome, str]:
        outcome, reason = decide(self.question, self.figures, self.chaos, self.deviation)
        if self.calibrated and outcome == "sizes validated":
            return "ranks validated", "the order of effects holds; their size was set by these very removals"
        return outcome, reason

    def __str__(self) -> str:
        what = self.outcome.replace("sizes validated", "ranks and sizes validated")
        return f"{what} ({self.question.replace('_', ' ')}): {self.reason}; {self.evidence}"

    @property
    def evidence(self) -> str:
        """The figures in words."""
        found = self.figures
        queries = f"{'these ' if self.own else ''}{count_of(found.queries, 'query', 'queries')}"
        runs = f" in {found.runs} runs" if found.runs > 1 else ""
        text = f"compared with {count_of(found.removals, 'real removal')}{runs} on {queries}"
        if found.correlation is None or found.p is None:
            return text
        text += f": correlation {found.correlation:.2f} (p = {_format_p(found.p)}"
        text += f", ceiling {found.ceiling:.2f})" if found.ceiling is not None else ")"
        if found.slope is not None and found.slope_low is not None and found.slope_high is not None:
            text += f", actual / predicted {found.slope:.2f} [{found.slope_low:.2f}, {found.slope_high:.2f}]"
        return text

    @property
    def calibrates(self) -> bool:
        """Whether the slope is known well enough to set the scale of predictions."""
        low, high = self.figures.slope_low, self.figures.slope_high
        passed = self.outcome in ("ranks validated", "sizes validated")
        return passed and low is not None and high is not None and low > 0 and high <= CALIBRATES * low

    def rescaled(self, factor: float) -> "Verdict":
        """Return the verdict on predictions that are this factor larger."""
        found = self.figures
        slope, low, high = (None if v is None else v / factor for v in (found.slope, found.slope_low, found.slope_high))
        return replace(self, figures=replace(found, slope=slope, slope_low=low, slope_high=high), calibrated=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with the verdict in words."""
        return {
            **{"outcome": self.outcome, "reason": self.reason, "question": self.question, "own": self.own},
            **vars(self.figures),
            **{"chaos": self.chaos, "deviation": self.deviation, "summary": str(self)},
        }


def _format_p(p: float) -> str:
    return f"{p:.2f}" if p >= 0.01 else f"{p:.1g}"


def judge(
    effects: Array,
    removals: Removals,
    actual: Array,
    sizes: Array,
    question: Question,
    chaos: float | None = None,
    deviation: float | None = None,
    *,
    own: bool = False,
) -> Verdict:
    """Judge predicted effects (queries, sources) by what removals really did, (runs, queries, removals).

    removals: the sources that each removal takes away, by their places.
    sizes: how many examples each source has, shape (sources,).
    chaos, deviation: of a repeated run.
    """
    figures = compare(effects, removals, actual, sizes)
    return Verdict(question, figures, _plain(chaos), _plain(deviation), own)


def compare(effects: Array, removals: Removals, actual: Array, sizes: Array) -> Figures:
    """Measure how well predicted effects agree with actual ones; see `judge`."""
    runs, queries, count = actual.shape
    if len(effects) != queries or len(removals) != count or len(sizes) != effects.shape[1]:
        raise ValueError(f"effects {effects.shape}, {len(removals)} removals and actual {actual.shape} do not fit.")
    involved = sorted({source for removal in removals for source in removal})
    counts, mean = Figures(queries, count, len(involved), runs), centre(actual.mean(0))
    if count < 2 or not mean.any():
        return counts
    member = np.array([[source in removal for source in involved] for removal in removals], dtype=np.float64)
    effects, sizes = effects[:, involved].astype(np.float64), sizes[involved].astype(np.float64)
    guess = np.broadcast_to(centre((member @ sizes)[None]), mean.shape)
    found = replace(counts, by_size=_plain(abs(_correlate(guess, mean)) if guess.any() else 0.0))
    if runs > 1:
        each = centre(actual)
        agreement = _permute_runs(each)
        found = replace(found, ceiling=_plain(ceiling(each.reshape(runs, 1, -1))), agreement=agreement)
    predicted = effects @ member.T
    if not (one := centre(predicted)).any():
        return found
    slope = jackknife(len(involved), lambda chosen: _pool_slope(predicted, actual.mean(0), member, chosen))
    return replace(
        found,
        correlation=_plain(_correlate(one, mean)),
        p=_permute_sources(effects, member, mean),
        slope=_plain(slope.value),
        slope_low=_plain(slope.low),
        slope_high=_plain(slope.high),
    )


def decide(
    question: Question, found: Figures, chaos: float | None = None, deviation: float | None = None
) -> tuple[Outcome, str]:
    """Decide what some figures validate, and say why."""
    if found.queries < QUERIES:
        return "undecided", f"a test needs at least {QUERIES} queries, and had {found.queries}"
    if min(found.sources, found.removals) < SOURCES:
        made = f"{count_of(found.removals, 'removal')} of {count_of(found.sources, 'source')}"
        return "undecided", f"a test needs at least {SOURCES} removals of as many sources, and had {made}"
    if question == "expected" and found.runs < SEEDS:
        return "undecided", f"an expectation over seeds takes at least {SEEDS} runs, and there are {found.runs}"
    if found.by_size is None:
        return "undecided", "removing these sources changes nothing, or the same for all"
    if found.p is None or found.correlation is None or found.slope is None:
        return "failed", "predicted effects do not differ between sources"
    if found.p > LEVEL:
        if found.agreement is not None and found.agreement > LEVEL:
            return "undecided", "the runs do not agree among each other on what removals do: average more of them"
        return "failed", "predicted effects order the removals no better than chance would"
    if doubt := _doubt_sizes(found, chaos, deviation):
        return "ranks validated", f"the order of effects holds, their sizes do not: {doubt}"
    return "sizes validated", "predicted effects have the order and the size of actual ones"


def _doubt_sizes(found: Figures, chaos: float | None, deviation: float | None) -> str | None:
    """Return what speaks against the sizes of effects whose order holds; None if nothing does."""
    assert found.slope is not None and found.correlation is not None and found.by_size is not None
    if not WITHIN[0] <= found.slope <= WITHIN[1]:
        return f"actual effects are {found.slope:.2g} times the predicted ones"
    low, high = found.slope_low, found.slope_high
    if low is None or high is None or low < CERTAIN[0] or high > CERTAIN[1]:
        known = "" if low is None or high is None else f", [{low:.2f}, {high:.2f}]"
        return f"the ratio of actual to predicted effects is too uncertain{known}"
    if not found.correlation > found.by_size + 1e-9:
        return f"a guess by the size of a source does as well (correlation {found.by_size:.2f})"
    if chaos is not None and chaos > CHAOTIC:
        return f"this run is chaotic (chaos figure {chaos:.2g})"
    if deviation is not None and deviation > DEVIATES:
        return f"the replay misses the recorded run (deviation {deviation:.2g})"
    return None


def _correlate(one: Array, other: Array) -> float:
    """Return the pooled correlation of centred values."""
    length = math.sqrt(float(np.square(one).sum()) * float(np.square(other).sum()))
    return float((one * other).sum()) / length if length else float("nan")


def _pool_slope(predicted: Array, actual: Array, member: Array, chosen: Chosen) -> float:
    """Return the pooled slope over the removals that take away none but the chosen sources."""
    left = member[:, chosen].sum(1) == member.sum(1)
    one, mean = centre(predicted[:, left]), centre(actual[:, left])
    squares = float(np.square(one).sum())
    return float((one * mean).sum()) / squares if squares else float("nan")


def _permute_sources(effects: Array, member: Array, actual: Array) -> float:
    """Return the share of permutations of the sources under which predictions correlate at least as well.

    effects: of each source, (queries, sources); member: which are in a removal, (removals, sources); actual: centred.

    With predictions E, members M and centring C, ΣPA under π is Σ_b (EᵀAM)[π(b), b], and ΣP² is
    Σ_bc (MᵀCM)[b, c] (EᵀE)[π(b), π(c)].
    """
    products = effects.T @ actual @ member
    apart, squares = member.T @ (member - member.mean(0)), effects.T @ effects
    orders = _list_orders(len(products))
    sums = products[orders, np.arange(len(products))].sum(1)
    single = bool((member.sum(1) == 1).all()) and len(member) == len(products)
    if single:  # every order has the same predictions, and so the same ΣP²
        lengths = np.ones(len(orders))
    else:
        parts = np.array_split(orders, max(1, len(orders) * squares.size // _AT_ONCE))
        lengths = np.concatenate([(apart * squares[part[:, :, None], part[:, None, :]]).sum((1, 2)) for part in parts])
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(lengths > 0, sums / np.sqrt(np.maximum(lengths, 0)), -np.inf)
    return float(np.mean(found >= found[0] - 1e-9 * abs(found[0])))


def _permute_runs(each: Array) -> float:
    """Return the p-value of the agreement of runs: each against the mean of the others; `each` is centred."""
    others = (each.sum(0) - each) / (len(each) - 1)
    products = np.einsum("rqi,rqj->ij", others, each)
    orders = _list_orders(len(products))
    sums = products[orders, np.arange(len(products))].sum(1)
    return float(np.mean(sums >= sums[0] - 1e-9 * abs(sums[0])))


@cache
def _list_orders(count: int) -> Chosen:
    """Return all orders of so many things, or many random ones, the identity first; shape (orders, count)."""
    if count <= _ENUMERATED:
        return np.array(list(itertools.permutations(range(count))), dtype=np.int64)
    draw = np.random.default_rng(0)
    return np.stack([np.arange(count), *(draw.permutation(count) for _ in range(_DRAWN))])


def _plain(value: float | None) -> float | None:
    """Return a number as a record keeps it: None where it is undefined."""
    return None if value is None or not math.isfinite(value) else float(value)
