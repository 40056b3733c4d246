"""Logging in and out: cookies that scripts and other sites cannot use, links that work once, and no open redirects."""

import re

import pytest

from imprint.serve import create_app
from imprint.serve.pages import login
from imprint.serve.pages.login import choose_destination
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.access.doors import ADDRESS, Browser, Doors


def log_in(browser: Browser, key: str, **more: str) -> tuple[int, str]:
    answer = browser.post("/login", data={"key": key, **more}, csrf=False)
    return answer.status_code, answer.headers.get("Location", answer.text)


def test_the_cookie_is_out_of_reach_of_scripts_and_of_other_sites(doors: Doors) -> None:
    answer = Browser(doors.app).post("/login", data={"key": doors.secrets["query"]}, csrf=False)
    name, _, rest = answer.headers["Set-Cookie"].partition("=")
    assert name == "imprint" and re.match(r"[A-Za-z0-9_-]{43};", rest)
    attributes = {part.strip().lower() for part in rest.split(";")[1:]}
    assert attributes == {"httponly", "samesite=strict", "path=/", "max-age=43200"}


def test_over_https_the_cookie_stays_on_this_host(service: Service, doors: Doors) -> None:
    app = create_app(Settings(metrics="", https=True, session_hours=1), service, doors.access)
    browser = Browser(app)
    browser.base_url = "https://127.0.0.1"
    answer = browser.post("/login", data={"key": doors.secrets["query"]}, csrf=False)
    name, _, rest = answer.headers["Set-Cookie"].partition("=")
    attributes = {part.strip().lower() for part in rest.split(";")[1:]}
    assert name == "__Host-imprint"
    assert attributes == {"httponly", "samesite=strict", "path=/", "max-age=3600", "secure"}
    assert browser.get("/v1/store").status_code == 200
    plain = {"Cookie": f"imprint={rest.split(';')[0]}"}
    assert Browser(app).get("/v1/store", headers=plain).status_code == 401


def test_every_login_makes_a_new_session_and_ends_the_one_before(doors: Doors) -> None:
    browser = doors.browse("query")
    first = browser.cookies["imprint"]
    assert log_in(browser, doors.secrets["admin"])[0] == 303
    assert browser.cookies["imprint"] != first
    assert doors.client.get("/v1/store", headers={"Cookie": f"imprint={first}"}).status_code == 401
    assert browser.get("/keys").status_code == 200


def test_a_session_that_somebody_planted_is_not_taken_over(doors: Doors) -> None:
    planted = "A" * 43
    browser = Browser(doors.app)
    browser.cookies.set("imprint", planted, domain="127.0.0.1")
    answer = browser.post("/login", data={"key": doors.secrets["query"]}, csrf=False)
    assert planted not in answer.headers["Set-Cookie"]
    assert doors.client.get("/v1/store", headers={"Cookie": f"imprint={planted}"}).status_code == 401


def test_a_failed_login_says_nothing_about_why(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login, "_BURST", 100)
    doors.access.revoke("audit")
    browser = Browser(doors.app)
    revoked = log_in(browser, doors.secrets["auditor"])
    assert revoked[0] == 401 and doors.secrets["auditor"] not in revoked[1]
    for key in ("", "x", f"imprint_{'A' * 43}", "imprint_" + "é" * 43, "<script>", "' OR 1=1 --", "\0"):
        assert log_in(browser, key) == revoked and "imprint" not in browser.cookies


def test_failed_logins_are_slowed_down_by_address(doors: Doors) -> None:
    browser = Browser(doors.app)
    statuses = [log_in(browser, "wrong")[0] for _ in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    answer = browser.post("/login", data={"key": doors.secrets["query"]}, csrf=False)
    assert answer.status_code == 429 and 1 <= int(answer.headers["Retry-After"]) <= 6
    assert browser.post(f"/login/{'A' * 43}", csrf=False).status_code == 429


def test_a_login_from_another_site_is_refused(doors: Doors) -> None:
    form = {"key": doors.secrets["query"]}
    for site in ("cross-site", "same-site"):
        browser = Browser(doors.app)
        answer = browser.post("/login", data=form, headers={"Sec-Fetch-Site": site}, csrf=False)
        assert answer.status_code == 403 and "imprint" not in browser.cookies
    assert Browser(doors.app).post(
        "/login", data=form, headers={"Sec-Fetch-Site": "same-origin"}, csrf=False
    ).status_code == 303  # fmt: skip


@pytest.mark.parametrize("path", ["/login", "/login/LINK"])
def test_a_browser_that_only_says_the_origin_logs_in_from_the_login_page_alone(doors: Doors, path: str) -> None:
    path, form = path.replace("LINK", doors.access.make_link("app")), {"key": doors.secrets["query"]}
    browser = Browser(doors.app)
    assert browser.get(path).headers["Referrer-Policy"] == "strict-origin"  # else the origin of its form would be null
    for origin in ("http://evil.example", "null", ADDRESS + ".evil.example", "http://evil.example/127.0.0.1", "", "é"):
        answer = browser.post(path, data=form, headers={"Origin": origin.encode("latin-1")}, csrf=False)
        assert answer.status_code == 403 and "imprint" not in browser.cookies
    assert browser.post(path, data=form, headers={"Origin": ADDRESS + ":8080"}, csrf=False).status_code == 303


def test_logging_out_ends_the_session_for_good(doors: Doors) -> None:
    browser = doors.browse("admin")
    token = browser.cookies["imprint"]
    answer = browser.post("/logout")
    assert answer.status_code == 303 and answer.headers["Location"] == "/login" and "imprint" not in browser.cookies
    assert doors.client.get("/v1/store", headers={"Cookie": f"imprint={token}"}).status_code == 401
    assert browser.post("/logout", csrf=False, data={}).headers["Location"] == "/login"


def test_a_link_is_not_used_up_by_looking_at_it(doors: Doors) -> None:
    link = f"/login/{doors.access.make_link('app')}"
    browser = Browser(doors.app)
    for _ in range(3):
        page = browser.get(link)
        assert page.status_code == 200 and f'action="{link}"' in page.text and "imprint" not in browser.cookies
    assert browser.post(link, csrf=False).status_code == 303
    assert browser.get("/v1/store").status_code == 200
    again = Browser(doors.app).post(link, csrf=False)
    assert again.status_code == 401 and "does not work any more" in again.text


def test_a_made_up_link_shows_the_same_page_and_opens_nothing(doors: Doors) -> None:
    real, made_up = doors.access.make_link("app"), "A" * 43
    shown = [doors.client.get(f"/login/{token}").text.replace(token, "") for token in (real, made_up)]
    assert shown[0] == shown[1]
    assert doors.client.post(f"/login/{made_up}").status_code == 401
    page = doors.client.get("/login/%22%3E%3Cscript%3Ealert(1)%3C/script%3E")
    assert "<script>alert" not in page.text


@pytest.mark.parametrize(
    "wanted",
    [
        "//evil.example",
        "///evil.example",
        "/\\evil.example",
        "\\\\evil.example",
        "https://evil.example",
        "https:evil.example",
        "javascript:alert(1)",
        "/\t/evil.example",
        "\t//evil.example",
        "/\n/evil.example",
        "/%2F/evil.example/%0d%0aSet-Cookie:%20x=y\r\nSet-Cookie: x=y",
        "/%2fevil.example",
        "/%5Cevil.example",
        "/ /evil.example",
        " /keys",
        "/é",
        "@evil.example",
        "evil.example",
        "/login",
        "/logout",
        "/login/next",
        "/%6Cogin",
        "/" + "a" * 5000,
        "/\x00",
        "",
    ],
)
def test_a_login_leads_nowhere_else(wanted: str) -> None:
    assert choose_destination(wanted) == "/"


@pytest.mark.parametrize(
    "wanted", ["/", "/credit", "/sources/a%2Fb", "/credit?next=https://x.example/&a=%20", "/query?a=[1]"]
)
def test_a_login_leads_to_any_page_here(wanted: str) -> None:
    assert choose_destination(wanted) == wanted


def test_whoever_is_logged_in_is_not_asked_again(doors: Doors) -> None:
    browser = doors.browse("admin")
    assert browser.get("/login?next=/keys").headers["Location"] == "/keys"
    assert browser.get("/login?next=//evil.example").headers["Location"] == "/"
