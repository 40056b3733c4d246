"""Combines an estimate of the expectation over seeds with replays of a few runs: `imprint.combine`.

A path imprint p orders sources well but is off in size. The mean m of k replays has the right size but carries the luck
of k seeds. With c the slope of m on p, pooled over queries and centred per query over the sources,

    c·p + w·(m − c·p),    w = ω² / (ω² + σ²/k),

where σ² is the variance of one replay about the mean of all, and ω² that of m about c·p less σ²/k: the weight that an
empirical Bayes estimate gives to the replays. With a single replay σ² is unknown, and w is ¼.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from imprint.attribution.comparing import check_same_subject
from imprint.attribution.result import Attribution
from imprint.attribution.uncertainty import ERROR
from imprint.display import count_of
from imprint.errors import ReadoutError
from imprint.runtime.notices import Notices

_ALONE = 0.25  # the weight of a single replay
_NO_ERROR = "standard errors unknown: how far the estimate is off on average is not in the spread of runs"


def combine(estimate: Attribution, replays: Sequence[Attribution]) -> Attribution:
    """Return the effects expected over seeds, from an estimate and the replays of one or more recorded runs.

    estimate: scores that answer "expected", such as those of a path plan.
    replays: scores that answer "this_run", each of a run with another seed, on the same queries and sources.
    """
    _check(estimate, replays)
    order = [{name: i for i, name in enumerate(each.labels.source_ids)} for each in replays]
    ids = estimate.labels.source_ids
    runs = torch.stack(
        [
            each.removal_effect.double()[:, [places[name] for name in ids]]
            for each, places in zip(replays, order, strict=True)
        ]
    )
    effects, slope, weight = weigh(estimate.removal_effect.double(), runs)
    if not slope > 0:
        raise ReadoutError(
            f"estimate and replays do not rise together (slope {slope:.3g}), so that one of them is wrong: validate "
            "both with imprint.validate before combining them."
        )
    notices = Notices(estimate.warnings)
    for each in replays:
        for warning in each.warnings:
            notices.add(warning)
    details = {"combined_replays": len(replays), "combined_slope": slope, "combined_weight": weight, ERROR: _NO_ERROR}
    labels = replace(
        estimate.labels,
        details={**estimate.details, **details},
        warnings=notices.messages,
        validation=None,
    )
    return Attribution(labels, -estimate.labels.n * effects, estimate.queries)


def weigh(estimate: Tensor, runs: Tensor) -> tuple[Tensor, float, float]:
    """Return the combined effects (queries, sources), c and w, from an estimate and runs (runs, queries, sources)."""
    count, mean = len(runs), runs.mean(0)
    one, other = _centre(estimate), _centre(mean)
    squares = float(one.square().sum())
    slope = float((one * other).sum()) / squares if squares else 0.0
    if count == 1:
        weight = _ALONE
    else:
        luck = float((_centre(runs) - other).square().sum(0).mean()) / (count - 1) / count  # σ²/k
        apart = max(float((other - slope * one).square().mean()) - luck, 0.0)  # ω²
        weight = apart / (apart + luck) if apart + luck else 1.0
    scaled = slope * estimate
    return scaled + weight * (mean - scaled), slope, weight


def _centre(values: Tensor) -> Tensor:
    return values - values.mean(-1, keepdim=True)


def _check(estimate: Attribution, replays: Sequence[Attribution]) -> None:
    """Refuse results that do not belong together."""
    if not replays:
        raise ReadoutError("there are no replays to combine with: attribute the same queries with a store of a replay.")
    if estimate.question != "expected":
        raise ReadoutError(
            f"the first result must estimate the expectation over seeds, and answers {estimate.question!r}: give that "
            "of a store that was simulated from checkpoints."
        )
    for place, each in enumerate(replays):
        if each.question != "this_run":
            raise ReadoutError(f"replay {place} answers {each.question!r}: give results of stores that repeat a run.")
        check_same_subject(estimate.labels, each.labels, (estimate.queries, each.queries))
    stores = [each.labels.fingerprints.get("recording") for each in replays]
    known = [store for store in stores if store is not None]
    if len(set(known)) < len(known):
        raise ReadoutError(
            f"the {count_of(len(replays), 'replay')} must be of different runs, and two are of the same recording."
        )
