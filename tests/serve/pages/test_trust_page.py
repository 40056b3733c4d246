"""The page *Trust* says what was tested and what has changed since, and admits what it does not know."""

import re
from pathlib import Path

from imprint.attribution.noise import describe_chaos as describe_noise_of
from imprint.serve.pages.trust import describe_chaos
from imprint.serve.pages.wording import speak_of_documents
from imprint.serve.service import Service
from imprint.validation.record import read_validation
from tests.serve.access.doors import Browser, Doors
from tests.serve.news import News
from tests.serve.pages.conftest import open_doors
from tests.serve.pages.reading import Element, read_page


def read_figures(page: Element) -> dict[str, str]:
    """Return what the page says of each figure, by its name."""
    found: dict[str, str] = {}
    for each in page.find("dl"):
        names, texts = ([child.text for child in each.find(tag)] for tag in ("dt", "dd"))
        found |= dict(zip(names, texts, strict=True))
    return found


def test_the_figures_are_those_of_the_validation(news: News, admin: Browser) -> None:
    validation = read_validation(news.store)
    assert validation is not None
    found, figures = validation.verdict.figures, read_figures(read_page(admin.get("/trust").text))
    assert found.correlation is not None and found.slope is not None and found.slope_low is not None
    assert figures["Correlation of predicted and real effects"].startswith(f"{found.correlation:.2f}")
    assert figures["Real effect divided by predicted"].startswith(
        f"{found.slope:.2f} (95% interval {found.slope_low:.2f}"
    )
    assert figures["Store"].startswith(news.store.sha256) and figures["Model"].startswith(news.store.model_sha256)


def test_what_is_unknown_is_called_unknown(admin: Browser) -> None:
    page = read_page(admin.get("/trust").text)
    figures = read_figures(page)
    assert figures["Queries that no source moves clearly"].startswith("unknown")
    assert figures["Noise floor"].startswith("unknown") and "Unknown: 0 different queries were answered" in page.text
    assert figures["Signed by"].startswith("not checked")


def test_drift_of_the_queries_is_said_and_drawn(news: News, tmp_path: Path) -> None:
    service = news.serve()
    doors = open_doors(service, tmp_path, [])
    browser = doors.browse("admin")
    for place in range(20):
        values = " ".join(map(str, news.ask(place)["values"]))
        assert browser.post("/query", data={"values": values, "label": str(int(news.labels[place]))}).status_code == 200
    page = read_page(browser.get("/trust").text)
    assert "No sign that the queries asked here differ" in page.text
    assert page.find("svg")[-1].one("title").text.startswith("Size of effects on a query")
    silent = read_figures(page)["Queries that no source moves clearly"]
    assert re.match(r"\d+% \(\d+ of 20 queries; 95% interval \d+% to \d+%\)", silent)
    assert "20 different queries asked here" in page.find("svg")[-1].text
    for place in range(60):
        values = f"0 0 0 {0.001 * place}"
        assert browser.post("/query", data={"values": values, "label": "1"}).status_code == 200
    assert "are not like those the store was validated on" in read_page(browser.get("/trust").text).text
    service.close()
    doors.access.close()


def test_a_store_that_was_never_tested_says_so(hostile: Browser) -> None:
    page = read_page(hostile.get("/trust").text)
    assert "Not validated" in page.text and not page.find("svg")
    assert "no record of the validated queries" in page.text or "Unknown" in page.text


def test_only_some_roles_see_it(doors: Doors) -> None:
    assert [doors.browse(role).get("/trust").status_code for role in ("query", "publisher", "auditor")] == [
        403,
        200,
        200,
    ]


def test_the_first_page_is_one_that_the_role_may_see(service: Service, doors: Doors) -> None:
    places = {
        role: doors.browse(role).get("/").headers["location"] for role in ("query", "publisher", "auditor", "admin")
    }
    assert places == {"query": "/query", "publisher": "/credit", "auditor": "/query", "admin": "/query"}


def test_a_run_with_some_chaos_is_called_neither_calm_nor_chaotic() -> None:
    """In the bands of docs/this-run.md."""
    words = {chaos: describe_chaos(chaos) for chaos in (0.1, 0.11, 0.3, 0.31)}
    assert words[0.1].startswith("This run is calm") and words[0.31].startswith("This run is chaotic")
    assert words[0.11] == words[0.3] == "Small effects drown in noise, larger ones of whole sources can be used."


def test_chaos_among_documents_is_said_to_be_that_of_documents() -> None:
    warning = describe_noise_of(noise=1.0, effect=0.1)
    assert warning is not None
    (spoken,) = speak_of_documents([warning])
    assert spoken.startswith("measured on single documents, this run is chaotic") and "source" not in spoken
