"""Verification leads to the place: heads that hold bound it, and what is stored stands beside what it would be."""

from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, insert, update

from imprint.credit import Ledger, tables
from imprint.credit.auditing import Problem
from imprint.credit.heads import Head, sign_head
from imprint.credit.merkle import Frontier, hash_leaf
from imprint.credit.periods import close_period
from imprint.credit.verifying import Verification, verify
from tests.credit.crediting import fill, make_ledger
from tests.credit.insider import L, change_entry, change_line, rebuild, rewrite, run

KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    """What is narrowed down does not depend on the database, so SQLite alone."""
    with make_ledger(tmp_path / "credit.db") as made:
        yield made


def fill_and_sign(ledger: Ledger) -> list[Head]:
    """0 log, 1 tariff, 2 policy, 3 to 5 queries, head; 6 to 9 queries, 10 a closed period, head."""
    fill(ledger, (3,))
    first = ledger.sign_head(KEY)
    fill(ledger, (4,))
    close_period(ledger, "2026-11")
    return [first, ledger.sign_head(KEY)]


def check(ledger: Ledger, heads: list[Head], key: Any = KEY) -> Verification:
    return verify(ledger, heads=heads, key=None if key is None else key.public_key(), progress=False)


def swap(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Give the figures of one source to another one, and the other way round."""
    first, second = (next(row for row in rows if row["source"] == name) for name in ("blog", "wire"))
    for name in first.keys() - {"source", "size"}:
        first[name], second[name] = second[name], first[name]


def find(found: Verification, text: str) -> Problem:
    (problem,) = [each for each in found.problems if text in each.text]
    return problem


def test_a_change_with_every_hash_lies_between_the_head_that_holds_and_the_one_that_does_not(ledger: Ledger) -> None:
    heads = fill_and_sign(ledger)
    run(ledger, change_entry(8, swap), rebuild)
    found = check(ledger, heads)
    head = find(found, "with another root")
    assert head.span == (6, 10)
    assert "one of entries 6 to 10 was changed" in head.text and "the head of 6 entries still holds" in head.text


def test_a_period_names_the_sources_whose_entries_give_something_else(ledger: Ledger) -> None:
    heads = fill_and_sign(ledger)
    before = {row["source"]: row["amount"] for row in ledger.entry(10).rows}
    entry = {row["source"]: row["amount"] for row in ledger.entry(8).rows}
    run(ledger, change_entry(8, swap), rebuild)
    period = find(check(ledger, heads), "does not follow from its entries")
    now = before["blog"] - entry["blog"] + entry["wire"]
    assert (
        f"blog has 0.{before['blog']:06}".rstrip("0") in period.text and f"give 0.{now:06}".rstrip("0") in period.text
    )
    assert "wire has" in period.text and "times has" not in period.text
    assert (period.sequence, period.span) == (10, (6, 9))
    assert "It was changed, or one of entries 6 to 9 was" in str(period)


def test_an_entry_that_alone_explains_a_period_if_figures_were_exchanged_is_to_be_looked_at_first(
    ledger: Ledger,
) -> None:
    heads = fill_and_sign(ledger)
    run(ledger, change_entry(8, swap), rebuild)
    period = find(check(ledger, heads), "does not follow from its entries")
    assert period.suspects == (8,) and "Look at entry 8 first" in str(period)
    run(ledger, change_entry(9, swap), rebuild)  # no single entry explains both
    assert find(check(ledger, heads), "does not follow from its entries").suspects == ()
    run(ledger, change_entry(9, swap), change_entry(8, swap), change_entry(4, swap), rebuild)
    assert find(check(ledger, heads), "does not follow from its entries").suspects == (4,)
    assert find(check(ledger, []), "does not follow from its entries").span == (0, 9)
    run(ledger, delete(tables.heads))
    ahead = check(ledger, [sign_head(KEY, ledger.name, 6, root_of(ledger, 6), "2026")])  # vouches for entry 4 as it is
    assert find(ahead, "does not follow from its entries").suspects == ()


def root_of(ledger: Ledger, size: int) -> bytes:
    return Frontier().extend(hash_leaf(leaf.header) for leaf in ledger.entries(0, size))[0].root


def test_a_period_whose_entries_are_all_confirmed_was_changed_itself(ledger: Ledger) -> None:
    fill(ledger, (3,))
    head = ledger.sign_head(KEY)
    place = close_period(ledger, "p1").sequence
    run(ledger, change_entry(place, lambda about, rows: rows[0].update(amount=7)), rebuild)
    period = find(check(ledger, [head]), "does not follow")
    assert (period.sequence, period.span) == (place, None)


def test_a_head_that_only_the_database_has_vouches_for_nothing_until_its_signature_is_checked(ledger: Ledger) -> None:
    heads = fill_and_sign(ledger)
    run(ledger, change_entry(4, swap), rebuild)
    leaves = [hash_leaf(leaf.header) for leaf in ledger.entries(0, 9)]
    forged = sign_head(Ed25519PrivateKey.generate(), ledger.name, 9, Frontier().extend(leaves)[0].root, "2026")
    row = {"size": 9, "time": forged.time, "head": forged.content, "signature": forged.signature}
    run(ledger, delete(tables.heads), insert(tables.heads).values(**row))
    for key in (None, KEY):
        assert find(check(ledger, heads[1:], key), "with another root").span == (0, 10)


def test_peaks_that_do_not_fit_lead_to_the_subtree(ledger: Ledger) -> None:
    fill(ledger, (8,))  # with 11 entries: 8, 2 and 1
    run(ledger, rewrite(9, lambda about: about.update(query="x"), rehash=True))
    assert find(check(ledger, []), "do not lead to the root").span == (8, 9)


def test_an_amount_changed_by_hand_is_shown_beside_what_it_would_be(ledger: Ledger) -> None:
    fill(ledger, (3,))
    row = next(row for row in ledger.entry(4).rows if row["amount"])
    run(ledger, change_line(4, b'"amount":%d' % row["amount"], b'"amount":%d' % (row["amount"] + 1_000_000)))
    text = find(check(ledger, []), "do not follow").text
    assert f"{row['source']} has 1.{row['amount']:06} EUR".replace("0 EUR", " EUR") in text
    assert f"it would be 0.{row['amount']:06}".rstrip("0") in text


def test_a_share_changed_by_hand_is_shown_beside_what_it_would_be_to_its_last_digit(ledger: Ledger) -> None:
    fill(ledger, (3,))

    def shift(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        rows[0]["share"] = 123456789

    run(ledger, change_entry(4, shift), rebuild)
    assert "has a share of 12.3456789%, it would be " in find(check(ledger, []), "do not follow").text


def test_help_changed_by_hand_is_shown_beside_what_the_score_says(ledger: Ledger) -> None:
    fill(ledger, (3,))
    helps = ledger.entry(4).rows[0]["helps"]
    run(ledger, change_entry(4, lambda about, rows: rows[0].update(helps=9.5)))
    assert f"blog by 9.5, it would be {helps!r}" in find(check(ledger, []), "helped by something else").text


def test_a_period_over_a_changed_entry_names_that_entry(ledger: Ledger) -> None:
    fill(ledger, (3,))
    close_period(ledger, "2026-11")
    run(ledger, rewrite(4, lambda about: about.update(query="x")))
    text = find(check(ledger, []), "period").text
    assert text == "period 2026-11 cannot be added up again, because entry 4, which it covers, was changed or removed"
    run(ledger, delete(L).where(L.c.sequence == 3))
    assert "because entry 3, which it covers" in find(check(ledger, []), "cannot be added up").text


def test_nobody_is_told_to_sign_a_head_of_a_log_that_does_not_verify(ledger: Ledger) -> None:
    heads = fill_and_sign(ledger)
    fill(ledger, (1,))
    assert "Sign a head." in repr(check(ledger, heads))
    run(ledger, update(L).where(L.c.sequence == 11).values(time="2020"))
    assert "Sign a head." not in repr(check(ledger, heads)) and "before you sign another one" in repr(
        check(ledger, heads)
    )
