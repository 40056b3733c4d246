"""Compares two versions of a model on the same queries: `imprint.compare`.

A source's difference d is that of its mean removal effects over queries, the second version's minus the first's. Two
things make it differ by chance: which queries were asked, and the runs of each version. Their variances add up,

    v = var_q(d_q)/n  +  v₁ + v₂,    each known with its own degrees of freedom,

so that the claim is about queries like these, and about other seeds where errors are over runs. What a version's runs
do by chance is shared by all its queries, so that v₁ and v₂ come from the mean of each run (`replicates`). Without
them no difference is called beyond noise: the spread over queries does not contain them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from imprint.about import About
from imprint.attribution.changes import Change, Changes, Stability, name_direction
from imprint.attribution.comparing import check_comparable
from imprint.attribution.labels import Labels
from imprint.attribution.replicates import Replicates
from imprint.attribution.result import Attribution
from imprint.attribution.uncertainty import ERROR, require_level
from imprint.display import count_of, name_some
from imprint.errors import ReadoutError
from imprint.statistics import (
    Array,
    Chosen,
    Estimate,
    adjust_by_holm,
    ceiling,
    correlations,
    find_p_values,
    jackknife,
    mean_defined,
    mean_estimate,
    ranks,
    student_quantile,
)
from imprint.store.fingerprint import changed
from imprint.validation.verdict import QUERIES

_RANKED = 5  # fewer sources have ranks that agree by chance
_CALIBRATION = "calibration"
_SAME = 1e-9  # correlations that differ by less are equal
Pair = tuple[Array, Array]
"""The removal effects in both versions, each of shape (queries, sources)."""


def compare(first: Attribution, second: Attribution, *, k: int = 5, level: float = 0.95) -> Changes:
    """Compare two versions of a model: how stable the ranks of sources are, and who gained and lost beyond noise.

    first, second: effects on the same queries, of the earlier and of the later version. Sources are matched by their
        ids; those that only one version has are named, and left out. Results that answer different questions or
        measure something else are refused.
    k: how many of a query's first sources to compare.
    level: how sure it must be that no source is called changed by chance alone: of all sources together.

    Nothing is called beyond noise unless both results know how their effects vary over runs, or `this_run` how far
    chance moves the run.
    """
    level, k = require_level(level), _require_whole(k)
    common = _match(first, second)
    one, other = (_keep(result, common) for result in (first, second))
    check_comparable(one.labels, other.labels, (one.queries, other.queries))
    _check_scale(one.labels, other.labels)
    k = min(k, len(common) - 1)
    effects = _read_effects(one), _read_effects(other)
    without = _leave_out_runs(one, other, difference := one - other)
    per_query = _correlate(effects)
    shared = _overlap(effects, k)
    levels, noise = _find_run_levels(one, other, difference)
    levels += _find_query_level(effects) if levels else []
    return Changes(
        first=first.labels,
        second=second.labels,
        sources=_list_changes(one, other, effects, levels, level),
        queries=tuple(
            Stability(query, None if math.isnan(rho) else float(rho), float(part))
            for query, rho, part in zip(one.queries, per_query, shared, strict=True)
        ),
        spearman=mean_estimate(
            per_query, (-1, 1), runs=[np.array([mean_defined(_correlate(left)) for left in each]) for each in without]
        ),
        spearman_of_means=_correlate_means(effects, without),
        ceiling=_find_ceiling(one, other) if len(difference.replicates) == 2 else None,
        k=k,
        overlap=mean_estimate(
            shared, (0, 1), runs=[np.array([_overlap(left, k).mean() for left in each]) for each in without]
        ),
        only_first=_find_alone(first, second),
        only_second=_find_alone(second, first),
        noise=noise,
        threshold=_find_threshold(effects, levels, 1 - level),
        level=level,
        about={**_list_about(one.labels), **_list_about(other.labels)},
        warnings=tuple(_warn(first, second, len(common))),
    )


def _require_whole(k: int) -> int:
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ReadoutError(f"k is a whole number of at least 1, of sources to compare for each query; got {k!r}.")
    return k


def _match(first: Attribution, second: Attribution) -> list[str]:
    """Return the ids that both results have, in the order of the first; refuse what cannot be compared."""
    for result in (first, second):
        if not isinstance(result, Attribution):
            raise ReadoutError(
                f"compare needs two Attributions, got a {type(result).__name__}: imprint.attribute makes one, and "
                "Attribution.load reads one from a file."
            )
    known = set(second.labels.source_ids)
    common = [identity for identity in first.labels.source_ids if identity in known]
    if len(common) < 2:
        ids = (name_some(list(map(repr, result.labels.source_ids)), 3) for result in (first, second))
        raise ReadoutError(
            f"the versions have {count_of(len(common), 'source')} in common, and it takes two to compare ranks: the "
            f"first has {next(ids)}, the second {next(ids)}. Sources are matched by their ids; result.group gives both "
            "the same ones."
        )
    return common


def _keep(result: Attribution, ids: Sequence[str]) -> Attribution:
    """Return the effects of the sources with these ids, in this order."""
    labels = result.labels
    places = {identity: place for place, identity in enumerate(labels.source_ids)}
    chosen = [places[identity] for identity in ids]
    index = torch.tensor(chosen)

    def choose(values: Tensor) -> Tensor:
        return values.index_select(-1, index)

    kept = replace(
        labels,
        source_ids=tuple(ids),
        source_names=tuple(labels.source_names[place] for place in chosen),
        source_sizes=tuple(labels.source_sizes[place] for place in chosen),
        source_about=tuple(labels.about(place) for place in chosen) if labels.source_about else (),
        summed=tuple(labels.summed[place] for place in chosen) if labels.summed else (),
        fingerprints={name: value for name, value in labels.fingerprints.items() if name != "sources"},
    )
    replicates = tuple(each.change(choose) for each in result.replicates)
    return replace(result, labels=kept, scores=choose(result.scores), replicates=replicates)


def _check_scale(first: Labels, second: Labels) -> None:
    """Refuse effects on different scales: of which one side was calibrated and the other was not."""
    scaled = [_CALIBRATION in labels.details for labels in (first, second)]
    if scaled[0] != scaled[1]:
        which = "first" if scaled[0] else "second"
        raise ReadoutError(
            f"only the {which} result is calibrated, so that the effects are on different scales: calibrate both, or "
            "neither."
        )


def _read_effects(result: Attribution, scores: Tensor | None = None) -> Array:
    scores = result.scores if scores is None else scores
    return np.asarray((-scores.double() / result.labels.n).cpu().numpy())


def _correlate(effects: Pair) -> Array:
    """Return Spearman's correlation of each query, shape (queries,); NaN where all effects of one version are equal."""
    return correlations(ranks(effects[0]), ranks(effects[1]))


def _overlap(effects: Pair, k: int) -> Array:
    """Return which part of the k sources with the largest effects of a query both versions have in common."""
    best = []
    for each in effects:
        listed = np.zeros(each.shape, dtype=bool)
        np.put_along_axis(listed, np.argsort(-np.abs(each), axis=1, kind="stable")[:, :k], True, axis=1)
        best.append(listed)
    return np.asarray((best[0] & best[1]).sum(1) / k)


def _leave_out_runs(one: Attribution, other: Attribution, difference: Attribution) -> list[list[Pair]]:
    """Return the effects without each run in turn, for each set of independent runs; none where they are not known."""
    effects = _read_effects(one), _read_effects(other)
    mine, theirs = (_leave_out(each) for each in (one, other))
    paired = len(difference.replicates) != 2  # runs that both have, or not all of them
    if paired or not mine or not theirs:
        return []
    return [[(left, effects[1]) for left in mine], [(effects[0], left) for left in theirs]]


def _leave_out(result: Attribution) -> list[Array]:
    runs = _find_runs(result)
    return [] if runs is None else [_read_effects(result, scores) for scores in runs.leave_out(result.scores)]


def _find_runs(result: Attribution) -> Replicates | None:
    """Return the runs of a result; None where there are none, or only the checkpoints of one."""
    found = result.replicates
    return found[0] if len(found) == 1 and found[0].over == "runs" and result.noise_changes is None else None


def _correlate_means(effects: Pair, without: Sequence[Sequence[Pair]]) -> Estimate:
    """Return Spearman's correlation of the mean effects over queries, with its interval over queries and runs."""
    count, totals = len(effects[0]), [each.sum(0) for each in effects]

    def correlate(chosen: Chosen) -> float:
        if 2 * len(chosen) < count:
            means = [each[chosen].mean(0) for each in effects]
        else:  # of all but a few, as the jackknife asks for
            left = np.setdiff1d(np.arange(count), chosen)
            means = [(total - each[left].sum(0)) / len(chosen) for total, each in zip(totals, effects, strict=True)]
        return float(_correlate((means[0][None], means[1][None]))[0])

    runs = [np.array([_correlate((a.mean(0)[None], b.mean(0)[None]))[0] for a, b in each]) for each in without]
    found = jackknife(count, correlate, correlation=True, runs=runs)
    # where ranks never change, as of few sources, that is no evidence that they cannot
    return replace(found, low=math.nan, high=math.nan) if found.high - found.low < _SAME else found


def _find_ceiling(one: Attribution, other: Attribution) -> float | None:
    """Return about what the correlation would be at most if the versions differed by the noise of their runs alone."""
    product = 1.0
    for result in (one, other):
        if (runs := _find_runs(result)) is None:
            return None
        product *= ceiling(ranks(_read_effects(result, result.scores.double() + runs.deviations.double())))
    return None if math.isnan(product) else product


def _find_query_level(effects: Pair) -> list[tuple[Array, int]]:
    """Return the variance of mean differences by the choice of queries; none for a single query."""
    each = effects[1] - effects[0]
    return [(each.var(0, ddof=1) / len(each), len(each) - 1)] if len(each) > 1 else []


def _find_threshold(effects: Pair, levels: list[tuple[Array, int]], alpha: float) -> float | None:
    """Return how many of its standard errors the clearest difference must exceed to be called; None where none is.

    Sources differ in it, as their variances are known with different degrees of freedom; the clearest is the one that
    exceeds its own by most.
    """
    if not levels:
        return None
    differences = effects[1].mean(0) - effects[0].mean(0)
    variances = np.stack([variance for variance, _ in levels])
    quantiles = np.array([student_quantile(freedom, 1 - alpha / variances.shape[1]) for _, freedom in levels])
    total = variances.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(total > 0, quantiles @ variances / total, quantiles.max())
        reached = np.where(total > 0, np.abs(differences) / np.sqrt(total), np.where(differences == 0, 0.0, np.inf))
    return float(needed[np.argmax(reached / needed)])


def _find_run_levels(
    one: Attribution, other: Attribution, difference: Attribution
) -> tuple[list[tuple[Array, int]], str]:
    """Return the variances of mean differences by the noise of runs, with their degrees of freedom, and what they are.

    There are none where the noise is not known, or only a lower bound of it; the text then says why.
    """
    mean, n = difference.mean(), difference.labels.n
    error = str(difference.details.get(ERROR, "standard errors unknown"))
    asked = "over queries" if len(difference) > 1 else "for this query alone"
    if difference.noise_changes is not None and mean.standard_error is not None:
        freedom = max(1, len(difference.noise_changes) // 2)  # half of them are of each version
        return [(mean.standard_error[0].square().numpy(), freedom)], (
            f"{asked}; {error}, in each version; what another seed would change is not in them"
        )
    if not mean.replicates:
        lacking = [
            f"in the {place} result {result.details.get(ERROR, 'standard errors unknown')}"
            for place, result in (("first", one), ("second", other))
            if result.standard_error is None
        ]
        return [], f"The noise of both versions must be known; {'; '.join(lacking) or error}."
    if any(each.over != "runs" for each in mean.replicates):
        return [], f"Runs with other seeds are needed on both sides ({error})."
    levels = [((each.variance[0] / n**2).numpy(), each.freedom) for each in mean.replicates]
    return levels, f"{asked}; {error}"


def _list_changes(
    one: Attribution, other: Attribution, effects: Pair, levels: list[tuple[Array, int]], level: float
) -> tuple[Change, ...]:
    """Return what changed for each source, the largest difference first."""
    labels, means = one.labels, [each.mean(0) for each in effects]
    differences = means[1] - means[0]
    errors = p_values = None
    if levels:
        errors = np.sqrt(np.sum([variance for variance, _ in levels], axis=0))
        p_values = adjust_by_holm(find_p_values(differences, levels))
    shares = [np.abs(each) / (np.abs(each).sum() or 1.0) for each in means]
    found = []
    for place in np.argsort(-np.abs(differences), kind="stable").tolist():
        p = None if p_values is None else float(p_values[place])
        beyond = None if p is None else p <= 1 - level
        gap = float(differences[place])
        found.append(
            Change(
                source=labels.source_ids[place],
                name=other.labels.source_names[place],
                first=float(means[0][place]),
                second=float(means[1][place]),
                difference=gap,
                standard_error=None if errors is None else float(errors[place]),
                p_value=p,
                beyond_noise=beyond,
                verdict=name_direction(gap, labels.better) if beyond else "",
                first_share=float(shares[0][place]),
                second_share=float(shares[1][place]),
                first_size=labels.source_sizes[place],
                second_size=other.labels.source_sizes[place],
            )
        )
    return tuple(found)


def _find_alone(mine: Attribution, theirs: Attribution) -> tuple[str, ...]:
    known = set(theirs.labels.source_ids)
    return tuple(identity for identity in mine.labels.source_ids if identity not in known)


def _list_about(labels: Labels) -> dict[str, About]:
    pairs = zip(labels.source_ids, labels.source_about, strict=False)
    return {identity: about for identity, about in pairs if about}


def _warn(first: Attribution, second: Attribution, common: int) -> list[str]:
    """Return what to know before believing a comparison."""
    found, one, other = [], first.labels, second.labels
    if len(first) < QUERIES:
        found.append(
            f"{count_of(len(first), 'query', 'queries')} say little about others: compare on at least {QUERIES}."
        )
    if common < _RANKED:
        found.append(f"the ranks of {common} sources agree by chance: compare at least {_RANKED} sources.")
    for name, words in (("store", "the same store"), ("model", "the same model")):
        if one.fingerprints.get(name) is not None and one.fingerprints[name] == other.fingerprints.get(name):
            found.append(f"both results are of {words}, so that there are no two versions to compare.")
            break
    found += [*_warn_of_plans(one, other), *_warn_of_models(one, other)]
    return [*found, *(f"first: {text}" for text in one.warnings), *(f"second: {text}" for text in other.warnings)]


def _warn_of_plans(one: Labels, other: Labels) -> list[str]:
    """Say where effects may differ in size because their imprints were simulated otherwise."""
    before, now = (labels.fingerprints.get("plan") for labels in (one, other))
    found = []
    if isinstance(before, dict) and isinstance(now, dict):
        apart = [name for name in {**before, **now} if before.get(name) != now.get(name) and name != "seed"]
        if apart:
            found.append(
                f"the versions were simulated with other plans, which differ in {name_some(apart, 5)}: effects may "
                "differ in size because of that alone."
            )
    if one.removes != other.removes:
        found.append("the effects of one version are finite removals, those of the other derivatives: sizes differ.")
    return found


def _warn_of_models(one: Labels, other: Labels) -> list[str]:
    """Say where effects may differ because of what they are measured through, and not because of the sources."""
    parameters = [labels.fingerprints.get("parameters") for labels in (one, other)]
    if None not in parameters and parameters[0] != parameters[1]:
        lists = [set(each) for each in parameters if each is not None]
        alone = sorted(lists[0] ^ lists[1])
        what = f"such as {name_some(alone, 3)}" if alone else "of other shapes"
        return [
            f"the versions have imprints of different parameters, {what}: effects may differ because of that alone."
        ]
    before, now = (labels.fingerprints.get("measures", []) for labels in (one, other))
    if before and now and None not in parameters and (different := changed("the measurement of query", before, now)):
        return [
            f"both measure {one.measure!r}, but at the same parameters {different}: either the functions differ, or "
            "the models do in parameters that are not attributed."
        ]
    return []
