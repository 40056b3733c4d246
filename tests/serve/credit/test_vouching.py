"""A change with every hash recomputed leads, on the pages alone, to the entries that no signed head vouches for."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from imprint.credit import Ledger, close_period, tables
from imprint.credit.heads import sign_head
from imprint.credit.money import format_amount
from imprint.keys import load_private_key, make_keys
from tests.credit.crediting import fill, make_ledger
from tests.credit.insider import L, change_entry, rebuild, rewrite, run
from tests.credit.test_narrowing import swap
from tests.serve.credit.asking import Bureau, get, open_bureau
from tests.serve.news import News
from tests.serve.pages.reading import read_page


@pytest.fixture
def signed(news: News, tmp_path: Path) -> Iterator[Bureau]:
    """0 log, 1 tariff, 2 policy, 3 to 5 queries, head; 6 to 9 queries, 10 a closed period, head; 11 a query."""
    make_keys(tmp_path / "key")
    with make_ledger(tmp_path / "credit.db") as ledger:
        fill(ledger, (3,))
        ledger.sign_head(tmp_path / "key", publish=tmp_path / "heads.jsonl")
        fill(ledger, (4,))
        close_period(ledger, "2026-11")
        ledger.sign_head(tmp_path / "key", publish=tmp_path / "heads.jsonl")
        fill(ledger, (1,))
        settings: dict[str, Any] = {"public_key": tmp_path / "key.pub", "heads": tmp_path / "heads.jsonl"}
        with open_bureau(news, ledger, tmp_path, **settings) as bureau:
            yield bureau


def read(bureau: Bureau, path: str) -> str:
    answer = bureau.browse("auditor").get(path)
    assert answer.status_code == 200, answer.text
    read_page(answer.text)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", answer.text))


def signs(bureau: Bureau) -> dict[int, str]:
    page = bureau.browse("auditor").get("/credit").text
    found = re.findall(r'entries/(\d+)">\d+</a>(?:(?!</tr>).)*data-label="signed">(?:<[^>]+>)?([a-z ]+)', page, re.S)
    return {int(place): text for place, text in found}


def test_what_nobody_touched_is_signed(signed: Bureau) -> None:
    assert signs(signed) == {**dict.fromkeys([3, 4, 5, 6, 7, 8, 9], "yes"), 11: "not yet"}
    assert "does not lead" not in read(signed, "/credit")


def test_rows_that_no_head_vouches_for_any_more_are_not_confirmed_even_before_anybody_verifies(signed: Bureau) -> None:
    run(signed.ledger, change_entry(8, swap), rebuild)
    assert signs(signed) == {
        **dict.fromkeys([3, 4, 5], "yes"),
        **dict.fromkeys([6, 7, 8, 9], "not confirmed"),
        11: "not yet",
    }
    page = read(signed, "/credit")
    assert "It still leads to the head of 6 entries, so the change lies in entries 6 to 10 ." in page


def test_verification_leads_to_the_period_its_sources_and_the_entries_that_may_be_wrong(signed: Bureau) -> None:
    run(signed.ledger, change_entry(8, swap), rebuild)
    signed.verify()
    page = read(signed, "/credit")
    assert "Entry 10 : period 2026-11 does not follow from its entries: blog has 0." in page
    assert "EUR, its entries give 0." in page and "It was changed, or one of entries 6 to 9 was" in page
    assert "Look at entry 8 first: two sources may have exchanged their figures there" in page
    assert "Entries 6 to 10 : a head of 11 entries was signed" in page
    assert "Sign a head." not in page


def test_an_entry_among_which_something_was_changed_says_which_these_are(signed: Bureau) -> None:
    run(signed.ledger, change_entry(8, swap), rebuild)
    page = read(signed, "/credit/entries/8")
    assert "This entry is not confirmed." in page and "the change lies in entries 6 to 10." in page
    assert get(signed.client("auditor"), "entries/8")["proof"]["span"] == [6, 10]


def test_an_entry_that_an_older_head_vouches_for_is_proven_by_that(signed: Bureau) -> None:
    run(signed.ledger, change_entry(8, swap), rebuild)
    proof = get(signed.client("auditor"), "entries/4")["proof"]
    assert proof["holds"] is True and proof["head"]["size"] == 6 and proof["span"] is None


def test_a_head_with_another_signature_confirms_nothing(signed: Bureau, tmp_path: Path) -> None:
    """Whoever may write to the database can put a head of the changed log there."""
    ledger: Ledger = signed.ledger
    run(ledger, change_entry(8, swap), rebuild, delete(tables.heads).where(tables.heads.c.size == 11))
    make_keys(tmp_path / "other")
    with ledger.engine.connect() as connection:
        state = connection.execute(tables.log.select()).one()
    frontier = tables.read_frontier(state.size, state.peaks)
    forged = sign_head(load_private_key(tmp_path / "other"), ledger.name, frontier.size, frontier.root, state.time)
    row = {"size": forged.size, "time": forged.time, "head": forged.content, "signature": forged.signature}
    run(ledger, tables.heads.insert().values(**row))
    assert {signs(signed)[place] for place in (6, 7, 8, 9, 11)} == {"not yet"}
    signed.verify()  # which knows the published heads
    assert {signs(signed)[place] for place in (6, 7, 8, 9)} == {"not confirmed"}


def test_entries_below_a_stored_node_that_differs_are_not_confirmed(news: News, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    with make_ledger(tmp_path / "credit.db") as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger, (300,))
        ledger.sign_head(tmp_path / "key")
        run(ledger, update(L).where(L.c.sequence == 5).values(hash=b"0" * 32))
        assert get(bureau.client("auditor"), "entries/7")["proof"]["span"] == [0, 255]
        assert get(bureau.client("auditor"), "entries/290")["proof"]["holds"] is True


def test_a_share_that_does_not_follow_is_in_no_total_no_export_and_has_no_explanation(
    signed: Bureau, news: News, tmp_path: Path
) -> None:
    client = signed.client("auditor")
    before = get(client, "totals")

    def take(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        least, most = min(rows, key=lambda row: int(row["share"])), max(rows, key=lambda row: int(row["share"]))
        least["share"], most["share"] = least["share"] + 1000, most["share"] - 1000

    own_hash = rewrite(11, lambda about: None, rehash=True)
    run(signed.ledger, change_entry(11, take), own_hash)  # after the newest head, so that no signature covers it
    with open_bureau(news, signed.ledger, tmp_path) as other:  # whose totals have not been read yet
        client = other.client("auditor")
        after = get(client, "totals")
        assert (before["queries"], after["queries"], after["left_out"]) == (1, 0, [11])
        exported = client.get("/v1/credit/export").text.splitlines()
        (row,) = [line for line in exported if line.startswith("11,")]
        assert "do not follow from its scores" in row
        assert all("follow from the scores" in line["why"] for line in get(client, "entries/11")["credit"]["lines"])


def test_a_statement_that_was_changed_on_the_disk_is_not_served_after_a_start(
    signed: Bureau, news: News, tmp_path: Path
) -> None:
    folder = tmp_path / "statements"
    files = list[bytes]()
    for _ in range(2):
        with open_bureau(news, signed.ledger, tmp_path, statements=folder) as other:
            client = other.client("auditor")
            source = get(client, "periods")[0]["sources"][0]["source"]
            files.append(client.get(f"/v1/credit/statements/2026-11/{source}.csv").content)
        for file in folder.rglob("*.csv"):
            file.write_text("changed")
    assert files[0] == files[1] and b"changed" not in files[0]


def test_amounts_of_a_closed_period_that_the_signed_log_does_not_have_are_shown_nowhere(signed: Bureau) -> None:
    client = signed.client("auditor")
    (before,) = get(client, "periods")
    total = before["total"]["micro"] + 123_450_000

    def raise_amount(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        rows[0]["amount"] += 123_450_000
        about["total"] = total

    own_hash = rewrite(10, lambda about: None, rehash=True)
    run(signed.ledger, change_entry(10, raise_amount), own_hash)  # the tree is as it was
    assert [each["sequence"] for each in get(client, "periods")] == [10]
    assert "sources" not in get(client, "periods")[0]
    assert client.get("/v1/credit/totals?period=2026-11").status_code == 409
    source = before["sources"][0]["source"]
    for path in ("/credit", "/credit?period=2026-11", f"/sources/{source}"):
        page = read(signed, path)
        assert "not confirmed by the signed log" in page and format_amount(total) not in page
