"""Closing a period: sums, pots, rounding, and how sure shares are."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from imprint.attribution.replicates import Replicates
from imprint.attribution.result import Attribution
from imprint.credit import PARTS, Ledger, Policy, Tariff
from imprint.credit.drafting import draft_entries
from imprint.credit.leaves import Leaf, Lines, compose
from imprint.credit.log import format_time
from imprint.credit.money import MICRO
from imprint.credit.periods import Totals, close_period, list_periods
from imprint.credit.spread import ShareEstimator, is_sampled
from imprint.errors import CreditError
from tests.credit.crediting import SOURCES, THIS_RUN, fill, labels, make_ledger, make_result


def sums(ledger: Ledger, leaf: Leaf) -> dict[str, int]:
    """Add up the amounts of a period by hand."""
    found = dict.fromkeys((*SOURCES, ""), 0)
    for entry in ledger.entries(leaf.about["first"], leaf.about["stop"], "credit"):
        for row in entry.rows:
            found[row["source"]] += row["amount"]
        found[""] += entry.about["unattributed"]["amount"]
    return found


def test_a_period_adds_up_its_entries_and_rounds_to_cents(ledger: Ledger) -> None:
    fill(ledger, (30, 20), pot=123_457)
    leaf = close_period(ledger, "2026-11")
    about, expected = leaf.about, sums(ledger, leaf)
    assert {row["source"]: row["amount"] for row in leaf.rows} | {"": about["unattributed"]["amount"]} == expected
    assert about["entries"] == 50 and about["total"] == sum(expected.values()) == 50 * 123_457
    assert sum(row["units"] for row in leaf.rows) + about["unattributed"]["units"] == about["units"]
    assert about["units"] * 10_000 + about["remainder"] == about["total"] and about["remainder"] < 10_000
    for row in leaf.rows:
        assert abs(row["units"] - Fraction(row["amount"], 10_000)) < 1
    assert about["questions"] == {"expected": 50} and about["rules"] == {"above_noise": 50}


def test_the_next_period_starts_where_the_last_one_ended(ledger: Ledger) -> None:
    fill(ledger, (3,))
    first = close_period(ledger, "2026-10")
    with pytest.raises(CreditError, match="nothing was credited since"):
        close_period(ledger, "2026-11")
    fill(ledger, (2,))
    second = close_period(ledger, "2026-11")
    assert second.about["first"] == first.about["stop"] and second.about["entries"] == 2
    assert [leaf.about["period"] for leaf in list_periods(ledger)] == ["2026-10", "2026-11"]
    fill(ledger, (1,))
    with pytest.raises(CreditError, match="the period 2026-10 is closed already"):
        close_period(ledger, "2026-10")


def test_a_period_ends_at_a_time(ledger: Ledger) -> None:
    fill(ledger, (3,))
    until = datetime.now(UTC)
    fill(ledger, (2,))
    leaf = close_period(ledger, "early", until=until)
    assert leaf.about["entries"] == 3
    assert close_period(ledger, "late").about["entries"] == 2
    with pytest.raises(CreditError, match="is in the future"):
        close_period(ledger, "next", until=datetime.now(UTC) + timedelta(hours=1))
    with pytest.raises(CreditError, match="timezone-aware"):
        close_period(ledger, "next", until=datetime.now())


def test_times_never_go_back(ledger: Ledger) -> None:
    fill(ledger, (1, 1, 1))
    times = [leaf.about["time"] for leaf in ledger.entries()]
    assert times == sorted(times) and all(time.endswith("Z") and len(time) == 27 for time in times)
    assert format_time(datetime(2026, 1, 2, tzinfo=UTC)) == "2026-01-02T00:00:00.000000Z"


def test_a_pot_for_the_period_is_divided_by_shares(place: str) -> None:
    ledger = make_ledger(place, per_query=None)
    fill(ledger, (4, 3))
    with pytest.raises(CreditError, match="7 queries of this period have no pot of their own"):
        close_period(ledger, "p")
    leaf = close_period(ledger, "p", pot=10 * MICRO)
    parts = dict.fromkeys(SOURCES, 0)
    for entry in ledger.entries(kind="credit"):
        for row in entry.rows:
            parts[row["source"]] += row["share"]
            assert row["amount"] is None
    for row in leaf.rows:
        assert abs(row["amount"] - Fraction(10 * MICRO * parts[row["source"]], 7 * PARTS)) < 1
    assert sum(row["amount"] for row in leaf.rows) + leaf.about["unattributed"]["amount"] == 10 * MICRO
    ledger.close()


def test_a_pot_that_nobody_waits_for_is_refused(ledger: Ledger) -> None:
    fill(ledger, (1,))
    with pytest.raises(CreditError, match="has a pot of its own: leave out pot="):
        close_period(ledger, "p", pot=5)


def test_queries_with_and_without_a_pot_go_together(place: str) -> None:
    ledger = make_ledger(place, per_query=None)
    fill(ledger, (2,), pot=100)
    fill(ledger, (3,))
    leaf = close_period(ledger, "p", pot=1000)
    assert leaf.about["total"] == 1200 and leaf.about["without_pot"] == 3
    ledger.close()


def test_a_guess_by_size_stands_beside_every_amount(ledger: Ledger) -> None:
    fill(ledger, (8,), pot=4_000)
    by_size = {row["source"]: row["by_size"] for row in close_period(ledger, "p").rows}
    assert by_size == {"blog": 8000, "post": 8000, "times": 4000, "wire": 12000}


@pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 51, "ü"])
def test_a_period_has_a_plain_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CreditError, match="the name of a period has"):
        close_period(make_ledger(tmp_path / "credit.db"), name)


amounts = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 10**9), min_size=1)


@given(st.lists(st.tuples(amounts, st.integers(0, 10**9)), min_size=1, max_size=6), st.sampled_from([1, 7, 10_000]))
def test_totals_match_to_the_unit(entries: list[tuple[dict[str, int], int]], smallest: int) -> None:
    totals = Totals()
    for sequence, (paid, rest) in enumerate(entries):
        lines = [{"source": name, "size": 1, "share": 0, "amount": paid[name]} for name in sorted(paid)]
        about: dict[str, Any] = {
            "pot": sum(paid.values()) + rest,
            "n": 1,
            "rule": "r",
            "question": "q",
            "validation": None,
        }
        about |= {"unattributed": {"share": 0, "amount": rest}}
        totals.add(compose("credit", sequence, "t", about, Lines.of(lines)))
    totals.divide(None)
    about, rows = totals.summarise(Tariff("EUR", smallest=smallest))
    total = sum(sum(paid.values()) + rest for paid, rest in entries)
    assert about["total"] == total == sum(row["amount"] for row in rows) + about["unattributed"]["amount"]
    assert sum(row["units"] for row in rows) + about["unattributed"]["units"] == about["units"] == total // smallest
    assert all(abs(row["units"] * smallest - row["amount"]) < smallest for row in rows)


# --- how sure shares are


def estimate(results: list[tuple[Attribution, Policy]], pot: int | None = 1000) -> dict[str, tuple[float, float]]:
    """How much too large and too small each share may be."""
    estimator, sequence = ShareEstimator(), 0
    for result, policy in results:
        count = len(result)
        drafts = draft_entries(result, policy, [pot] * count, [f"q{i}" for i in range(count)], [None] * count)
        for draft in drafts:
            estimator.add(compose("credit", sequence, "t", draft.about, draft.lines), policy)
            sequence += 1
    return estimator.estimate()


def test_the_share_of_a_period_is_what_was_paid_and_its_interval_is_around_it(ledger: Ledger) -> None:
    fill(ledger, (30,))
    leaf = close_period(ledger, "p")
    for row in leaf.rows:
        assert 0 <= row["low"] <= row["share"] <= row["high"] <= 1
        assert row["share"] == row["amount"] / leaf.about["total"]


TRUTH = np.array([-0.2, 0.3, 0.6, 1.0])
LENIENT = Policy("p", "expected", rule="positive_part")


def draw_runs(draw: np.random.Generator, runs: int, queries: int) -> Attribution:
    """Effects of runs vary by chance, and the chance is the same for all queries."""
    each = TRUTH + 0.1 * draw.standard_normal((runs, 1, 4)) + 0.02 * draw.standard_normal((runs, queries, 4))
    scores = torch.from_numpy(-40 * each)
    replicates = Replicates(scores - scores.mean(0), (1 / runs,) * runs, tuple(map(str, range(runs))))
    return Attribution(labels(), scores.mean(0), replicates=(replicates,))


@pytest.mark.parametrize("versions", [1, 4])
def test_intervals_cover_the_share_that_many_runs_would_have_on_average(versions: int) -> None:
    """However many versions of a policy were in force: the runs are the same."""
    draw, covered, repetitions = np.random.default_rng(0), 0, 200
    expected = np.maximum(TRUTH, 0) / np.maximum(TRUTH, 0).sum()
    for _ in range(repetitions):
        result = draw_runs(draw, runs=4, queries=40)
        parts = [(result[place::versions], replace(LENIENT, version=1 + place)) for place in range(versions)]
        below, above = estimate(parts)["wire"]
        share = float(
            (np.maximum(-result.scores.numpy(), 0)[:, 3] / np.maximum(-result.scores.numpy(), 0).sum(1)).mean()
        )
        covered += share - below <= expected[3] <= share + above
    assert 0.9 <= covered / repetitions <= 0.99


def test_the_noise_of_a_replayed_run_widens_the_interval() -> None:
    result = make_result(20)
    quiet, loud = (
        replace(
            result,
            labels=labels("this_run", removes=True),
            replicates=(),
            noise_changes=size * torch.tensor([[1.0], [-1.0]]).expand(2, 20),
        )
        for size in (1e-6, 0.3)
    )
    policy = replace(THIS_RUN, rule="positive_part")
    one, other = (sum(estimate([(each, policy)])["wire"]) for each in (quiet, loud))
    assert other > 1.1 * one


def test_a_fallback_fixes_shares_so_that_they_have_no_interval(ledger: Ledger) -> None:
    ledger.credit(make_result(10, figures=None), Policy("p", "expected", fallback="by_size"))
    rows = close_period(ledger, "p").rows
    assert [row["share"] for row in rows] == pytest.approx([0.25, 0.25, 0.125, 0.375])
    assert all(row["low"] is None and row["high"] is None for row in rows)


def test_a_pot_for_the_period_weighs_as_much_as_it_pays(place: str) -> None:
    """Two queries pay a little of their own, three share a large pot: the interval is that of the three."""
    ledger = make_ledger(place, per_query=None)
    fill(ledger, (2,), pot=100)
    fill(ledger, (3,))
    leaf = close_period(ledger, "p", pot=1_000_000)
    for row in leaf.rows:
        assert row["share"] == row["amount"] / leaf.about["total"]
    ledger.close()


def test_queries_are_sampled_by_a_hash_and_all_of_few() -> None:
    assert all(is_sampled(sequence, 5_000, 10) for sequence in range(100))
    kept = sum(is_sampled(sequence, 50_000, 10) for sequence in range(50_000))
    assert 4_700 < kept < 5_300
    wide = sum(is_sampled(sequence, 50_000, 1_000) for sequence in range(50_000))
    assert 1_800 < wide < 2_200
