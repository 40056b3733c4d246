"""How far an exported adapter goes along its imprint: θ ± c_b·u_b, with the gain c_b chosen for a serving precision.

Too small a gain and the two log-likelihoods differ by rounding only, too large and they feel the curvature. Gains are
tried on the given queries against the exact derivative, and what rounding alone contributes is measured against float64
at the same gains.

The adapter without a source goes where the training led without it: of removals nothing is chosen, and only rounding is
measured. Half of the difference between θ and θ − u_b/N is a step of 1/2N.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from imprint.errors import ReadoutError
from imprint.export.point import Counted, Point

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STEPS = tuple(10 ** (exponent / 2) for exponent in range(-8, 0))
_QUIET = 2.5e-5  # rounding relative to the scores that leaves room for an agreement of 1e-4 …
_BENT = 0.02  # … at steps whose scores the curvature does not change by more than this
_SOURCES, _QUERIES = 4, 4  # how many the gains are tried on
_REFUSED = 3.0  # a score is refused below so many times what rounding makes of it


@dataclass(frozen=True)
class Gains:
    """The gain of every source; `step` is how far it moves the adapted weights, relative to them.

    rounding: what rounding makes of half the difference of two log-likelihoods, root mean square.
    deviation: of the scores at this step from the exact derivative, in the serving precision.
    """

    values: Tensor
    step: float
    rounding: float
    deviation: float

    @property
    def floors(self) -> Tensor:
        """The score of every source below which rounding could have made it."""
        return _REFUSED * self.rounding / self.values


def choose_gains(point: Point, queries: list[Counted], dtype: str) -> Gains:
    """Return the gains whose scores, served in `dtype`, come closest to the exact derivative.

    Where rounding hardly shows at some steps, and curvature neither, one of those is taken.
    """
    if dtype not in DTYPES:
        raise ReadoutError(f"dtype {dtype!r} is unknown: serving precisions are {', '.join(DTYPES)}.")
    moves = point.moves()
    if not bool((moves > 0).any()):
        raise ReadoutError("every imprint of the chosen sources is zero: there is nothing to export.")
    if point.removes:
        return _measure_removals(point, queries, moves, dtype)
    spread = torch.linspace(0, len(moves) - 1, min(_SOURCES, len(moves))).round().int().tolist()
    positions = [position for position in spread if moves[position] > 0] or [int(moves.argmax())]
    few = _first(queries)
    exact, _ = point.exact(few, positions)
    if not bool(exact.any() and exact.isfinite().all()):
        raise ReadoutError(
            "the exact scores that gains are chosen by are 0 throughout, or not finite: give queries whose completions "
            "have weight, and on which the sources matter."
        )
    scale = moves[positions]  # scores times gains: sources are compared at displacements of equal length
    trials = []
    for step in _STEPS:
        gains = _gains(moves, step)
        served = point.served(few, gains, positions, DTYPES[dtype]) / scale
        wide = point.served(few, gains, positions, torch.float64) / scale
        if not bool(served.isfinite().all() and wide.isfinite().all()):
            break  # so far out the model overflows
        noise = float((served - wide).square().mean().sqrt())
        deviation = float((served - exact / scale).norm() / (exact / scale).norm())
        loud = noise > _QUIET * float(wide.square().mean().sqrt()) or deviation > _BENT
        trials.append((loud, deviation, step, noise * step))
    if not trials:
        raise ReadoutError(f"the model gives no finite log-likelihoods in {dtype}: serve it in another precision.")
    _, deviation, step, _ = min(trials)
    # of the steps around the chosen one: a few values that happen to agree say nothing of the others
    rounding = max(noise for _, _, near, noise in trials if 0.3 < near / step < 3.4)
    return Gains(_gains(moves, step), step, rounding, deviation)


def _measure_removals(point: Point, queries: list[Counted], moves: Tensor, dtype: str) -> Gains:
    """Return 1/2N for every source, and what rounding makes of removals that are served in `dtype`."""
    n, every = point.store.n, range(len(moves))
    gains = torch.full((len(moves),), 1 / (2 * n), dtype=torch.float64)
    served, wide = (point.served(queries, gains, every, kind) for kind in (DTYPES[dtype], torch.float64))
    if not bool(served.isfinite().all()):
        raise ReadoutError(f"the model gives no finite log-likelihoods in {dtype}: serve it in another precision.")
    noise = float((served - wide).square().mean().sqrt()) / (2 * n)
    size = float(wide.norm())
    deviation = float((served - wide).norm()) / size if size else 0.0
    return Gains(gains, float(moves.max()) / n, noise, deviation)


def _gains(moves: Tensor, step: float) -> Tensor:
    """Return c_b that moves the adapted weights by `step` of their length; 1 for an imprint that is zero."""
    return torch.where(moves > 0, step / moves, 1.0)


def _first(queries: list[Counted]) -> list[Counted]:
    """Return the first few queries."""
    found: list[Counted] = []
    for count, batch in queries:
        taken = min(count, _QUERIES - sum(n for n, _ in found))
        if taken > 0:
            found.append((taken, {name: column[:taken] for name, column in batch.items()}))
    return found
