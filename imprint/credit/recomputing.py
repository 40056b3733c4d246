"""Recomputes what entries and closed periods say, from what they rest on. `imprint.credit.verifying` calls this."""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from imprint.credit.canonical import decode_object
from imprint.credit.contradictions import find_unpayable
from imprint.credit.drafting import find_help, read_evidence
from imprint.credit.leaves import Leaf
from imprint.credit.money import apportion
from imprint.credit.policy import Policy
from imprint.validation.verdict import Figures, Verdict

_ENDS = ("low", "high")
_SHARES = 1e-6  # by how much intervals that are computed again may differ


def find_faults(leaf: Leaf, policy: Policy) -> Iterator[str]:
    """Divide the pot of a query again, from its scores and its policy; yield what does not follow from them."""
    about, rows = leaf.about, leaf.rows
    yield from find_unpayable(about, rows)
    if any(row["helps"] != find_help(about, row) for row in rows):
        yield "a source helped by something else than its score says"
    if not agree_errors(about, rows):
        yield "its standard errors do not follow from the spread of its runs"
    division = policy.divide(read_evidence(leaf))
    pot, rest = about["pot"], about["unattributed"]
    weights = [*division.shares, division.unattributed]
    amounts: Sequence[int | None] = [None] * len(weights) if pot is None else apportion(pot, weights)
    found = [*((row["share"], row["amount"]) for row in rows), (rest["share"], rest["amount"])]
    if (about["rule"], about["reason"]) != (division.rule, division.reason):
        yield f"its rule is {about['rule']!r}, by its policy it is {division.rule!r}"
    elif found != list(zip(weights, amounts, strict=True)):
        yield "its shares and amounts do not follow from its scores and its policy"


@lru_cache(maxsize=256)
def find_outcome(verdict: bytes) -> str:
    """Return what a validation found, from the figures that an entry has of it."""
    about = decode_object(verdict)
    figures = Figures(**about.pop("figures"))
    about.pop("outcome")
    return Verdict(**about, figures=figures).outcome


def agree_errors(about: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Check whether the standard errors of an entry follow from how its runs deviate, or from the noise of its run.

    With shares w of the runs, the squared error is Σw²/(1 − Σw²) · Σ w d², with d in the unit of effects. That of a sum
    of k removals is k(k + 1)/2 times the squared noise of one.
    """
    errors = [row["error"] for row in rows]
    if None in errors:
        return errors == [None] * len(errors) and about["freedom"] is None
    if about["noise"] is None and about["runs"] is not None:
        shares = about["runs"]["shares"]
        if about["freedom"] != len(shares) - 1:
            return False
        squares = sum(share**2 for share in shares)
        for row in rows:
            spread = sum(
                share * (each / about["n"]) ** 2 for share, each in zip(shares, row["deviations"], strict=True)
            )
            if not math.isclose(row["error"], math.sqrt(squares / (1 - squares) * spread), rel_tol=1e-6, abs_tol=1e-12):
                return False
        return True
    if about["noise"] is None or about["freedom"] != len(about["noise"]):
        return False
    noise = sum(change**2 for change in about["noise"]) / len(about["noise"])
    for error in errors:
        times = error**2 / noise if noise else 1.0
        k = max(1, round((math.sqrt(8 * times + 1) - 1) / 2))
        if not math.isclose(times, k * (k + 1) / 2, rel_tol=1e-6):
            return False
    return True


def agree_lines(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Check whether two lines of a period are the same, but for its intervals and the version that found them."""
    skipped = {*_ENDS, "estimator"}
    return one.keys() == other.keys() and all(one[name] == other[name] for name in one.keys() - skipped)


def agree_intervals(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Check whether two lines have the same interval, up to rounding."""
    pairs = [(one.get(name), other.get(name)) for name in _ENDS]
    return all(a == b if a is None or b is None else abs(a - b) <= _SHARES for a, b in pairs)
