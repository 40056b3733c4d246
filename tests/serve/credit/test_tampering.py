"""What was changed in the database is found, named and led to; and nothing of it is shown as a number."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from imprint.credit import Ledger, close_period, tables, verify
from imprint.credit.canonical import encode
from imprint.keys import make_keys
from imprint.serve.credit.faults import CHANGED
from imprint.serve.credit.verification import Verifier
from imprint.serve.settings import Settings
from tests.credit.crediting import fill, make_ledger
from tests.credit.insider import L, change_line, rebuild, rewrite, run
from tests.serve.credit.asking import Bureau, get, open_bureau
from tests.serve.news import News


def double_pot(about: dict[str, Any]) -> None:
    about["pot"] *= 2


def test_a_row_changed_by_hand_is_found_and_led_to(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("auditor")
    bureau.verify()
    assert get(client, "verification")["status"] == "holds"
    run(bureau.ledger, change_line(5, b'"share":', b'"share":1'))
    bureau.verify()
    found = get(client, "verification")
    assert found["status"] == "problems" and {each["sequence"] for each in found["problems"]} == {5}
    (row,) = [each for each in get(client, "entries")["entries"] if each["problems"]]
    assert row["sequence"] == 5 and row["problems"][0] == CHANGED and "lines" not in row
    entry = get(client, "entries/5")
    assert entry["credit"] is None and entry["problems"] == row["problems"]


def test_a_change_that_a_sqlite_shell_makes_is_shown_before_anybody_verifies(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "own.db") as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger)
        with sqlite3.connect(tmp_path / "own.db") as shell:
            shell.execute("UPDATE imprint_leaves SET lines = replace(lines, 'times', 'wires') WHERE sequence = 6")
        shell.close()
        rows = get(bureau.client("auditor"), "entries")["entries"]
        assert [each["sequence"] for each in rows if each["problems"]] == [6]


def test_an_entry_changed_with_its_hash_is_named_by_what_does_not_follow(bureau: Bureau) -> None:
    fill(bureau.ledger)
    run(bureau.ledger, rewrite(5, double_pot, rehash=True))
    client = bureau.client("auditor")
    entry = get(client, "entries/5")
    assert any("amounts do not follow" in each for each in entry["problems"])
    bureau.verify()
    found = [each["text"] for each in get(client, "verification")["problems"] if each["sequence"] == 5]
    assert found and set(found) <= set(get(client, "entries/5")["problems"])
    assert get(bureau.client("publisher", ("times",)), "entries/5")["problems"] == [
        "something in it is not as it was written"
    ]


def test_totals_leave_out_what_was_changed_and_say_so(bureau: Bureau) -> None:
    fill(bureau.ledger, (6,))
    run(bureau.ledger, rewrite(4, double_pot))
    found = get(bureau.client("auditor"), "totals")
    assert (found["queries"], found["total"]["micro"], found["left_out"]) == (5, 10_000, [4])


def test_what_was_counted_before_it_was_changed_stays_as_it_was(bureau: Bureau) -> None:
    fill(bureau.ledger, (6,))
    client = bureau.client("auditor")
    before = get(client, "totals")
    run(bureau.ledger, rewrite(4, double_pot))
    assert get(client, "totals") == before


def test_an_entry_that_was_removed_has_a_page_that_says_so(bureau: Bureau) -> None:
    fill(bureau.ledger, (6,))
    run(bureau.ledger, delete(L).where(L.c.sequence == 4))
    client = bureau.client("auditor")
    assert get(client, "entries/4")["problems"][0] == CHANGED
    assert get(client, "totals")["left_out"] == [4]
    assert "4," in bureau.client("auditor").get("/v1/credit/export").text


def test_a_rewritten_log_is_found_by_the_published_heads_and_proofs(
    bureau: Bureau, tmp_path: Path, ledger: Ledger
) -> None:
    make_keys(tmp_path / "key")
    fill(ledger, (6,))
    ledger.sign_head(tmp_path / "key", publish=tmp_path / "heads.jsonl")
    run(ledger, rewrite(4, lambda about: about.update(query="other")), rebuild)
    assert get(bureau.client("auditor"), "entries/4")["proof"]["holds"] is False
    settings = Settings(public_key=tmp_path / "key.pub", heads=tmp_path / "heads.jsonl")
    verifier = Verifier(ledger, settings)
    verifier.start()
    verifier.wait()
    assert verifier.last.status == "problems" and "another root" in verifier.last.problems[0].text
    assert (verifier.last.published, verifier.last.signed) == (1, True)


def test_a_tree_node_that_was_changed_leads_to_the_entries_below_it(bureau: Bureau) -> None:
    fill(bureau.ledger, (300,))
    run(bureau.ledger, update(tables.nodes).values(hash=bytes(32)))
    bureau.verify()
    spans = [each["span"] for each in get(bureau.client("auditor"), "verification")["problems"]]
    assert [0, 255] in spans


def test_entries_that_were_written_by_hand_break_nothing(bureau: Bureau) -> None:
    fill(bureau.ledger, (6,))
    close_period(bureau.ledger, "p1")
    run(bureau.ledger, rewrite(4, lambda about: about.pop("pot"), rehash=True))
    run(bureau.ledger, rewrite(5, lambda about: about.update(unattributed=7), rehash=True))
    run(bureau.ledger, update(L).where(L.c.sequence == 1).values(header=encode({"kind": "tariff"})))
    client = bureau.client("auditor")
    for path in ("entries", "entries/1", "entries/4", "entries/5", "totals", "periods", "export", "verification"):
        assert client.get(f"/v1/credit/{path}").status_code == 200, path
    assert get(client, "totals", period="p1")["queries"] == 6  # as it was closed


@pytest.mark.parametrize("field", ["stop", "total", "time", "rules", "unattributed"])
def test_a_closed_period_that_was_written_by_hand_is_left_out(bureau: Bureau, field: str) -> None:
    fill(bureau.ledger, (6,))
    place = close_period(bureau.ledger, "p1").sequence
    fill(bureau.ledger, (2,))
    run(bureau.ledger, rewrite(place, lambda about: about.update({field: [7]}), rehash=True))
    check_what_is_read(bureau, place)
    assert [sorted(each) for each in get(bureau.client("auditor"), "periods")] == [["problems", "sequence"]]


@pytest.mark.parametrize("field", ["rule", "time", "question", "validation", "n", "better", "pot"])
def test_a_query_that_was_written_by_hand_is_left_out(bureau: Bureau, field: str) -> None:
    fill(bureau.ledger, (6,))
    run(bureau.ledger, rewrite(4, lambda about: about.update({field: {"7": None}}), rehash=True))
    check_what_is_read(bureau, 4)
    assert get(bureau.client("auditor"), "totals")["queries"] == 5


def check_what_is_read(bureau: Bureau, place: int) -> None:
    """Everything that reads the log answers, and names the entry."""
    client, browser = bureau.client("auditor"), bureau.browse("auditor")
    for path in ("entries", f"entries/{place}", "totals", "totals?from=2000-01-01", "periods", "export", "verification",
                 "sources/times", "comparison?policy=rule:positive_part"):  # fmt: skip
        assert client.get(f"/v1/credit/{path}").status_code == 200, path
    for path in ("/credit", f"/credit/entries/{place}", "/sources", "/sources/times"):
        assert browser.get(path).status_code == 200, path
    assert get(client, "totals")["left_out"] == [place]
    assert get(client, f"entries/{place}")["problems"][0] == CHANGED


def test_never_are_two_verifications_run_at_once(bureau: Bureau, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bureau.ledger, (1,))
    entered, leave, count = threading.Event(), threading.Event(), list[int]()

    def wait(*given: Any, **named: Any) -> Any:
        count.append(1)
        entered.set()
        assert leave.wait(60)
        return verify(*given, **named)

    monkeypatch.setattr("imprint.serve.credit.verification.verify", wait)
    assert bureau.desk.verifier.start() and entered.wait(60)
    client = bureau.client("admin")
    assert client.post("/v1/credit/verification").json()["running"] is True
    leave.set()
    bureau.desk.verifier.wait()
    assert count == [1] and get(client, "verification")["status"] == "holds"


def test_a_verification_that_cannot_be_finished_says_why(ledger: Ledger, tmp_path: Path) -> None:
    verifier = Verifier(ledger, Settings(heads=tmp_path / "missing.jsonl"))
    verifier.start()
    verifier.wait()
    assert verifier.last.status == "failed" and "missing.jsonl" in verifier.last.error
