"""The page on which an administrator makes and revokes keys."""

import re

from tests.serve.access.doors import Browser, Doors

MISTAKES: list[tuple[dict[str, str], str]] = [
    ({"name": "app", "role": "query"}, "There is, or was, a key called &#39;app&#39;"),
    ({"name": "<b>", "role": "query"}, "The name of a key has 1 to 64 letters"),
    ({"name": "x", "role": "root"}, "Choose a role"),
    ({"name": "x"}, "Choose a role"),
    ({"name": "x", "role": "publisher"}, "A publisher needs the ids of its sources"),
    ({"name": "x", "role": "publisher", "sources": "publisher-99"}, "The store has no source"),
    ({"name": "x", "role": "query", "sources": "publisher-1"}, "Only publishers have sources"),
    ({"name": "x", "role": "query", "days": "-1"}, "A key is valid for 1 to 3650 days"),
    ({"name": "x", "role": "query", "days": "٣"}, "A key is valid for 1 to 3650 days"),
    ({"name": "x", "role": "query", "days": "9999"}, "A key is valid for 1 to 3650 days"),
]


def test_a_key_that_is_made_there_is_shown_once_and_works(doors: Doors) -> None:
    browser = doors.browse("admin")
    answer = browser.post(
        "/keys",
        data={"name": "times", "role": "publisher", "sources": "publisher-1\r\n publisher-2 \r\n", "days": "30"},
    )
    (secret,) = re.findall(r"imprint_[A-Za-z0-9_-]{43}", answer.text)
    assert answer.headers["Cache-Control"] == "no-store"
    assert secret not in browser.get("/keys").text
    identity = doors.access.identify_key(secret)
    assert identity is not None and identity.sources == ("publisher-1", "publisher-2")
    made = next(key for key in doors.access.list() if key.name == "times")
    assert made.expires is not None and made.prefix in browser.get("/keys").text


def test_a_form_that_makes_no_sense_comes_back_with_the_reason(doors: Doors) -> None:
    browser = doors.browse("admin")
    for form, reason in MISTAKES:
        answer = browser.post("/keys", data=form)
        assert answer.status_code == 422 and reason in answer.text and "<b>" not in answer.text
    assert [key.name for key in doors.access.list()] == ["app", "audit", "press", "root"]


def test_a_key_is_revoked_there_and_its_sessions_end(doors: Doors) -> None:
    browser, other = doors.browse("admin"), doors.browse("auditor")
    answer = browser.post("/keys/audit/revoke")
    assert answer.status_code == 303 and other.get("/v1/store").status_code == 401
    assert "revoked" in browser.get("/keys").text
    assert browser.post("/keys/nobody/revoke").status_code == 404


def test_nobody_revokes_the_key_they_are_logged_in_with(doors: Doors) -> None:
    browser = doors.browse("admin")
    assert browser.post("/keys/root/revoke").status_code == 409
    assert browser.get("/keys").status_code == 200


def test_only_administrators_see_keys(doors: Doors) -> None:
    for role in ("query", "publisher", "auditor"):
        browser: Browser = doors.browse(role)
        assert browser.get("/keys").status_code == 403
        assert browser.post("/keys", data={"name": "x", "role": "admin"}).status_code == 403
        assert browser.post("/keys/app/revoke").status_code == 403
