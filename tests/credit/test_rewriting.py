"""Amounts that somebody rewrote together with every hash are found, because they are computed again."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from imprint.credit import Ledger, Policy, Tariff
from imprint.credit.canonical import encode
from imprint.credit.drafting import read_evidence
from imprint.credit.leaves import Leaf
from imprint.credit.money import apportion
from imprint.credit.periods import close_period
from imprint.credit.verifying import verify
from imprint.errors import CreditError
from tests.credit.crediting import BAD, EXPECTED, fill, labels, make_result
from tests.credit.insider import change_entry, rebuild, run

Rows = list[dict[str, Any]]
Change = Callable[[dict[str, Any], Rows], Any]


def divide_again(about: dict[str, Any], rows: Rows, policy: Policy = EXPECTED) -> None:
    """Make shares, amounts and rule of an entry fit what else it says."""
    division = policy.divide(read_evidence(Leaf(encode(about), tuple(map(encode, rows)), b"x" * 32)))
    *amounts, rest = apportion(about["pot"], [*division.shares, division.unattributed])
    for row, share, amount in zip(rows, division.shares, amounts, strict=True):
        row.update(share=share, amount=amount)
    about["unattributed"] = {"share": division.unattributed, "amount": rest}
    about.update(rule=division.rule, reason=division.reason)


def problems(ledger: Ledger, change: Change | None = None, sequence: int = 3) -> list[str]:
    """Change an entry, divide its pot again, make every hash fit, and verify."""
    if change is not None:

        def apply(about: dict[str, Any], rows: Rows) -> None:
            change(about, rows)
            divide_again(about, rows)

        run(ledger, change_entry(sequence, apply), rebuild)
    return [str(problem) for problem in verify(ledger, progress=False).problems]


def forget_errors(about: dict[str, Any], rows: Rows) -> None:
    about["freedom"] = None
    for row in rows:
        row["error"] = None


def fill_in_errors(about: dict[str, Any], rows: Rows) -> None:
    shares = about["runs"]["shares"]
    about["freedom"], squares = len(shares) - 1, sum(share**2 for share in shares)
    for row in rows:
        spread = sum(share * (each / about["n"]) ** 2 for share, each in zip(shares, row["deviations"], strict=True))
        row["error"] = math.sqrt(squares / (1 - squares) * spread)


def shrink_shares(about: dict[str, Any], rows: Rows) -> None:
    about["runs"]["shares"] = [1e-9] * 4
    fill_in_errors(about, rows)


def prefer_a_run(about: dict[str, Any], rows: Rows) -> None:
    about["runs"]["shares"] = [0.97, 0.01, 0.01, 0.01]
    fill_in_errors(about, rows)


def silence_noise(about: dict[str, Any], rows: Rows) -> None:
    about.update(noise=[0.0] * 200, freedom=200)
    for row in rows:
        row["error"] = 0.0 if row["source"] == "blog" else 1e9


def count_removals(about: dict[str, Any], rows: Rows) -> None:
    about.update(noise=[1.0] * 200, freedom=200)
    for row in rows:
        row["error"] = math.sqrt(1000 * 1001 / 2)


ERRORS: list[Change] = [forget_errors, shrink_shares, prefer_a_run, silence_noise, count_removals]


@pytest.mark.parametrize("change", ERRORS)
def test_errors_that_do_not_follow_from_the_runs_are_found(change: Change, ledger: Ledger) -> None:
    ledger.credit(make_result(3), EXPECTED)
    assert problems(ledger) == []
    assert problems(ledger, change) == ["entry 3: its standard errors do not follow from the spread of its runs"]


def test_errors_over_the_checkpoints_of_one_run_are_found(ledger: Ledger) -> None:
    result = make_result(3)
    alone = tuple(replace(each, over="checkpoints") for each in result.replicates)
    ledger.credit(replace(result, replicates=alone), replace(EXPECTED, fallback="by_size"))
    assert problems(ledger) == []
    run(ledger, change_entry(3, fill_in_errors), rebuild)
    assert "entry 3: its standard errors do not follow from the spread of its runs" in problems(ledger)


def test_runs_that_are_called_checkpoints_have_no_errors(ledger: Ledger) -> None:
    ledger.credit(make_result(3), EXPECTED)
    found = problems(ledger, lambda about, rows: about["runs"].update(over="checkpoints"))
    assert found == ["entry 3: its standard errors do not follow from the spread of its runs"]


def test_the_noise_of_a_run_gives_its_errors(ledger: Ledger) -> None:
    """Also of sources that are sums of several."""
    noise = torch.randn(20, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    result = replace(make_result(3, question="this_run"), noise_changes=noise, replicates=())
    ledger.credit(result, Policy("audit", "this_run"))
    united = replace(result, labels=replace(result.labels, summed=(3, 1, 2, 10)))
    ledger.credit(united, Policy("audit", "this_run"))
    assert problems(ledger) == []


def test_a_pot_that_the_tariff_does_not_give_is_found(ledger: Ledger) -> None:
    ledger.credit(make_result(3), EXPECTED)
    assert problems(ledger, lambda about, rows: about.update(pot=2_000_000)) == [
        "entry 3: its pot is 2 EUR, by its tariff it would be 0.002 EUR"
    ]


def test_a_tariff_that_did_not_hold_is_found(ledger: Ledger) -> None:
    ledger.set_tariff(Tariff("EUR", per_query=500))
    ledger.credit(make_result(1), EXPECTED)
    assert ledger.entry(4).about["tariff"] == 2 and problems(ledger) == []
    assert problems(ledger, lambda about, rows: about.update(pot=2_000, tariff=1), 4) == [
        "entry 4: it names entry 1 as its tariff, which did not hold then"
    ]


def test_pots_that_callers_gave_are_counted(ledger: Ledger) -> None:
    ledger.credit(make_result(2), EXPECTED, pot=7)
    found = verify(ledger, progress=False)
    assert found.holds and any(each.startswith("2 queries pay a pot that their caller gave") for each in found.remarks)


def test_an_outcome_that_contradicts_its_figures_is_found(ledger: Ledger) -> None:
    ledger.credit(make_result(1, figures=BAD), replace(EXPECTED, fallback="by_size"))
    assert ledger.entry(3).about["validation"]["outcome"] == "failed" and problems(ledger) == []
    found = problems(ledger, lambda about, rows: about["validation"].update(outcome="sizes validated"))
    assert "entry 3: its validation is recorded as 'sizes validated', by its own figures it is 'failed'" in found


def test_intervals_by_an_unknown_estimator_are_found(ledger: Ledger) -> None:
    fill(ledger)
    sequence = close_period(ledger, "2026-11").sequence
    run(ledger, change_entry(sequence, lambda about, rows: about.update(estimator=0)), rebuild)
    assert "are by estimator 0, and this version knows" in problems(ledger)[0]


def test_amounts_that_are_not_whole_numbers_are_found(ledger: Ledger) -> None:
    ledger.credit(make_result(1), EXPECTED)
    run(ledger, change_entry(3, lambda about, rows: [row.update(amount=float(row["amount"])) for row in rows]), rebuild)
    assert problems(ledger)[0] == "entry 3: its amounts and shares are not whole numbers"


@pytest.mark.parametrize("factor", [-1.0, 0.0, "2", True])
def test_a_calibration_that_is_not_positive_is_found_and_not_credited(factor: Any, ledger: Ledger) -> None:
    ledger.credit(make_result(1), EXPECTED)
    details = {**labels().details, "calibration": factor}
    with pytest.raises(CreditError, match="a calibration is a positive number"):
        ledger.credit(make_result(1, details=details), EXPECTED)
    found = problems(ledger, lambda about, rows: about["details"].update(calibration=factor))
    assert found == [f"entry 3: its scores were calibrated by {factor!r}, which is not a positive number"]


def test_a_query_that_differs_from_its_hash_is_not_returned(ledger: Ledger) -> None:
    ledger.credit(make_result(1), EXPECTED, payloads=[b"who won?"])
    assert ledger.payload(3) == b"who won?" and ledger.payload(2) is None
    run(ledger, lambda connection: connection.exec_driver_sql("UPDATE imprint_payloads SET payload = salt"))
    with pytest.raises(CreditError, match="the query of entry 3 was changed"):
        ledger.payload(3)
