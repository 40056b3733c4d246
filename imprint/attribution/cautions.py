"""What to know before believing a comparison of two versions of a model: the warnings of `imprint.compare`."""

import torch
from torch import Tensor

from imprint.attribution.labels import Labels
from imprint.attribution.result import Attribution
from imprint.display import count_of, name_some
from imprint.store.fingerprint import changed
from imprint.validation.verdict import QUERIES

_RANKED = 5  # fewer sources have ranks that agree by chance


def list_warnings(first: Attribution, second: Attribution, common: int) -> list[str]:
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
    found += [*_warn_of_queries(first, second), *_warn_of_numbers(one, other), *_warn_of_groups(one, other)]
    return [*found, *(f"first: {text}" for text in one.warnings), *(f"second: {text}" for text in other.warnings)]


def _warn_of_queries(first: Attribution, second: Attribution) -> list[str]:
    """Say where the queries may be others in each version, or are fewer than they seem."""
    found = []
    if not all(result.labels.fingerprints.get("queries") for result in (first, second)):
        found.append(
            "a mean or a selection of queries does not say of which queries it is: make sure that they are the same in "
            "both versions."
        )
    pairs = zip(first.scores, second.scores, strict=True)
    rows = [_round(one) + _round(other) for one, other in pairs if one.any() or other.any()]
    if repeated := len(rows) - len(set(rows)):
        found.append(
            f"{repeated} of {count_of(len(first), 'query', 'queries')} have the effects of another one, as the same "
            "query asked again has: errors over queries are too small."
        )
    return found


def _round(scores: Tensor) -> bytes:
    """Return the first digits of a query's scores, which the same query asked again mostly has too."""
    mantissa, exponent = torch.frexp(scores.double())
    return mantissa.mul(1 << 16).round().numpy().tobytes() + exponent.numpy().tobytes()


def _warn_of_numbers(one: Labels, other: Labels) -> list[str]:
    """Say where sources are matched by the places of examples, which may be of others in each version's data."""
    numbered = (
        set(labels.source_sizes) == {1} and all(each.isdecimal() for each in labels.source_ids)
        for labels in (one, other)
    )
    before, now = (labels.fingerprints.get("data") or {} for labels in (one, other))
    changed_data = any(value is not None and now.get(name) not in (None, value) for name, value in before.items())
    if not ((one.n != other.n or changed_data) and all(numbered)):
        return []
    return [
        "sources are single examples, matched by their numbers, and the versions have other training data: make sure "
        "that a number is the same example in both, or give sources ids of their own."
    ]


def _warn_of_groups(one: Labels, other: Labels) -> list[str]:
    """Say where sources of one id are sums over as many sources in one version, and over others in the other."""
    sums = [dict(zip(labels.source_ids, labels.counts.tolist(), strict=True)) for labels in (one, other)]
    apart = [identity for identity, count in sums[0].items() if sums[1].get(identity, count) != count]
    if not apart:
        return []
    counts = " and ".join(str(each[apart[0]]) for each in sums)
    return [
        f"{count_of(len(apart), 'source')} are sums of other numbers of effects in each version, such as "
        f"{apart[0]!r} of {counts}: these may be other groups, and finite removals do not add up."
    ]


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
