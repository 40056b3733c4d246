"""What each rule pays, and that it pays only for what it was asked."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imprint.credit import PARTS, Evidence, Policy
from imprint.errors import CreditError

finite = st.floats(-1e6, 1e6)
KNOWN = Evidence("expected", ("a", "b", "c", "d"), (1, 2, 3, 4), np.array([0.6, 0.2, 0.1, -0.3]), np.full(4, 0.06),
                 "ranks validated")  # fmt: skip


def shares(policy: Policy, known: Evidence = KNOWN) -> list[float]:
    """Shares of the sources and of the unattributed rest, from 0 to 1."""
    division = policy.divide(known)
    return [share / PARTS for share in (*division.shares, division.unattributed)]


def test_above_noise_leaves_small_effects_unattributed() -> None:
    assert shares(Policy("p", "expected")) == pytest.approx([0.6 / 0.9, 0.2 / 0.9, 0, 0, 0.1 / 0.9], abs=1e-9)


def test_a_floor_holds_where_errors_are_unknown() -> None:
    known = replace(KNOWN, errors=None, outcome="sizes validated")
    assert shares(Policy("p", "expected", floor=0.15), known) == shares(Policy("p", "expected"))
    nobody = Policy("p", "expected").divide(known)
    assert nobody.rule == "nothing" and "standard errors unknown" in nobody.reason


def test_the_positive_part_pays_for_every_positive_effect() -> None:
    assert shares(Policy("p", "expected", rule="positive_part")) == pytest.approx([6 / 9, 2 / 9, 1 / 9, 0, 0], abs=1e-9)
    assert shares(Policy("p", "expected", rule="positive_part"), replace(KNOWN, errors=None))[4] == 0


def test_a_fixed_part_goes_to_everybody() -> None:
    found = shares(Policy("p", "expected", rule="fixed_plus", fixed=0.2))
    assert found == pytest.approx([0.05 + 0.8 * 6 / 9, 0.05 + 0.8 * 2 / 9, 0.05, 0.05, 0.8 / 9], abs=1e-9)


def test_where_nobody_helps_nothing_is_attributed() -> None:
    known = replace(KNOWN, helps=-np.ones(4))
    assert shares(Policy("p", "expected"), known) == [0, 0, 0, 0, 1]
    assert shares(Policy("p", "expected", rule="positive_part"), known) == [0, 0, 0, 0, 1]


@given(
    st.lists(st.tuples(finite, st.floats(0, 1e3)), min_size=1, max_size=12), st.sampled_from(["above", "all", "fix"])
)
def test_shares_add_up_and_none_is_negative(values: list[tuple[float, float]], which: str) -> None:
    policy = {
        "above": Policy("p", "expected"),
        "all": Policy("p", "expected", rule="positive_part"),
        "fix": Policy("p", "expected", rule="fixed_plus", fixed=0.3),
    }[which]
    helps, errors = np.array(values).T
    names = tuple(f"s{place}" for place in range(len(values)))
    division = policy.divide(Evidence("expected", names, (1,) * len(values), helps, errors, "sizes validated"))
    assert sum(division.shares) + division.unattributed == PARTS
    assert min(division.shares) >= 0 and division.unattributed >= 0


@given(st.permutations(range(4)))
def test_shares_do_not_depend_on_the_order_of_sources(order: list[int]) -> None:
    policy, ties = Policy("p", "expected", rule="positive_part"), replace(KNOWN, helps=np.ones(4))
    names, sizes = tuple(KNOWN.sources[place] for place in order), tuple(KNOWN.sizes[place] for place in order)
    moved = replace(ties, sources=names, sizes=sizes)
    division = policy.divide(moved)
    assert dict(zip(names, division.shares, strict=True)) == dict(
        zip(KNOWN.sources, policy.divide(ties).shares, strict=True)
    )


@given(st.floats(1e-6, 1e6))
def test_shares_do_not_depend_on_the_scale_of_effects(scale: float) -> None:
    """So that the order of effects must be validated, and their common scale need not."""
    assert KNOWN.errors is not None
    scaled = replace(KNOWN, helps=scale * KNOWN.helps, errors=scale * KNOWN.errors)
    assert shares(Policy("p", "expected"), scaled) == pytest.approx(shares(Policy("p", "expected")), abs=2e-9)


@pytest.mark.parametrize("outcome", [None, "failed", "undecided"])
def test_what_was_not_validated_credits_nobody(outcome: Any) -> None:
    division = Policy("p", "expected").divide(replace(KNOWN, outcome=outcome))
    assert division.shares == (0, 0, 0, 0) and division.unattributed == PARTS and division.rule == "nothing"
    assert division.reason == ("not validated" if outcome is None else f"validation: {outcome}, the policy requires "
                               "ranks validated")  # fmt: skip


def test_a_floor_is_a_size_and_needs_validated_sizes() -> None:
    division = Policy("p", "expected", floor=0.15).divide(KNOWN)
    assert division.rule == "nothing" and "the policy requires sizes validated" in division.reason


def test_few_runs_must_agree_more() -> None:
    """With two degrees of freedom an effect needs 4.3 standard errors, with many about two."""
    known = replace(KNOWN, errors=np.full(4, 0.1))
    assert shares(Policy("p", "expected"), replace(known, freedom=2))[0] > 0
    assert shares(Policy("p", "expected"), replace(known, freedom=1))[:4] == [0, 0, 0, 0]
    assert Policy("p", "expected").find_quantile(2) == pytest.approx(4.303, abs=1e-3)
    assert Policy("p", "expected").find_quantile(None) == pytest.approx(1.96, abs=0.02)


def test_sizes_may_be_required() -> None:
    strict = Policy("p", "expected", requires="sizes validated")
    assert strict.divide(KNOWN).rule == "nothing"
    assert strict.divide(replace(KNOWN, outcome="sizes validated")).rule == "above_noise"


@pytest.mark.parametrize(("fallback", "expected"), [("by_size", [0.1, 0.2, 0.3, 0.4]), ("equal", [0.25] * 4)])
def test_a_fallback_pays_where_the_rule_may_not_and_says_so(fallback: Any, expected: list[float]) -> None:
    policy = Policy("p", "expected", fallback=fallback)
    division = policy.divide(replace(KNOWN, outcome="failed"))
    assert [share / PARTS for share in division.shares] == expected
    assert division.unattributed == 0 and division.rule == fallback and "failed" in division.reason


def test_another_question_is_refused() -> None:
    with pytest.raises(CreditError, match="policy 'p' pays for 'this_run', and these effects answer 'expected'"):
        Policy("p", "this_run").divide(KNOWN)


@pytest.mark.parametrize(
    "change",
    [
        {"question": "both"}, {"rule": "all"}, {"level": -1}, {"level": float("nan")}, {"level": True}, {"level": 1.0},
        {"floor": 10**400}, {"floor": "0"},
        {"fixed": 0.5}, {"rule": "fixed_plus"}, {"rule": "fixed_plus", "fixed": 1.5}, {"requires": "failed"},
        {"fallback": "mine"}, {"version": 0}, {"version": 1.0}, {"name": ""}, {"name": "a\n"}, {"surprise": 1},
    ],
)  # fmt: skip
def test_a_policy_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CreditError):
        Policy.from_json({"name": "p", "question": "expected", **change})


def test_a_policy_is_known_by_all_of_its_fields() -> None:
    policy = Policy("p", "expected")
    assert Policy.from_json(policy.to_json()) == policy
    changes: list[dict[str, Any]] = [
        {"name": "q"}, {"question": "this_run"}, {"level": 0.9}, {"floor": 0.1}, {"requires": "sizes validated"},
        {"fallback": "equal"}, {"version": 2}, {"rule": "positive_part"},
    ]  # fmt: skip
    assert len({policy.sha256, *(replace(policy, **change).sha256 for change in changes)}) == len(changes) + 1
    assert replace(policy, fixed=0).sha256 == policy.sha256
