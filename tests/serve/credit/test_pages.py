"""Pages about credit lead to a tampered row, show publishers their own lines alone, and run nothing they are given."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from sqlalchemy import update

from imprint.credit import Ledger, Policy, close_period, tables
from imprint.credit.auditing import Problem
from imprint.credit.canonical import encode
from imprint.credit.leaves import compose
from imprint.credit.log import append
from imprint.keys import make_keys
from imprint.serve.credit.answers import Amount, Day
from imprint.serve.credit.verification import State
from imprint.serve.pages.credit_charts import draw_history, group_days
from imprint.serve.pages.source import find_link
from tests.credit.crediting import EXPECTED, SOURCES, THIS_RUN, fill, make_ledger, make_result
from tests.credit.insider import L, rewrite, run
from tests.credit.test_clocks import fill_with_a_clock_ahead
from tests.serve.credit.asking import Bureau, get, open_bureau
from tests.serve.news import News
from tests.serve.pages.reading import read_page


class Links(HTMLParser):
    """Collects the addresses that a page links to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name == "href" and value]


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    """Pages do not depend on the database, so SQLite alone."""
    with make_ledger(tmp_path / "credit.db") as made:
        yield made


def read(client: TestClient, path: str, status: int = 200) -> str:
    answer = client.get(path)
    assert answer.status_code == status, answer.text
    read_page(answer.text)  # refuses a page that is not well formed, or has something inline
    return answer.text


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))


def press(client: TestClient, path: str, page: str) -> Any:
    found = re.search(r'name="csrf" value="([^"]+)"', page)
    assert found is not None
    return client.post(path, data={"csrf": found.group(1)})


def test_from_the_button_to_the_tampered_row(bureau: Bureau) -> None:
    fill(bureau.ledger)
    browser = bureau.browse("auditor")
    page = read(browser, "/credit")
    assert "Not verified since" in page
    run(bureau.ledger, rewrite(5, lambda about: about.update(pot=9000)))
    assert press(browser, "/credit/verify", page).headers["location"] == "/credit"
    bureau.desk.verifier.wait()
    page = read(browser, "/credit")
    assert "problems found" in page and "/credit/entries/5" in Links(page).found
    assert page.count("does not verify") == 1  # in the table, the row
    entry = read(browser, "/credit/entries/5")
    assert (
        "This entry does not verify" in entry
        and "Its pot is 0.009 EUR, by its tariff it would be 0.002 EUR." in text_of(entry)
    )
    assert "does not verify" not in read(browser, "/credit/entries/6")


def test_an_untouched_log_holds_and_shows_its_head(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger, (3,))
    bureau.ledger.sign_head(tmp_path / "key")
    fill(bureau.ledger, (2,))
    bureau.verify()
    page = text_of(read(bureau.browse("admin"), "/credit"))
    assert "It holds." in page and "The first 6 of 8 entries" in page and "newest 2 are not covered" in page


def test_one_entry_is_named_in_the_singular(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger, (2,))
    bureau.ledger.sign_head(tmp_path / "key")
    fill(bureau.ledger, (1,))
    page = text_of(read(bureau.browse("auditor"), "/credit"))
    assert "The newest one is not covered yet" in page and "of 6 entries" in page


def test_commands_in_what_a_verification_found_are_code(bureau: Bureau) -> None:
    fill(bureau.ledger, (1,))
    problems = (Problem("run `imprint <x>`", 3), Problem("run `imprint <y>`"))
    bureau.desk.verifier._last = State("problems", ended="2026-11-30T12:00:00.000000Z", problems=problems, count=2)
    browser = bureau.browse("auditor")
    for path, shown in (
        ("/credit", ["imprint &lt;x&gt;", "imprint &lt;y&gt;"]),
        ("/credit/entries/3", ["imprint &lt;x&gt;"]),
    ):
        page = read(browser, path)
        assert all(f"<code>{each}</code>" in page for each in shown)


def test_a_row_changed_after_the_log_was_verified_is_named_at_the_top(bureau: Bureau) -> None:
    fill(bureau.ledger, (3,))
    bureau.verify()
    browser = bureau.browse("auditor")
    assert "Something was changed" not in read(browser, "/credit")
    run(bureau.ledger, rewrite(4, lambda about: about.update(pot=9000)))
    page = text_of(read(browser, "/credit"))
    assert "It holds." in page and "Something was changed since: entry 4 , of those listed below" in page


def test_a_comparison_of_some_queries_shows_what_these_got_beside_the_whole(bureau: Bureau) -> None:
    fill(bureau.ledger, (4,))
    browser, path = bureau.browse("auditor"), "/credit?policy=rule:positive_part"
    assert "Amount of these" not in read(browser, path)
    bureau.ledger.credit(make_result(1, 9, question="this_run"), THIS_RUN)
    page = text_of(read(browser, "/credit?policy=house%401"))
    assert "1 query answers another question than it pays for, and is left out" in page
    assert "“These” are the 4 queries that are compared." in page and "Amount of these Of these, other policy" in page


def test_a_form_from_elsewhere_begins_no_verification(bureau: Bureau) -> None:
    fill(bureau.ledger, (1,))
    browser = bureau.browse("auditor")
    assert browser.post("/credit/verify", data={"csrf": "x" * 43}).status_code == 403
    assert bureau.desk.verifier.last.status == "never" and bureau.desk.verifier.running is None


def test_publishers_see_their_own_lines_and_cannot_verify(bureau: Bureau, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    fill(bureau.ledger)
    close_period(bureau.ledger, "p1")
    bureau.ledger.sign_head(tmp_path / "key")
    fill(bureau.ledger, (2,))
    run(bureau.ledger, rewrite(4, lambda about: about.update(pot=9000)))
    bureau.verify()
    browser = bureau.browse("publisher", ("times",))
    paths = ("/credit", "/credit?period=p1&policy=rule:positive_part", "/credit/entries/5", "/credit/entries/4")
    for path in (*paths, "/sources", "/sources/times"):
        page = text_of(read(browser, path))
        for other in set(SOURCES) - {"times"}:
            assert not re.search(rf"\b{other}\b", page), (path, other)
        assert "9000" not in page and "0.009" not in page
    page = read(browser, "/credit?policy=rule:positive_part")
    assert "Verify the log" not in page and "Other policy" not in page
    read(browser, "/sources/wire", 404)
    assert press(browser, "/credit/verify", read(browser, "/credit")).status_code == 403


def test_paging_on_the_page_shows_each_row_once(bureau: Bureau) -> None:
    fill(bureau.ledger, (60,))
    browser, path, seen = bureau.browse("auditor"), "/credit", list[int]()
    while path:
        page = read(browser, path)
        table = page[page.index('id="entries"') : page.index('id="disputes"')]
        seen += map(int, re.findall(r'scope="row"><a href="/credit/entries/(\d+)"', table))
        path = next((link for link in Links(page).found if "before=" in link), "")
    assert seen == [leaf.sequence for leaf in bureau.ledger.entries(kind="credit")][::-1]


def test_filters_of_the_form_narrow_the_rows_and_are_kept(bureau: Bureau) -> None:
    fill(bureau.ledger, (4,))
    day = bureau.ledger.entry(3).about["time"][:10]
    browser = bureau.browse("auditor")
    assert "No query fits" in text_of(read(browser, f"/credit?until={day}&rule=nothing"))
    page = read(browser, f"/credit?source=times&from={day}&until={day}")
    assert page.count('scope="row"><a href="/credit/entries/') == 4  # the last day counts as a whole
    assert any(link.startswith("/v1/credit/export?source=times") for link in Links(page).found)
    assert "must be a day" in read(browser, "/credit?until=soon")


def test_an_open_dispute_is_shown_until_a_later_one_agrees(bureau: Bureau) -> None:
    fill(bureau.ledger, (3,))
    browser = bureau.browse("auditor")
    note(bureau.ledger, 4, agrees=False)
    page = text_of(read(browser, "/credit"))
    assert "1 open:" in page and "differs, open" in page
    assert "differs" in text_of(read(browser, "/credit/entries/4"))
    note(bureau.ledger, 4, agrees=True)
    page = text_of(read(browser, "/credit"))
    assert "None is open" in page and "settled since" in page


def note(ledger: Ledger, sequence: int, *, agrees: bool) -> None:
    """Note a dispute, as settling one does."""
    about = {"disputed": sequence, "agrees": agrees, "others": [], "difference": 0.5, "tolerance": 1e-3}
    with tables.writing(ledger.engine) as (connection, frontier, last):
        append(connection, frontier, [compose("dispute", frontier.size, last, about)])


def test_a_log_with_entries_written_by_hand_still_has_pages(bureau: Bureau) -> None:
    fill(bureau.ledger, (6,))
    close_period(bureau.ledger, "p1")
    fill(bureau.ledger, (2,))
    run(bureau.ledger, rewrite(4, lambda about: about.pop("pot"), rehash=True))
    run(bureau.ledger, update(L).where(L.c.sequence == 1).values(header=encode({"kind": "tariff"})))
    run(bureau.ledger, rewrite(9, lambda about: about.update(total=1)))
    browser = bureau.browse("auditor")
    paths = ("/credit", "/credit?policy=rule:positive_part", "/sources", "/sources/times")
    for path in (*paths, *(f"/credit/entries/{place}" for place in range(len(bureau.ledger)))):
        read(browser, path)


def test_who_may_see_no_credit_sees_sources_without_it(bureau: Bureau) -> None:
    fill(bureau.ledger)
    browser = bureau.browse("query")
    read(browser, "/credit", 403)
    assert "Amount" not in read(browser, "/sources")
    assert "Credit over time" not in read(browser, "/sources/publisher-1")


def test_what_is_known_of_a_source_is_shown_as_text_and_only_web_addresses_are_links(
    bureau: Bureau, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bureau.desk.service.store
    hostile = '<script>alert(1)</script>"onload=x'
    sources = [{**each, "owner": hostile, "url": "javascript:alert(1)"} for each in bureau.desk.service.sources]
    monkeypatch.setattr(type(bureau.desk.service), "sources", property(lambda self: sources))
    page = read(bureau.browse("admin"), f"/sources/{store.source_ids[0]}")
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert not any(link.startswith("javascript") for link in Links(page).found)
    assert find_link("https://example.org/a") == "https://example.org/a"
    for bad in (
        "javascript:alert(1)",
        "data:text/html,x",
        "//example.org",
        "ftp://example.org",
        "https://",
        "http://[",
    ):
        assert find_link(bad) is None


def test_a_service_without_a_ledger_has_sources_and_no_credit(bureau: Bureau) -> None:
    desk, bureau.app.state.credit = bureau.desk, None
    browser = bureau.browse("admin")
    assert "Amount" not in read(browser, "/sources")
    read(browser, "/sources/publisher-1")
    read(browser, "/credit", 404)
    bureau.app.state.credit = desk


def test_a_pot_of_a_period_is_shown_as_waiting(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "pot.db", per_query=None) as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger, (8,))
        browser = bureau.browse("auditor")
        page = text_of(read(browser, "/credit?policy=rule:positive_part"))
        assert "8 of them wait for the pot" in page and "points" in page
        read(browser, "/sources/times")
        read(browser, "/credit/entries/3")
        close_period(ledger, "p", pot=7_000_000)
        assert "paid 7 EUR" in text_of(read(browser, "/credit?period=p"))


def test_a_source_counts_pots_of_periods_once_they_are_closed(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "pot.db", per_query=None) as ledger, open_bureau(news, ledger, tmp_path) as bureau:
        fill(ledger, (8,))
        browser, client = bureau.browse("auditor"), bureau.client("auditor")
        page = text_of(read(browser, "/sources/times"))
        assert "8 queries wait for the pot of the period that is running, and count 0 until it is closed" in page
        closing = close_period(ledger, "p", pot=7_000_000)
        ledger.credit(make_result(1, 3), EXPECTED, pot=2_000)
        ledger.credit(make_result(1, 4), EXPECTED)
        found = get(client, "sources/times")
        row = next(row for row in closing.rows if row["source"] == "times")
        since = next(line for line in ledger.entry(len(ledger) - 2).rows if line["source"] == "times")
        assert found["amount"]["micro"] == row["amount"] + since["amount"] > row["amount"] > 0
        assert (found["waiting"], found["queries"]) == (1, 10)
        page = text_of(read(browser, "/sources/times"))
        assert "1 query waits for the pot" in page and "Pots of closed periods are part of what it got" in page


def test_days_are_grouped_without_losing_an_amount() -> None:
    days = [
        Day(
            day=f"2026-{month:02}-0{day}",
            queries=1,
            earned=1,
            amount=Amount.of(month, "EUR"),
            by_size=Amount.of(2, "EUR"),
        )
        for month in range(1, 13)
        for day in (1, 5)
    ]
    spans = group_days(days)
    assert len(spans) <= 40
    assert sum(span.amount for span in spans) == sum(day.amount.micro for day in days)
    assert sum(span.queries for span in spans) == len(days)
    assert group_days([]) == [] and [span.text for span in group_days(days[:1])] == ["2026-01-01"]
    chart = draw_history("<b>", [span._replace(text=f"<b>{span.text}") for span in spans], "EUR")
    assert "<b>" not in chart and chart.count("<rect") == len(spans)


def test_a_log_that_has_grown_since_it_was_verified_is_not_called_verified(bureau: Bureau) -> None:
    fill(bureau.ledger, (3,))
    bureau.verify()
    assert "It holds." in read(bureau.browse("auditor"), "/credit")
    fill(bureau.ledger, (2,))
    page = read(bureau.browse("auditor"), "/credit")
    assert "It holds." not in page and 'class="note good"' not in page
    assert "6 of 8 entries verified." in page and "2 were written since then, and are not verified yet." in page


@pytest.mark.parametrize(("question", "varied"), [("this_run", "with other queries"), ("expected", "other training")])
def test_intervals_claim_no_other_training_runs_where_there_was_one(bureau: Bureau, question: Any, varied: str) -> None:
    noise = torch.randn(20, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    result = make_result(6, question=question)
    one_run = replace(result, noise_changes=noise, replicates=())
    bureau.ledger.credit(one_run if question == "this_run" else result, Policy("p", question))
    close_period(bureau.ledger, "2026-11")
    for path in ("/credit?period=2026-11", "/sources/times"):
        page = text_of(read(bureau.browse("auditor"), path))
        assert varied in page and ("other training runs" in page) is (question == "expected")
        assert "a query that was credited several times is not recognised" in page


def test_a_key_whose_sources_do_not_exist_is_told_which_these_are(bureau: Bureau) -> None:
    fill(bureau.ledger, (1,))
    browser = bureau.browse("publisher", ("ambre",))
    for path in ("/credit", "/sources"):
        page = text_of(read(browser, path))
        assert "This key names no source of this service: ambre." in page and "You see the lines of" not in page
    page = text_of(read(bureau.browse("publisher", ("ambre", "times")), "/credit"))
    assert "You see the lines of times alone" in page and "sources that this service does not have: ambre." in page


def test_nothing_is_said_of_queries_that_gave_nothing_where_there_are_none(bureau: Bureau) -> None:
    fill(bureau.ledger, (3,), Policy("even", "expected", rule="fixed_plus", fixed=0.5))
    page = text_of(read(bureau.browse("auditor"), "/sources/times"))
    assert "from 3 of 3 queries." in page and "gave it nothing" not in page


def test_sources_are_listed_by_their_names(bureau: Bureau) -> None:
    fill(bureau.ledger, (1,))
    close_period(bureau.ledger, "2026-11")
    bureau.desk.names.update(blog="Yew", post="alder", times="Birch", wire="cedar")
    page = read(bureau.browse("auditor"), "/credit")
    periods = page[page.index('id="periods"') :]
    for text, form in ((page, r">{}</option>"), (periods, r'<th scope="row">{}</th>')):
        places = [re.search(form.format(name), text).start() for name in ("alder", "Birch", "cedar", "Yew")]  # type: ignore[union-attr]
        assert places == sorted(places)


def test_a_clock_that_is_wrong_is_noted_for_those_who_see_all(
    bureau: Bureau, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(bureau.ledger, (1,))
    assert "A clock is wrong." not in read(bureau.browse("auditor"), "/credit")
    fill_with_a_clock_ahead(bureau.ledger, monkeypatch, days=40)
    assert "A clock is wrong." in read(bureau.browse("auditor"), "/credit")
    bureau.verify()
    page = read(bureau.browse("auditor"), "/credit")
    assert page.count("which is in the future by the clock of this machine") == 1
    assert "a clock is wrong: The last entry" in caplog.text
    assert "clock" not in read(bureau.browse("publisher", ("times",)), "/credit")
