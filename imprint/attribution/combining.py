"""Combines replays of several runs into the effects expected over seeds: `imprint.combine`.

The mean m of k replays has the right size but carries the luck of k seeds. A path imprint p orders sources well but is
off in size. With c the slope of m on p, pooled over queries and centred per query over the sources,

    c·p + w·(m − c·p),    w = ω² / (ω² + σ²/k),

where σ² is the variance of one replay about the mean of all, and ω² that of m about c·p less σ²/k: the weight that an
empirical Bayes estimate gives to the replays. With a single replay σ² is unknown, and w is ¼.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from imprint.attribution.comparing import CARRIED, check_same_part, check_same_subject
from imprint.attribution.labels import SHARED_EXAMPLES, Labels
from imprint.attribution.replicates import Replicates, describe_replicates
from imprint.attribution.result import Attribution
from imprint.attribution.uncertainty import ERROR
from imprint.display import count_of
from imprint.errors import ReadoutError
from imprint.runtime.notices import Notices

_ALONE = 0.25  # the weight of a single replay
_NO_ERROR = "standard errors unknown: how far the estimate is off on average is not in the spread of runs"


def combine(replays: Sequence[Attribution], estimate: Attribution | None = None) -> Attribution:
    """Return the effects expected over seeds, from replays of several recorded runs and an estimate, if there is one.

    replays: scores that answer "this_run", each of a run with another seed, on the same queries and sources.
    estimate: scores that answer "expected", such as those of a path plan. Without one, the result is the mean of at
        least two replays, with standard errors over runs.
    """
    _check(replays, estimate)
    runs = _stack(replays, (estimate or replays[0]).labels.source_ids)
    labels = _describe(replays, estimate)
    if estimate is None:
        mean = runs.mean(0)
        names = tuple(
            each.labels.fingerprints.get("recording") or each.labels.fingerprints["store"] for each in replays
        )
        deviations, shares = -labels.n * (runs - mean), (1 / len(runs),) * len(runs)
        replicates = (Replicates(deviations, shares, names),)
        labels.details[ERROR] = describe_replicates(replicates)
        return Attribution(labels, -labels.n * mean, replays[0].queries, replicates=replicates)
    effects, slope, weight = weigh(estimate.removal_effect.double(), runs)
    if not slope > 0:
        raise ReadoutError(
            f"estimate and replays do not rise together (slope {slope:.3g}), so that one of them is wrong: validate "
            "both with imprint.validate before combining them."
        )
    labels.details.update({"combined_slope": slope, "combined_weight": weight, ERROR: _NO_ERROR})
    return Attribution(labels, -labels.n * effects, estimate.queries)


def _stack(replays: Sequence[Attribution], ids: Sequence[str]) -> Tensor:
    """Return the effects of each replay, with sources in the order of these ids; shape (runs, queries, sources)."""
    effects = []
    for each in replays:
        places = {name: place for place, name in enumerate(each.labels.source_ids)}
        effects.append(each.removal_effect.double()[:, [places[name] for name in ids]])
    return torch.stack(effects)


def _describe(replays: Sequence[Attribution], estimate: Attribution | None) -> Labels:
    """Return the labels of a combination: those of the estimate, or of the first replay without what is of one run."""
    first = estimate or replays[0]
    notices = Notices(first.warnings)
    for each in replays:
        for warning in each.warnings:
            notices.add(warning)
    wanted = ("readout", SHARED_EXAMPLES, *CARRIED)
    kept = {name: value for name, value in first.details.items() if estimate is not None or name in wanted}
    prints = dict(first.labels.fingerprints)
    for name in ("store", "recording") if estimate is None else ():
        prints.pop(name, None)
    if len({each.labels.fingerprints.get("signer") for each in (first, *replays)}) > 1:
        prints.pop("signer", None)  # a part of it is of a store that this key has not signed
    return replace(
        first.labels,
        question="expected",
        details={**kept, "combined_replays": len(replays)},
        fingerprints=prints,
        warnings=notices.messages,
        validation=None,
        store_validation=None,
    )


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


def _check(replays: Sequence[Attribution], estimate: Attribution | None) -> None:
    """Refuse results that do not belong together."""
    if len(replays) < (2 if estimate is None else 1):
        raise ReadoutError(
            f"{count_of(len(replays), 'repeated run')} without an estimate tell nothing about other seeds: give those "
            "of at least two runs, or one and an estimate."
        )
    if estimate is not None and estimate.question != "expected":
        raise ReadoutError(
            f"the estimate must answer 'expected', and answers {estimate.question!r}: give that of a store that was "
            "simulated from checkpoints."
        )
    first = estimate or replays[0]
    for place, each in enumerate(replays):
        if each.question != "this_run":
            raise ReadoutError(f"replay {place} answers {each.question!r}: give results of stores that repeat a run.")
        check_same_subject(first.labels, each.labels, (first.queries, each.queries))
        check_same_part(replays[0].labels, each.labels)
    known = [found for each in replays if (found := each.labels.fingerprints.get("recording")) is not None]
    if len(set(known)) < len(known):
        raise ReadoutError("the replays must be of different runs, and two are of the same recording.")
