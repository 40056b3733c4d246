"""Pages of errors say what happened and what to do, and nothing about the inside of the service."""

import pytest
from starlette.requests import Request

from imprint.serve.errors import ApiError
from imprint.serve.pages import render_error
from tests.serve.access.doors import Browser, Doors
from tests.serve.pages.reading import read_page


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 415, 418, 422, 429, 500, 503, 504])
def test_every_refusal_has_a_page(doors: Doors, status: int) -> None:
    scope = {"type": "http", "app": doors.app, "path": "/query", "headers": [], "query_string": b"", "method": "GET"}
    refusal = ApiError(
        status, "code", "<b>why</b>: run `imprint <x>`.", {"Retry-After": "7"} if status == 429 else None
    )
    answer = render_error(Request(scope), refusal)
    page = read_page(bytes(answer.body).decode())
    assert answer.status_code == status and "<b>why</b>: run imprint <x>." in page.one("main").text
    assert [each.text for each in page.find("code")] == ["imprint <x>"]
    if status == 429:
        assert answer.headers["Retry-After"] == "7" and "Try again in 7 s." in page.text


def test_what_is_not_there_keeps_the_navigation(admin: Browser) -> None:
    answer = admin.get("/nothing/<script>")
    page = read_page(answer.text)
    assert answer.status_code == 404 and "<script>alert" not in answer.text and page.one("nav").find("a")


def test_an_unforeseen_error_tells_nothing(admin: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("imprint.serve.pages.query.describe_answer", fail)
    answer = admin.post("/query", data={"values": "0 0 0 0"})
    assert answer.status_code == 500 and "secret" not in answer.text and "Traceback" not in answer.text
    assert read_page(answer.text).one("h1").text == "Something went wrong"


def test_static_files_last_and_other_versions_are_not_there(admin: Browser) -> None:
    page = read_page(admin.get("/query").text)
    for link in page.find("link"):
        answer = admin.get(link.attributes["href"])
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"]
    name = page.one("link", rel="stylesheet").attributes["href"].rpartition("/")[2]
    for path in (f"/static/000000000000/{name}", "/static/x/../query.py", "/static/%2e%2e/rendering.py", "/static/x/"):
        assert admin.get(path).status_code == 404
