"""The page *Query* shows what the library computes, keeps what was typed, and credits a form once."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import imprint
from imprint.credit import Policy, verify
from imprint.errors import CreditUnavailable
from imprint.serve.app import create_app
from imprint.serve.pages.answering import describe_answer
from imprint.serve.pages.wording import judge_effect
from imprint.serve.service import CreditUnanswered, Service
from tests.serve.access.doors import Browser, Doors
from tests.serve.news import POLICY, News, make_ledger
from tests.serve.pages.hostile import ATTACK, CLASSES, NAMES
from tests.serve.pages.reading import Element, read_page


def ask(browser: Browser, news: News, place: int = 0, **more: str) -> Element:
    """Ask a query in the form, which must be answered."""
    values = " ".join(map(str, news.ask(place)["values"]))
    label = str(int(news.labels[place]))
    answer = browser.post("/query", data={"values": values, "label": label, **more})
    assert answer.status_code == 200, answer.text
    return read_page(answer.text)


def read_rows(page: Element) -> dict[str, list[str]]:
    """Return the cells of the table of sources by the name of the source."""
    rows = page.find("table")[0].one("tbody").find("tr")
    return {row.one("th").text: [cell.text for cell in row.find("td")] for row in rows}


def read_bar(row: Element) -> tuple[float, float, str]:
    """Return where a bar begins, how long it is, and how it looks."""
    bar = row.one("svg").one("rect").attributes
    return float(bar["x"]), float(bar["width"]), bar["class"]


def test_the_numbers_of_the_page_are_those_of_attribute(news: News, admin: Browser) -> None:
    page = ask(admin, news)
    expected = imprint.attribute(news.task, news.store, (news.inputs[:1], news.labels[:1]), progress=False)
    rows = read_rows(page)
    for credit in expected.top(20)[0]:
        effect, _, error = rows[credit.name][1].partition(" ± ")
        assert float(effect.replace("−", "-")) == pytest.approx(credit.removal_effect, abs=0.06 * float(error))
        assert float(error) == pytest.approx(credit.standard_error, rel=0.06)
        unclear = rows[credit.name][2] == "not clear"
        assert unclear == (credit.distinguishable is False)
    assert len(rows) == len(news.store) and page.one("p", class_="big").text == str(int(news.labels[0]))


def test_bars_are_as_long_as_their_effects_and_help_is_on_the_right(news: News, admin: Browser) -> None:
    page = ask(admin, news)
    expected = imprint.attribute(news.task, news.store, (news.inputs[:1], news.labels[:1]), progress=False)
    known = {credit.name: credit for credit in expected.top(20)[0]}
    scales = set()
    for row in page.find("table")[0].one("tbody").find("tr"):
        start, length, kind = read_bar(row)
        effect = known[row.one("th").text].removal_effect  # of a loss: above 0 the source helps
        assert start == pytest.approx(150 if effect > 0 else 150 - length, abs=0.02)
        assert kind == "unclear" or kind == ("helps" if effect > 0 else "harms")
        if length > 10:
            scales.add(round(length / abs(effect), 0))
    assert len(scales) <= 2 and max(scales) - min(scales) <= 0.02 * max(scales)


def test_shares_and_the_rest_add_up_to_everything(news: News, admin: Browser) -> None:
    page = ask(admin, news)
    shares = [cells[3] for cells in read_rows(page).values()]
    rest = page.one("tfoot").one("td", class_="number").text
    assert sum(float(text.strip("<%")) for text in (*shares, rest)) == pytest.approx(100, abs=0.5)


def test_a_form_credits_once_however_often_it_is_sent(news: News, service: Service, admin: Browser) -> None:
    form = read_page(admin.get("/query").text)
    token = form.one("input", name="token").attributes["value"]
    first = ask(admin, news, credit="yes", token=token)
    again = ask(admin, news, credit="yes", token=token)
    notes = [page.one("div", class_="note good", role="status").text for page in (first, again)]
    assert notes[0].startswith("Credited. Entry") and "nothing was credited twice" in notes[1]
    rows = [re.findall(r"Entry (\d+)", note) for note in notes]
    assert rows[0] == rows[1]
    link = first.one("div", class_="note good", role="status").one("a").attributes["href"]
    assert [link.rpartition("/")[2]] == rows[0]
    assert read_rows(first) == read_rows(again)
    assert service.ledger is not None and verify(service.ledger, progress=False).holds


def test_a_form_that_is_sent_again_after_a_restart_shows_what_it_credited(
    news: News, service: Service, doors: Doors, tmp_path: Path
) -> None:
    first = ask(doors.browse("admin"), news, credit="yes", token="A" * 16)
    policy = replace(POLICY, version=2, rule="above_noise")
    restarted = Service(news.task, news.store, policy=policy, ledger=service.ledger)
    app = create_app(restarted.settings, restarted, doors.access)
    browser = Browser(app)
    assert browser.post("/login", data={"key": doors.secrets["admin"]}, csrf=False).status_code == 303
    again = ask(browser, news, credit="yes", token="A" * 16)
    assert "nothing was credited twice" in again.text and "version 1" in again.text and "version 2" not in again.text
    assert read_rows(again) == read_rows(first)
    assert "version 2" in ask(browser, news, credit="yes", token="B" * 16).text
    restarted.close()


@pytest.mark.parametrize("error", [CreditUnanswered(), CreditUnavailable("the database is away")])
def test_a_form_whose_credit_is_unknown_says_to_send_it_again(
    news: News, service: Service, admin: Browser, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    credit = service.credit

    async def fail(*given: Any, **named: Any) -> None:
        await credit(*given, **named)
        raise error

    monkeypatch.setattr(service, "credit", fail)
    form = {"values": " ".join(map(str, news.ask(0)["values"])), "credit": "yes", "token": "A" * 16}
    answer = admin.post("/query", data=form)
    assert answer.status_code == 503 and "reload this page" in read_page(answer.text).text
    again = admin.post("/query", data=form)
    assert again.status_code == 200 and "nothing was credited twice" in read_page(again.text).text


def test_another_query_from_the_same_form_is_another_credit(news: News, service: Service, admin: Browser) -> None:
    assert service.ledger is not None
    ask(admin, news, 2, credit="yes", token="B" * 16)
    before = len(service.ledger)
    for place in (0, 1, 1):
        ask(admin, news, place, credit="yes", token="A" * 16)
    assert len(service.ledger) == before + 2


def test_asking_again_from_the_answer_is_a_new_request(news: News, admin: Browser) -> None:
    page = ask(admin, news, token="A" * 16)
    assert page.one("input", name="token").attributes["value"] != "A" * 16


def test_nothing_is_credited_unless_asked_for(news: News, service: Service, admin: Browser) -> None:
    assert service.ledger is not None
    before = len(service.ledger)
    page = ask(admin, news)
    assert len(service.ledger) == before and "Nothing was credited for this query" in page.text


def test_an_auditor_asks_but_cannot_credit(news: News, doors: Doors) -> None:
    auditor = doors.browse("auditor")
    assert not read_page(auditor.get("/query").text).find("input", name="credit")
    values = " ".join(map(str, news.ask(0)["values"]))
    assert auditor.post("/query", data={"values": values}).status_code == 200
    refused = auditor.post("/query", data={"values": values, "credit": "yes"})
    assert refused.status_code == 403 and read_page(refused.text).one("h1").text == "Not with this key"


def test_a_publisher_asks_nothing(doors: Doors) -> None:
    publisher = doors.browse("publisher")
    assert publisher.get("/query").status_code == 403
    assert publisher.post("/query/documents", data={}).status_code == 403
    assert [link.text for link in read_page(publisher.get("/trust").text).one("nav").find("a")] == [
        "Credit",
        "Sources",
        "Trust",
    ]


def test_what_is_wrong_is_said_at_its_field_and_nothing_typed_is_lost(admin: Browser) -> None:
    typed = '1 2 three 4 </textarea><script>alert("x")</script>'
    answer = admin.post("/query", data={"values": typed, "label": "2"})
    page = read_page(answer.text)
    field = page.one("textarea", name="values")
    assert answer.status_code == 422 and field.full == "\n" + typed
    assert field.attributes["aria-invalid"] == "true"
    assert "“three”, in place 3, is not a number" in page.one("p", id=field.attributes["aria-describedby"]).text
    assert page.one("select").find("option", selected="")[0].attributes["value"] == "2"
    assert page.one("title").text.startswith("Error")


@pytest.mark.parametrize("values", ["", "1 2 3", "1 2 3 nan", "1 2 3 1e400", "1 2 3 4 5"])
def test_what_is_no_query_is_refused_by_the_form(admin: Browser, values: str) -> None:
    answer = admin.post("/query", data={"values": values})
    assert answer.status_code == 422 and re.search("list of 4 numbers|in place 4 of", answer.text)
    assert admin.post("/query", data={"values": "1 2 3 4", "label": "17"}).status_code == 422


def test_an_example_fills_the_form(news: News, admin: Browser) -> None:
    page = read_page(admin.get("/query?example=1").text)
    typed = [float(word) for word in page.one("textarea", name="values").full.split()]
    assert typed == pytest.approx(news.ask(1)["values"], rel=1e-5)
    filled = page.one("textarea", name="values").full
    for place in ("999999", "9" * 5000, "-1", "1.0", "٣", ""):
        answer = admin.get("/query", params={"example": place})
        assert answer.status_code == 200 and read_page(answer.text).one("textarea", name="values").full != filled


def test_a_form_that_is_none_is_refused(admin: Browser) -> None:
    token = admin.token
    for content in (f"csrf={token}&values=%FF%FE&values=", f"csrf={token}&values=1&values=2"):
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        answer = admin.post("/query", content=content.encode(), headers=kind, csrf=False)
        assert answer.status_code == 400, answer.text
        read_page(answer.text)
    assert admin.post("/query", json={"csrf": token}, csrf=False).status_code == 415


@pytest.mark.parametrize(
    ("effect", "better", "right", "says"),
    [
        (0.5, "lower", True, "helps"),
        (-0.5, "lower", False, "harms"),
        (0.5, "higher", False, "harms"),
        (-0.5, "higher", True, "helps"),
        (0.5, None, True, "raised by its removal"),
        (-0.5, None, False, "lowered by its removal"),
    ],
)
def test_help_is_what_makes_the_measurement_better(effect: float, better: str | None, right: bool, says: str) -> None:
    kind, drawn, words = judge_effect(effect, True, better)
    assert ((drawn > 0) == right, words) == (True, says) and (kind == "helps") == right
    assert judge_effect(effect, False, better) == ("unclear", drawn, "not clear")
    assert judge_effect(effect, None, better)[2] == f"{says}, error unknown"


def test_hostile_names_are_shown_as_text(hostile: Browser) -> None:
    page = read_page(hostile.post("/query", data={"choice": "own", "values": "0 1 0.5 1", "label": "0"}).text)
    assert page.one("p", class_="big").text == CLASSES[0]
    rows = read_rows(page)
    for name in NAMES[:3]:
        assert any(shown.startswith(name) for shown in rows), name
    assert any("\\n" in shown and "\\u202e" in shown for shown in rows)
    for path in ("/query", "/trust", "/sources"):
        text = hostile.get(path).text
        assert ATTACK not in text
        read_page(text)


def test_a_picture_is_drawn_and_its_drawing_is_kept(hostile: Browser) -> None:
    form = read_page(hostile.get("/query").text)
    place = form.one("div", class_="drawing").attributes
    assert (place["data-width"], place["data-height"], place["data-white"]) == ("2", "2", "1.0")
    page = read_page(hostile.post("/query", data={"choice": "own", "values": "0 1 0.5 1"}).text)
    assert page.find("img")[0].attributes["src"].startswith("data:image/png;base64,")
    assert page.one("textarea", name="values").full == "\n0 1 0.5 1"
    refused = hostile.post("/query", data={"choice": "own", "values": "0 1 0.5 7"})
    assert refused.status_code == 422 and "is above 1" in refused.text


def test_without_ledger_or_validation_the_page_says_so(hostile: Browser) -> None:
    page = read_page(hostile.post("/query", data={"choice": "own", "values": "0 1 0.5 1"}).text)
    assert "Not validated" in page.text and "Share" not in page.text and not page.find("input", name="credit")
    says = {cells[2] for cells in read_rows(page).values()}
    assert says and says <= {"helps, error unknown", "harms, error unknown"}
    assert "Credit" not in [link.text for link in page.one("nav").find("a")]
    refused = hostile.post("/query", data={"choice": "own", "values": "0 1 0.5 1", "credit": "yes"})
    assert refused.status_code == 403


def test_help_that_is_clear_at_first_sight_and_not_credited_says_so(news: News, tmp_path: Path) -> None:
    policy = Policy("careful", question="this_run", rule="above_noise", level=0.9999)
    with make_ledger(tmp_path / "credit.db") as ledger:
        service = Service(news.task, news.store, policy=policy, ledger=ledger)
        answers = [asyncio.run(service.attribute([news.ask(place)])) for place in range(12)]
        service.close()
    rows = [row for answered in answers for row in describe_answer(answered, None)[1]]
    told = [row.says.endswith("less than needed") for row in rows]
    assert told == [row.kind == "helps" and row.share == 0 for row in rows]
    assert any(told) and any(row.says == "helps" for row in rows)
