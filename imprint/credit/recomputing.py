"""Recomputes what entries and closed periods say, from what they rest on. `imprint.credit.verifying` calls this."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from imprint.credit.canonical import decode_object, encode
from imprint.credit.contradictions import find_unpayable
from imprint.credit.differences import REST, name_help, name_parts
from imprint.credit.drafting import CALIBRATION, find_help, is_calibration, read_evidence
from imprint.credit.leaves import Leaf
from imprint.credit.money import apportion
from imprint.credit.policy import Policy
from imprint.validation.verdict import Figures, Verdict

_ENDS = ("low", "high")
SKIPPED = frozenset({*_ENDS, "estimator"})
"""Fields of a closed period that another version may find others for, so that they are compared apart."""
_SHARES = 1e-6  # by how much intervals that are computed again may differ
_ROUNDED = 1e-5  # by how much deviations that add up to 0 may miss it, relative to scores, which may be in float32


def find_faults(leaf: Leaf, policy: Policy, currency: str) -> Iterator[str]:
    """Divide the pot of a query again, from its scores and its policy; yield what does not follow from them."""
    about, rows = leaf.about, leaf.rows
    yield from find_unpayable(about, rows)
    if differences := name_help((row["source"], row["helps"], find_help(about, row)) for row in rows):
        yield f"a source helped by something else than its score says: {differences}"
    if not agree_errors(about, rows):
        yield "its standard errors do not follow from the spread of its runs"
    if not is_calibration(factor := about["details"].get(CALIBRATION, 1.0)):
        yield f"its scores were calibrated by {factor!r}, which is not a positive number"
    verdict = about["validation"]
    if verdict is not None and verdict["outcome"] != (outcome := find_outcome(encode(verdict))):
        yield f"its validation is recorded as {verdict['outcome']!r}, by its own figures it is {outcome!r}"
    division = policy.divide(read_evidence(leaf))
    pot, rest = about["pot"], about["unattributed"]
    weights = [*division.shares, division.unattributed]
    amounts: Sequence[int | None] = [None] * len(weights) if pot is None else apportion(pot, weights)
    found = [(each["share"], each["amount"]) for each in (*rows, rest)]
    expected = list(zip(weights, amounts, strict=True))
    if (about["rule"], about["reason"]) != (division.rule, division.reason):
        yield f"its rule is {about['rule']!r}, by its policy it is {division.rule!r}"
    elif encode([*map(list, found)]) != encode([*map(list, expected)]):  # 2.0 is not 2 here
        names = [*(row["source"] for row in rows), REST]
        differences = name_parts(names, found, expected, currency)
        yield f"its shares and amounts do not follow from its scores and its policy: {differences}"


@lru_cache(maxsize=256)
def find_outcome(verdict: bytes) -> str:
    """Return what a validation found, from the figures that an entry has of it."""
    about = decode_object(verdict)
    figures = Figures(**about.pop("figures"))
    about.pop("outcome")
    return Verdict(**about, figures=figures).outcome


def agree_errors(about: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Check whether the standard errors of an entry follow from how its runs deviate, or from the noise of its run.

    They are unknown if it has neither, or if its runs are the checkpoints of a single one.
    """
    errors, runs, noise = [row["error"] for row in rows], about["runs"], about["noise"]
    if noise is not None:
        return about["freedom"] == len(noise) and _follow_from_noise(noise, rows)
    if runs is not None and not _is_mean(runs["shares"], rows):
        return False
    if runs is None or runs["over"] != "runs":
        return about["freedom"] is None and errors == [None] * len(errors)
    if about["freedom"] != len(runs["shares"]) - 1 or None in errors:
        return False
    again = [_find_error(runs["shares"], row["deviations"], about["n"]) for row in rows]
    return all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-12) for pair in zip(errors, again, strict=True))


def _find_error(shares: list[float], deviations: list[float], n: int) -> float:
    """Return the standard error of an effect, √(Σw²/(1 − Σw²) · Σ w (d/n)²); runs with shares w deviate by d."""
    squares = sum(share**2 for share in shares)
    spread = sum(share * (each / n) ** 2 for share, each in zip(shares, deviations, strict=True))
    return math.sqrt(squares / (1 - squares) * spread)


def _is_mean(shares: list[float], rows: list[dict[str, Any]]) -> bool:
    """Check that the shares of runs are positive and add up to 1, and that deviations add up to 0 with them."""
    if len(shares) < 2 or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1, rel_tol=1e-6):
        return False
    largest = max(abs(row["score"]) for row in rows)
    for row in rows:
        missed = sum(share * each for share, each in zip(shares, row["deviations"], strict=True))
        if abs(missed) > _ROUNDED * (largest + max(map(abs, row["deviations"]))):
            return False
    return True


def _follow_from_noise(noise: list[float], rows: list[dict[str, Any]]) -> bool:
    """Check errors that are the noise of a run: that of a sum of k removals is √(k(k + 1)/2) times that of one."""
    square = sum(change**2 for change in noise) / len(noise)
    for row in rows:
        if row["error"] is None or row["error"] < 0:
            return False
        if not square:
            if row["error"]:
                return False
            continue
        times = row["error"] ** 2 / square
        k = min(max(1, round((math.sqrt(8 * times + 1) - 1) / 2)), max(1, row["size"]))  # no source is empty
        if not math.isclose(times, k * (k + 1) / 2, rel_tol=1e-6):
            return False
    return True


def agree_lines(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Check whether two lines of a period are the same, but for its intervals and the version that found them."""
    kept = [{name: each[name] for name in each.keys() - SKIPPED} for each in (one, other)]
    return one.keys() == other.keys() and encode(kept[0]) == encode(kept[1])


def agree_intervals(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Check whether two lines have the same interval, up to rounding."""
    pairs = [(one.get(name), other.get(name)) for name in _ENDS]
    return all(a == b if a is None or b is None else abs(a - b) <= _SHARES for a, b in pairs)
