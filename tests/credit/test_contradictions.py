"""A payer has the key and the database, so every proof fits. A publisher still sees figures that cannot be true."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from imprint.credit import Ledger, Policy
from imprint.credit.periods import close_period
from imprint.credit.proofs import check_statement
from imprint.credit.statements import write_statements
from imprint.errors import CreditError
from tests.credit.crediting import fill, make_ledger, make_result
from tests.credit.insider import change_entry, rebuild, run

KEY = Ed25519PrivateKey.generate()
Values = dict[str, Any]
Change = Callable[[Values, Values], Any]


def find_problems(ledger: Ledger, source: str, folder: Path) -> list[str]:
    """Return what does not hold in the statement of a source, or why it cannot be read at all."""
    ledger.sign_head(KEY)
    write_statements(ledger, "p", folder, sources=[source], progress=False)
    try:
        return list(check_statement(folder / f"{source}.jsonl", KEY.public_key()).problems)
    except CreditError as error:
        return [str(error)]


def header(**values: Any) -> Change:
    return lambda about, row: about.update(values)


def line(**values: Any) -> Change:
    return lambda about, row: row.update(values)


def rest(**values: Any) -> Change:
    return lambda about, row: about["unattributed"].update(values)


def rest_of(about: Values) -> int:
    return int(about["unattributed"]["amount"])


PERIODS: dict[str, tuple[Change, str]] = {
    "a share": (line(share=0.9), "the share is not the amount divided by the total"),
    "an interval": (line(low=0.0, high=0.0), "the interval of the share does not hold"),
    "no lower end": (line(low=None), "the interval of the share has one end"),
    "too few queries": (header(entries=3), "more queries than entries, or fewer than this"),
    "a pot for none": (header(without_pot=99), "more queries than entries, or fewer"),
    "half a cent": (lambda about, row: row.update(units=row["units"] + 0.5), "a whole number is expected"),
    "a cent more": (lambda about, row: row.update(units=row["units"] + 2), "differs from the amount by a unit or more"),
    "a smaller total": (header(total=1), "get more than everybody together"),
    "a larger total": (header(total=7_500_000, units=750), "the total is not what the queries paid"),
    "too much unattributed": (rest(amount=10**12, units=10**8), "get more than everybody together"),
    "all unattributed": (rest(amount=7_000_000, units=700), "get more than everybody together"),
    "more unattributed": (
        lambda about, row: about["unattributed"].update(amount=rest_of(about) + 1),
        "do not add up to what is unattributed",
    ),
    "a negative rest": (rest(amount=-1), "or less than nothing"),
    "a negative remainder": (header(units=701, remainder=-10_000), "the remainder are not those of the total"),
    "a large remainder": (header(units=699, remainder=10_000), "the remainder are not those of the total"),
    "a negative size": (line(by_size=-5), "a rule by size would pay more than the total, or less"),
    "a large size": (line(by_size=10**12), "a rule by size would pay more than the total"),
    "too many rules": (header(rules={"above_noise": 99}), "the rules of the period are not those of 14 queries"),
    "another rule": (header(rules={"equal": 14}), "the rules of the period are not those of its queries"),
    "an unknown rule": (header(rules={"whim": 14}), "the rules of the period are not those of 14 queries"),
    "no questions": (header(questions={}), "the questions of the period are not those of 14 queries"),
    "validations": (header(validations={"failed": 14}), "the validations of the period are not those of its queries"),
    "its end": (header(stop=10**6, entries=10**5), "the period was closed before it ended"),
}
ENTRIES: dict[str, tuple[Change, str]] = {
    "a fallback that the policy lacks": (header(rule="by_size"), "their policy, house, does not say so"),
    "another question": (header(question="this_run"), "their policy, house, does not say so"),
    "no validation": (header(validation=None), "their policy, house, does not say so"),
    "nothing": (header(rule="nothing"), "the rule nothing cannot leave 0.0% unattributed"),
    "all unattributed": (rest(share=10**9, amount=500_000), "the share is not between 0 and what is attributed"),
    "an amount": (lambda about, row: row.update(amount=row["amount"] + 1), "is not the share of what the query paid"),
    "a negative pot": (header(pot=-1), "must be a whole number of micro-units"),
    "a negative size": (line(size=-1), "more training examples than there are, or fewer than none"),
}


@pytest.mark.parametrize("kind", PERIODS)
def test_a_closed_period_that_contradicts_itself_is_refused(kind: str, ledger: Ledger, tmp_path: Path) -> None:
    edit, expected = PERIODS[kind]
    fill(ledger, (9, 5), pot=500_000)
    sequence = close_period(ledger, "p").sequence
    run(ledger, change_entry(sequence, lambda about, rows: edit(about, rows[2])), rebuild)
    found = find_problems(ledger, "times", tmp_path)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize("kind", ENTRIES)
def test_an_entry_that_contradicts_itself_is_refused(kind: str, ledger: Ledger, tmp_path: Path) -> None:
    edit, expected = ENTRIES[kind]
    fill(ledger, (9, 5), pot=500_000)
    close_period(ledger, "p")
    chosen = next(leaf for leaf in ledger.entries(kind="credit") if 0 < leaf.rows[3]["share"] < 10**9)
    run(ledger, change_entry(chosen.sequence, lambda about, rows: edit(about, rows[3])), rebuild)
    found = find_problems(ledger, "wire", tmp_path)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize("per_query", [None, 1_999])
@pytest.mark.parametrize("figures", [{}, {"figures": None}], ids=["validated", "not validated"])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"rule": "positive_part"},
        {"rule": "fixed_plus", "fixed": 0.2},
        {"fallback": "by_size"},
        {"fallback": "equal"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore::imprint.errors.ReliabilityWarning")
def test_nothing_contradicts_itself_in_what_a_ledger_writes(
    rule: Values, figures: Values, per_query: int | None, tmp_path: Path
) -> None:
    with make_ledger(tmp_path / "credit.db", per_query=per_query) as ledger:
        ledger.credit(make_result(7, 1, **figures), Policy("house", "expected", **rule))
        ledger.credit(make_result(3, 2), Policy("other", "expected", **rule), pot=333)
        fewer = ("times", "wire", "x", "y")  # sources that are in some queries of the period alone
        ledger.credit(make_result(3, 3, source_ids=fewer, source_names=fewer), Policy("house", "expected", **rule))
        close_period(ledger, "p", pot=None if per_query else 1_000_003)
        for source in ("blog", "wire", "x"):
            assert find_problems(ledger, source, tmp_path / "out") == []
