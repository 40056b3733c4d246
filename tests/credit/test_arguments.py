"""Whatever is passed, the outcome is what was asked for or an error that says what is wrong."""

from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from imprint.credit import Ledger, Policy, Tariff
from imprint.credit.periods import close_period
from imprint.credit.proofs import check_statement
from imprint.credit.verifying import verify
from imprint.errors import ConfigurationError, CreditError
from tests.credit.crediting import EXPECTED, fill, make_result
from tests.credit.insider import change_entry, rebuild, run

KEY = Ed25519PrivateKey.generate()
HUGE = 2**70


@pytest.mark.parametrize(
    "given",
    [
        {"ids": 5}, {"ids": [["a"], ["b"], ["c"]]}, {"ids": "abc"}, {"ids": [1, 2, 3]}, {"payloads": 5},
        {"payloads": {"a": b""}}, {"payloads": [1, 2, 3]}, {"model": 5}, {"pot": HUGE}, {"pot": {1: 2}},
    ],
    ids=str,
)  # fmt: skip
def test_a_query_is_not_credited_with_odd_arguments(given: dict[str, Any], ledger: Ledger) -> None:
    with pytest.raises(CreditError):
        ledger.credit(make_result(3), EXPECTED, **given)
    assert len(ledger) == 2


CALLS: dict[str, Callable[[Any], Any]] = {
    "erase a huge entry": lambda ledger: ledger.erase([HUGE]),
    "erase mixed entries": lambda ledger: ledger.erase([1, "a"]),
    "erase no list": lambda ledger: ledger.erase(5),
    "erase without a reason": lambda ledger: ledger.erase([3], reason=object()),
    "erase expired": lambda ledger: ledger.erase_expired("x"),
    "a huge payload": lambda ledger: ledger.payload(HUGE),
    "huge entries": lambda ledger: list(ledger.entries(HUGE)),
    "entries up to a text": lambda ledger: list(ledger.entries(0, "x")),
    "close until a text": lambda ledger: close_period(ledger, "p", until="x"),  # type: ignore[arg-type]
    "sign with a number": lambda ledger: ledger.sign_head(5),
    "verify with a number as key": lambda ledger: verify(ledger, key=5, progress=False),  # type: ignore[arg-type]
    "verify with bytes as key": lambda ledger: verify(ledger, key=b"abc", progress=False),  # type: ignore[arg-type]
    "verify with numbers as heads": lambda ledger: verify(ledger, heads=[5], progress=False),  # type: ignore[list-item]
    "check nothing": lambda ledger: check_statement(None, KEY.public_key()),  # type: ignore[arg-type]
    "check without a key": lambda ledger: check_statement("a.jsonl", []),
    "check with a number as head": lambda ledger: check_statement("a.jsonl", KEY.public_key(), 5),  # type: ignore[arg-type]
    "a tariff in a number": lambda ledger: Tariff(5),  # type: ignore[arg-type]
    "a policy that is a number": lambda ledger: Policy.from_json(5),  # type: ignore[arg-type]
    "a policy with a number as name": lambda ledger: Policy.from_json({5: 5}),  # type: ignore[dict-item]
    "a policy of a huge version": lambda ledger: Policy("p", "expected", version=10**5000),
}


@pytest.mark.parametrize("call", CALLS)
def test_odd_arguments_are_refused(call: str, ledger: Ledger) -> None:
    fill(ledger, (2,))
    with pytest.raises((CreditError, ConfigurationError)):
        CALLS[call](ledger)


@pytest.mark.parametrize(
    "labels",
    [
        {"source_sizes": (0, 0, 0, 0)}, {"source_sizes": (1.5, 1, 1, 1)}, {"source_sizes": (-1, 5, 5, 5)},
        {"source_sizes": (50, 1, 1, 1)}, {"source_sizes": (True, 5, 5, 5)}, {"source_ids": ("a", "a", "b", "c")},
        {"n": 0}, {"n": -5}, {"n": 40.5},
    ],
    ids=str,
)  # fmt: skip
def test_what_could_never_be_paid_is_not_credited(labels: dict[str, Any], ledger: Ledger) -> None:
    """Entries stay forever: one that cannot be divided would keep every later period from being closed."""
    for policy in (EXPECTED, Policy("by size", "expected", fallback="by_size")):
        with pytest.raises(CreditError):
            ledger.credit(make_result(2, **labels), policy)
    assert len(ledger) == 2


def floats(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row.update(amount=float(row["amount"]), share=float(row["share"]))


def no_sizes(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        row.update(size=0)


def twins(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    rows[1].update(source=rows[0]["source"])


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (floats, "its amounts and shares"),
        (no_sizes, "its sources do not have"),
        (twins, "two of its lines"),
    ],
)
def test_an_entry_that_cannot_be_paid_is_named(edit: Any, expected: str, ledger: Ledger) -> None:
    fill(ledger, (3,))
    run(ledger, change_entry(4, edit), rebuild)
    with pytest.raises(CreditError, match=f"entry 4 cannot be paid: {expected}"):
        close_period(ledger, "p")
    assert any(f"entry 4: {expected}" in str(problem) for problem in verify(ledger, progress=False).problems)


def test_a_time_beyond_the_calendar_is_refused(ledger: Ledger) -> None:
    with pytest.raises(CreditError, match="is before the year 1"):
        ledger.erase_expired(datetime.fromisoformat("0001-01-01T00:00:00+23:59"))
