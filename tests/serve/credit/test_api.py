"""What /v1/credit says is what the log says, to whom it may be said, and no more."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint.credit import Policy, check_statement, close_period
from imprint.credit.heads import Head
from imprint.credit.merkle import check_inclusion, hash_leaf
from imprint.keys import make_keys
from tests.credit.crediting import EXPECTED, SOURCES, THIS_RUN, fill, make_ledger, make_result
from tests.credit.insider import change_entry, rewrite, run
from tests.serve.credit.asking import Bureau, get, open_bureau
from tests.serve.news import News

LUCKY = Policy("lucky", "expected", rule="positive_part")


def list_all(client: Any, **query: Any) -> list[dict[str, Any]]:
    """Return all entries, page by page."""
    found, before = list[dict[str, Any]](), None
    while True:
        page = get(client, "entries", **query, **({} if before is None else {"before": before}))
        found += page["entries"]
        before = page["before"]
        if before is None:
            return found


def test_totals_of_the_running_period_are_those_that_closing_it_gives(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("auditor")
    get(client, "totals")
    fill(bureau.ledger, (2, 2), LUCKY, key=None)
    running = get(client, "totals")
    closing = close_period(bureau.ledger, "2026-11")
    assert running["queries"] == closing.about["entries"] == 12
    assert running["total"]["micro"] == closing.about["total"] == 12 * 2_000
    assert running["unattributed"]["micro"] == closing.about["unattributed"]["amount"]
    assert running["rules"] == closing.about["rules"]
    for each, row in zip(running["sources"], closing.rows, strict=True):
        assert (each["source"], each["queries"]) == (row["source"], row["entries"])
        assert (each["amount"]["micro"], each["by_size"]["micro"]) == (row["amount"], row["by_size"])
        assert each["share"] == row["share"]
    closed = get(client, "totals", period="2026-11")
    assert [each["amount"] for each in closed["sources"]] == [each["amount"] for each in running["sources"]]
    assert get(client, "totals")["queries"] == 0


def test_totals_of_days_are_those_of_all_their_entries(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("auditor")
    entries = list_all(client)
    day = entries[0]["time"][:10]
    assert {each["time"][:10] for each in entries} == {day}, "run this again after midnight"
    found = get(client, "totals", **{"from": day})
    for source in found["sources"]:
        lines = [line for each in entries for line in each["lines"] if line["source"] == source["source"]]
        assert source["amount"]["micro"] == sum(line["amount"]["micro"] for line in lines)
    assert get(client, "totals", until=day)["queries"] == 0
    get(client, "totals", 422, **{"from": "yesterday"})


def test_paging_returns_each_entry_once_while_new_ones_are_added(bureau: Bureau) -> None:
    fill(bureau.ledger, (5, 5))
    client = bureau.client("auditor")
    there = [leaf.sequence for leaf in bureau.ledger.entries(kind="credit")]
    found, before, seed = list[int](), None, 10
    while True:
        page = get(client, "entries", limit=3, **({} if before is None else {"before": before}))
        found += [each["sequence"] for each in page["entries"]]
        before = page["before"]
        if before is None:
            break
        bureau.ledger.credit(make_result(2, seed), EXPECTED)
        seed += 1
    assert found == there[::-1]


def test_filters_find_what_reading_everything_finds(bureau: Bureau) -> None:
    fill(bureau.ledger, (4, 4))
    bureau.ledger.credit(make_result(3, 7), LUCKY, ids=["a", "b", "a-b"])
    client = bureau.client("admin")
    everything = list_all(client)
    assert [each["query"] for each in list_all(client, query="a")] == ["a"]
    lucky = [each for each in everything if each["rule"] == "positive_part"]
    assert list_all(client, rule="positive_part", limit=2) == lucky and len(lucky) == 3
    middle = everything[5]["time"]
    assert list_all(client, **{"from": middle}) == [each for each in everything if each["time"] >= middle]
    assert list_all(client, until=middle, limit=1) == [each for each in everything if each["time"] < middle]
    assert list_all(client, source="times") == everything
    assert list_all(client, query='a" or 1=1') == []
    assert list_all(client, source="nobody") == []


def test_an_entry_says_why_each_share_is_what_it_is(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("auditor")
    for leaf in bureau.ledger.entries(kind="credit"):
        found = get(client, f"entries/{leaf.sequence}")["credit"]
        assert found["pot"] == {"micro": 2_000, "text": "0.002 EUR"}
        for line, row in zip(found["lines"], leaf.rows, strict=True):
            assert line["amount"]["micro"] == row["amount"]
            if row["share"]:
                assert f"{100 * line['share']:.1f}% of it" in line["why"] and line["helped_by"] > line["needed"]
            elif row["helps"] > 0:
                assert "that is needed" in line["why"] and line["helped_by"] <= line["needed"]
            else:
                is_small = -row["helps"] <= line["needed"]  # with runs, and this policy, the same as being clear
                assert "did not help" in line["why"] and ("is not clear" in line["why"]) == is_small


def test_what_a_first_look_calls_clear_is_called_clear_in_the_log(bureau: Bureau) -> None:
    """With the noise of a replayed run, an effect is clear from twice its error on, and needs more to be credited."""
    noise = torch.tensor([[4.0, 4.0, 4.0], [-4.0, -4.0, -4.0]], dtype=torch.float64) / 40
    result = replace(make_result(3, question="this_run"), noise_changes=noise, replicates=())
    bureau.ledger.credit(result, THIS_RUN)
    client, marks = bureau.client("auditor"), result.distinguishable
    assert marks is not None
    unsure = 0
    for leaf, clear in zip(bureau.ledger.entries(kind="credit"), marks, strict=True):
        for line, is_clear in zip(get(client, f"entries/{leaf.sequence}")["credit"]["lines"], clear, strict=True):
            if line["helped_by"] < 0:
                assert ("is not clear" in line["why"]) is not bool(is_clear)
                unsure += bool(is_clear) and -line["helped_by"] < line["needed"]
    assert unsure  # clear, and yet less than what would be credited


def test_an_entry_comes_with_a_proof_against_the_last_signed_head(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger, (300,))
    client = bureau.client("auditor")
    assert get(client, "entries/5")["proof"]["holds"] is None
    bureau.ledger.sign_head(tmp_path / "key")
    fill(bureau.ledger, (2,))
    found = get(client, "entries/5")["proof"]
    head = Head.from_json(found["head"])
    path = [bytes.fromhex(node) for node in found["leaf"]["proof"]]
    assert found["holds"] and check_inclusion(
        hash_leaf(found["leaf"]["header"].encode()), 5, head.size, path, head.root
    )
    assert get(client, f"entries/{head.size}")["proof"]["holds"] is None
    run(bureau.ledger, change_entry(5, lambda about, rows: rows[0].update(share=1)))
    assert get(client, "entries/6")["proof"]["holds"] is True  # it still leads to the signed root, by stored hashes


def test_publishers_see_nothing_of_others(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger)
    closing = close_period(bureau.ledger, "p1")
    bureau.ledger.sign_head(tmp_path / "key")
    fill(bureau.ledger, (3,))
    client = bureau.client("publisher", ("times",))
    paths = ["entries", "totals", "totals?period=p1", "periods", "heads", "verification", "sources/times"]
    paths += [f"entries/{place}" for place in range(closing.sequence + 1)]
    texts = [client.get(f"/v1/credit/{path}") for path in paths] + [client.get("/v1/credit/export")]
    texts += [client.get(f"/v1/credit/statements/p1/times.{suffix}") for suffix in ("html", "csv", "jsonl")]
    for answer in texts:
        assert answer.status_code == 200, answer.text
        for other in set(SOURCES) - {"times"}:
            assert f'"{other}"' not in answer.text and f",{other}," not in answer.text
    shown = [line for each in get(client, "entries")["entries"] for line in each["lines"]]
    assert len(shown) == 11 and {line["source"] for line in shown} == {"times"}
    for path in ("sources/wire", "statements/p1/wire.csv", "entries?source=wire", "export?source=wire"):
        assert client.get(f"/v1/credit/{path}").status_code == 404


def test_publishers_do_not_learn_whose_queries_were_erased_and_why(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    bureau.ledger.credit(make_result(3), EXPECTED, payloads=[b"1", b"2", b"3"])
    bureau.ledger.erase([3, 4], reason="request of Jane Doe, ticket 7")
    bureau.ledger.sign_head(tmp_path / "key")
    place, client = len(bureau.ledger) - 1, bureau.client("publisher", ("times",))
    found = get(client, f"entries/{place}")
    assert found["kind"] == "erasure" and found["proof"]["holds"] and not {"erased", "reason"} & found["about"].keys()
    browser = bureau.browse("publisher", ("times",))
    for answer in (client.get(f"/v1/credit/entries/{place}"), browser.get(f"/credit/entries/{place}")):
        assert answer.status_code == 200 and "Jane" not in answer.text
    assert get(bureau.client("auditor"), f"entries/{place}")["about"]["reason"] == "request of Jane Doe, ticket 7"


def test_a_publisher_without_a_line_in_an_entry_is_told_nothing_of_it(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("publisher", ("elsewhere",))
    assert get(client, "entries") == {"entries": [], "before": None}
    get(client, "entries/3", 404)
    assert client.get("/v1/credit/export").text.count("\n") == 1


def test_a_publisher_of_a_thousand_sources_sees_its_entries(bureau: Bureau, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(bureau.ledger)
    expected = [each["sequence"] for each in list_all(bureau.client("publisher", ("times",)))]
    client = bureau.client("publisher", ("times", *(f"title-{place}" for place in range(1_100))))
    assert [each["sequence"] for each in list_all(client)] == expected and len(expected) == 8
    monkeypatch.setattr("imprint.serve.credit.reading.UNSEARCHED", 3)
    assert len(get(client, "entries")["entries"]) == 3  # every entry is read, so fewer of them for one page
    assert [each["sequence"] for each in list_all(client)] == expected


def test_roles_that_may_not_see_credit_are_refused(bureau: Bureau) -> None:
    fill(bureau.ledger, (1,))
    query, publisher = bureau.client("query"), bureau.client("publisher", ("times",))
    for path in ("entries", "entries/2", "totals", "heads", "periods", "verification", "export", "sources/times"):
        assert query.get(f"/v1/credit/{path}").status_code == 403
    assert publisher.post("/v1/credit/verification").status_code == 403
    assert publisher.get("/v1/credit/comparison", params={"policy": "rule:positive_part"}).status_code == 403
    assert bureau.client("auditor").post("/v1/credit/verification").status_code == 202
    bureau.desk.verifier.wait()
    assert get(publisher, "verification")["status"] == "holds"


def test_another_policy_gives_what_crediting_by_it_gives(bureau: Bureau, news: News, tmp_path: Path) -> None:
    fill(bureau.ledger, (30,))
    client = bureau.client("auditor")
    running = get(client, "comparison", policy="rule:positive_part")
    with make_ledger(tmp_path / "second.db") as other:
        fill(other, (30,), Policy("rule positive_part", "expected", rule="positive_part"))
        expected = close_period(other, "x")
    closed = close_period(bureau.ledger, "p1")
    for found in (running, get(client, "comparison", policy="rule:positive_part", period="p1")):
        assert [each["amount"]["micro"] for each in found["sources"]] == [row["amount"] for row in closed.rows]
        assert [each["other"]["micro"] for each in found["sources"]] == [row["amount"] for row in expected.rows]
        assert sum(each["difference"]["micro"] for each in (*found["sources"], found["unattributed"])) == 0
    get(client, "comparison", 404, policy="unknown")


def test_a_pot_of_a_period_is_divided_by_either_policy(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "pot.db", per_query=None) as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger, (8,))
        client = bureau.client("auditor")
        running = get(client, "totals")
        assert running["without_pot"] == 8 and running["sources"][0]["share"] is None
        shares = [each["waiting"] for each in running["sources"]]
        before = get(client, "comparison", policy="rule:positive_part")
        assert [each["share"] for each in before["sources"]] == shares and before["sources"][0]["amount"] is None
        closing = close_period(ledger, "p", pot=7_000_000)
        after = get(client, "comparison", policy="rule:positive_part", period="p")
        assert [each["amount"]["micro"] for each in after["sources"]] == [row["amount"] for row in closing.rows]
        assert sum(each["other"]["micro"] for each in (*after["sources"], after["unattributed"])) == 7_000_000


def test_queries_of_another_question_keep_their_part_of_the_pot(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "pot.db", per_query=None) as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger, (4,))
        ledger.credit(make_result(4, 9, question="this_run"), THIS_RUN)
        closing = close_period(ledger, "p", pot=1_000_000)
        found = get(bureau.client("auditor"), "comparison", policy="house@1", period="p")
        assert (found["queries"], found["refused"]) == (4, 4)
        everybody = [*found["sources"], found["unattributed"]]
        for column in ("amount", "other"):  # its own policy, so that nothing may change
            assert sum(each[column]["micro"] for each in everybody) == 500_000
        assert not any(each["difference"]["micro"] for each in everybody)
        for each, row in zip(found["sources"], closing.rows, strict=True):
            assert each["amount"]["micro"] <= row["amount"]
        run(
            ledger,
            rewrite(closing.sequence - 1, lambda about: about.update(n=1)),
            rewrite(3, lambda about: about.pop("n")),
        )
        bureau.desk._comparisons.clear()
        found = get(bureau.client("auditor"), "comparison", policy="house@1", period="p")
        assert (found["queries"], found["refused"], found["left_out"]) == (3, 3, 2)
        assert sum(each["amount"]["micro"] for each in (*found["sources"], found["unattributed"])) == 375_000


def test_statements_can_be_checked_and_need_a_signed_head(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger)
    client = bureau.client("publisher", ("times",))
    get(client, "statements/p1/times.jsonl", 404)
    close_period(bureau.ledger, "p1")
    get(client, "statements/p1/times.jsonl", 409)
    bureau.ledger.sign_head(tmp_path / "key")
    answer = client.get("/v1/credit/statements/p1/times.jsonl")
    assert "attachment" in answer.headers["content-disposition"]
    (tmp_path / "times.jsonl").write_bytes(answer.content)
    checked = check_statement(tmp_path / "times.jsonl", tmp_path / "key.pub")
    assert checked.holds
    (own,) = get(client, "periods")[0]["sources"]
    assert checked.amount == own["amount"]["micro"]
    get(client, "statements/p1/times.exe", 404)


def test_a_statement_names_its_files_as_they_are_downloaded(bureau: Bureau, tmp_path: Path) -> None:
    """So that the command on the page works in the folder of the downloads, also beside those of other periods."""
    make_keys(tmp_path / "key")
    fill(bureau.ledger)
    close_period(bureau.ledger, "p1")
    bureau.ledger.sign_head(tmp_path / "key")
    client = bureau.client("publisher", ("times",))
    sent = {suffix: client.get(f"/v1/credit/statements/p1/times.{suffix}") for suffix in ("html", "csv", "jsonl")}
    files = {suffix: answer.headers["content-disposition"].split('"')[1] for suffix, answer in sent.items()}
    assert files == {suffix: f"p1-times.{suffix}" for suffix in files}
    page = sent["html"].text
    assert f"imprint credit check {files['jsonl']} " in page and f"<code>{files['csv']}</code>" in page
    assert not re.search(r"[ >]times\.(csv|jsonl)", page)


def test_the_export_has_one_row_for_each_source_of_each_query(bureau: Bureau) -> None:
    fill(bureau.ledger)
    lines = list(csv.DictReader(bureau.client("auditor").get("/v1/credit/export").text.splitlines()))
    expected = [(str(leaf.sequence), row) for leaf in bureau.ledger.entries(kind="credit") for row in leaf.rows]
    assert [(each["entry"], each["source"]) for each in lines] == [(place, row["source"]) for place, row in expected]
    assert [round(1e6 * float(each["amount"])) for each in lines] == [row["amount"] for _, row in expected]


def test_what_is_asked_wrongly_is_refused_and_nothing_of_the_inside_is_shown(bureau: Bureau) -> None:
    fill(bureau.ledger)
    client = bureau.client("auditor")
    for path in ("entries/999", "totals?period=..%2f", "sources/..%2f..%2fetc", "statements/a/b.csv"):
        answer = client.get(f"/v1/credit/{path}")
        assert answer.status_code == 404 and "credit.db" not in answer.text
    for path in ("entries/-1", "entries/x", "entries?before=1e9", "entries?limit=0", "entries?from=2026-13-01",
                 f"entries/{2**70}", "totals?from=0000-00-00", "entries?until=9999-12-31T23:59:59-23:00"):  # fmt: skip
        answer = client.get(f"/v1/credit/{path}")
        assert answer.status_code == 422 and "Traceback" not in answer.text, answer.text
    assert json.loads(client.get("/v1/credit/entries/999").text)["error"]["code"] == "not_found"
