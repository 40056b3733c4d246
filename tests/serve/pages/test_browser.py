"""The pages work in a real browser: by mouse and by keyboard, wide and narrow, light and dark, and for everybody.

Pictures of all pages are kept in the folder that IMPRINT_SCREENSHOTS names.
"""

import csv
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from imprint.cli.commands.credit_options import read_policy
from imprint.credit import Ledger
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.demo import Demo, prepare
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.conftest import require
from tests.credit.insider import rewrite, run
from tests.serve.pages.browsing import CHROMIUM, NARROW, WIDE, Tab, choose_folder, open_tab, run_chromium, run_server
from tests.serve.pages.conftest import open_doors

pytestmark = pytest.mark.system
ASK = "Show what moved the answer"
_NAME = """() => {
  const focused = document.activeElement;
  return (focused.labels?.[0] ?? focused).innerText || focused.getAttribute("aria-label") || "";
}"""


@contextmanager
def serve_demo(demo: Demo) -> Iterator[tuple[str, Access, Ledger]]:
    """Serve a demo; yields its address, its keys and its ledger."""
    assert demo.settings.ledger is not None and demo.settings.policy is not None
    access, policy = Access(demo.settings.access_place), read_policy(demo.settings.policy)
    with Ledger(demo.settings.ledger) as ledger:
        service = Service(demo.task, demo.store, policy=policy, ledger=ledger, settings=demo.settings)
        with run_server(create_app(demo.settings, service, access, examples=demo.examples)) as where:
            yield where, access, ledger
    access.close()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    require("chromium", CHROMIUM.is_file(), f"there is no {CHROMIUM}: apt-get install chromium")
    return prepare(tmp_path_factory.mktemp("served") / "demo", Settings(metrics="", rate=1e6))


@pytest.fixture(scope="module")
def access(served: tuple[str, Access, Ledger]) -> Access:
    return served[1]


@pytest.fixture(scope="module")
def served(demo: Demo) -> Iterator[tuple[str, Access, Ledger]]:
    with serve_demo(demo) as found:
        yield found


@pytest.fixture(scope="module")
def address(served: tuple[str, Access, Ledger]) -> str:
    return served[0]


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    """Chromium, started last: its event loop is this thread's until it ends."""
    with run_chromium() as started:
        yield started


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return choose_folder(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(
    params=[("light", WIDE), ("dark", NARROW), ("light", NARROW), ("dark", WIDE)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def tab(
    request: pytest.FixtureRequest, browser: Browser, address: str, access: Access, pictures: Path
) -> Iterator[Tab]:
    """A tab in which the demo's admin is logged in by a link."""
    scheme, width = request.param
    made = open_tab(browser, address, pictures, scheme=scheme, width=width)
    made.open(f"/login/{access.make_link('demo')}")
    made.page.get_by_role("button", name="Log in").click()
    expect(made.page.get_by_role("heading", level=1)).to_have_text("Query")
    yield made
    assert made.complaints == []
    made.page.context.close()


wide = pytest.mark.parametrize("tab", [("light", WIDE)], indirect=True, ids=["wide"])


def ask(tab: Tab, caption: str, *, credit: bool = False) -> None:
    tab.open("/query")
    tab.page.get_by_label(caption, exact=True).check()
    if credit:
        tab.page.get_by_label("Credit this query").check()
    tab.page.get_by_role("button", name=ASK).click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("What moved this answer")


def check(tab: Tab, name: str) -> None:
    """Check a page for what keeps people out, and keep a picture of it."""
    from axe_playwright_python.sync_playwright import Axe

    tab.keep(name)
    found = Axe().run(tab.page).response["violations"]
    assert not found, [(each["id"], each["help"], [node["html"][:200] for node in each["nodes"][:3]]) for each in found]
    assert tab.fits(), f"{name} is wider than the window"


def test_every_page_is_accessible_and_fits(tab: Tab, demo: Demo) -> None:
    check(tab, "query")
    tab.page.get_by_text("As numbers").click()
    check(tab, "query-numbers")
    ask(tab, "a 3", credit=True)
    check(tab, "answer")
    tab.page.get_by_role("button", name=re.compile("^Documents inside")).first.click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(re.compile("^Inside "))
    check(tab, "documents")
    for path in ("/trust", "/credit", "/sources", f"/sources/{demo.store.source_ids[0]}", "/keys"):
        tab.open(path)
        check(tab, "-".join(path.split("/")[1:2]) + "-one" * (path.count("/") > 1))
    tab.page.context.clear_cookies()
    tab.open("/login")
    check(tab, "login")
    assert tab.complaints == []
    tab.open("/nothing")
    check(tab, "nothing")
    tab.complaints.clear()  # the browser notes that /nothing is not there


@wide
def test_trust_names_the_key_that_signed_the_store(tab: Tab, demo: Demo) -> None:
    assert demo.store.signed is not None
    tab.open("/trust")
    expect(tab.page.get_by_text(demo.store.signed.key)).to_be_visible()


@wide
def test_bars_help_on_the_right_and_harm_on_the_left(tab: Tab) -> None:
    ask(tab, "a 3")
    rows = tab.page.locator("tbody tr").all()
    assert len(rows) == 12
    seen = set()
    for row in rows:
        says, number = row.locator("td").nth(2).inner_text(), row.locator("td").nth(1).inner_text()
        middle = row.locator(".axis").bounding_box()
        bar = row.locator("svg rect").bounding_box()
        assert middle is not None and bar is not None
        right = bar["x"] + bar["width"] / 2 > middle["x"]
        assert number.startswith("+") == right
        if says in ("helps", "harms"):
            assert (says == "helps") == right
            seen.add(says)
    assert "helps" in seen


def verify_log(page: Page) -> None:
    """Press the button, once the verification with which a service starts has ended."""
    button = page.get_by_role("button", name="Verify the log now")
    for _ in range(200):
        if button.is_enabled():
            break
        page.reload()
    button.click()


@wide
def test_from_a_query_to_its_row_its_proof_and_the_export(tab: Tab, tmp_path: Path) -> None:
    page = tab.page
    ask(tab, "a 7", credit=True)
    note = page.get_by_role("status")
    expect(note).to_contain_text("Credited")
    row, query = re.findall(r"Entry (\d+) of the log, query ([0-9a-f-]+)", note.inner_text())[0]
    page.reload()
    expect(page.get_by_role("status")).to_contain_text("nothing was credited twice")
    page.get_by_role("link", name=f"Entry {row} of the log").click()
    expect(page.locator("main")).to_contain_text(query)
    tab.keep("row")
    tab.open("/credit")
    expect(page.locator("main")).to_contain_text(row)
    verify_log(page)
    tab.open("/credit")
    expect(page.locator("main")).to_contain_text(re.compile("verifie|holds", re.I), timeout=30_000)
    with page.expect_download() as download:
        page.get_by_role("link", name=re.compile("CSV")).first.click()
    download.value.save_as(tmp_path / "credit.csv")
    with (tmp_path / "credit.csv").open(encoding="utf-8", newline="") as file:
        assert any(query in line for line in csv.reader(file))


def test_the_pages_lead_to_a_tampered_row(demo: Demo, browser: Browser, pictures: Path, tmp_path: Path) -> None:
    assert demo.settings.ledger is not None
    shutil.copytree(Path(demo.settings.ledger).parent, tmp_path / "copy")
    copy, tampered = prepare(tmp_path / "copy", demo.settings), 7
    with serve_demo(copy) as (where, access, ledger):
        tab = open_tab(browser, where, pictures)
        tab.open(f"/login/{access.make_link('demo')}")
        page = tab.page
        page.get_by_role("button", name="Log in").click()
        run(ledger, rewrite(tampered, lambda about: about.update(pot=999_999)))
        page.get_by_role("link", name="Credit").click()
        verify_log(page)
        link = page.get_by_role("alert").locator("xpath=..").get_by_role("link", name=f"Entry {tampered}")
        for _ in range(200):  # until it is verified
            if link.count():
                break
            page.reload()
        check(tab, "tampered")
        link.first.click()
        expect(page.get_by_role("heading", level=1)).to_contain_text(f"Entry {tampered}")
        expect(page.get_by_role("alert")).to_be_visible()
        check(tab, "tampered-row")
        assert tab.complaints == []
        page.context.close()


@wide
def test_a_digit_is_drawn_with_the_pointer_and_with_the_keyboard(tab: Tab) -> None:
    page = tab.page
    grid = page.get_by_role("grid")
    cells = grid.get_by_role("gridcell")
    cells.nth(3).scroll_into_view_if_needed()
    first, last = cells.nth(3).bounding_box(), cells.nth(59).bounding_box()
    assert first is not None and last is not None
    page.mouse.move(first["x"] + 10, first["y"] + 10)
    page.mouse.down()
    page.mouse.move(last["x"] + 10, last["y"] + 10, steps=30)
    page.mouse.up()
    expect(page.get_by_label("Ask about my drawing")).to_be_checked()
    cells.nth(0).focus()
    for key in ("ArrowRight", "ArrowDown", " "):
        page.keyboard.press(key)
    expect(cells.nth(9)).to_be_focused()
    expect(cells.nth(9)).to_have_attribute("aria-label", "row 2, column 2: 100% white")
    tab.keep("drawing")
    page.get_by_role("button", name=ASK).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("What moved this answer")
    drawn = [float(word) for word in page.locator("#values").input_value().split()]
    assert [drawn[place] for place in (3, 11, 27, 59, 9)] == [16.0] * 5 and drawn[63] == 0.0


@pytest.mark.parametrize(("scheme", "width"), [("light", WIDE), ("dark", NARROW)])
def test_words_are_readable_in_every_shade(
    written: Service, browser: Browser, pictures: Path, tmp_path: Path, scheme: str, width: int
) -> None:
    doors = open_doors(written, tmp_path, [({"prompt": "the old", "completion": " ship sails over the sea"}, "a ship")])
    with run_server(doors.app) as where:
        tab = open_tab(browser, where, pictures, scheme=scheme, width=width)
        tab.open(f"/login/{doors.access.make_link('audit')}")
        tab.page.get_by_role("button", name="Log in").click()
        tab.page.get_by_role("link", name="a ship").click()
        check(tab, "completion")
        tab.page.get_by_role("button", name=ASK).click()
        expect(tab.page.get_by_role("heading", name="Words")).to_be_visible()
        for summary in tab.page.locator("summary:has(h3)").all()[1:]:
            summary.click()
        check(tab, "words")
        assert tab.complaints == []
        tab.page.context.close()
    doors.access.close()


def test_somebody_without_a_mouse_logs_in_and_asks(
    browser: Browser, address: str, access: Access, pictures: Path
) -> None:
    tab = open_tab(browser, address, pictures)
    page, secret = tab.page, access.create("keyboard", "auditor").secret
    tab.open("/query")

    def walk(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(_NAME)
            if name in focused:
                return
        raise AssertionError(f"{name} is not reached with Tab")

    walk("Skip to the content")
    walk("Your key")
    page.keyboard.type(secret)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Query")
    walk("Skip to the content")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    walk("a 0")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_label("a 1", exact=True)).to_be_checked()
    walk(ASK)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("What moved this answer")
    walk("Documents")
    assert tab.complaints == []
    page.context.close()


def test_everything_works_without_scripts(browser: Browser, address: str, access: Access, pictures: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    tab = Tab(context.new_page(), address, "plain", pictures)
    tab.open(f"/login/{access.make_link('demo')}")
    tab.page.get_by_role("button", name="Log in").click()
    tab.page.get_by_text("As numbers").click()
    tab.page.get_by_label("Ask about my drawing").check()
    tab.page.get_by_label("Pixels").fill(" ".join(["0", "16"] * 32))
    tab.page.get_by_role("button", name=ASK).click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("What moved this answer")
    tab.page.get_by_role("button", name="Log out").click()
    expect(tab.page.get_by_label("Your key")).to_be_visible()
    context.close()
