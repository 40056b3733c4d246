"""Who gets in: keys in the API, sessions on pages and in the API; and CSRF tokens, without which nothing changes."""

from datetime import timedelta
from itertools import product

from imprint.serve.access.roles import ROLES
from tests.serve.access.doors import Browser, Clock, Doors

NO_KEYS: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer imprint_"},
    {"Authorization": f"Bearer imprint_{'A' * 43}"},
    {"Authorization": "Bearer imprint_" + "é" * 43},
    {"Authorization": "Basic cm9vdDpyb290"},
    {"Cookie": "imprint=" + "A" * 43},
    {"Cookie": "imprint=" + "A" * 43 + "; imprint=" + "B" * 43},
    {"Cookie": "imprint"},
    {"X-Api-Key": "imprint_" + "A" * 43},
]
QUERY = {"query": {"values": [0.1, 0.2, 0.3, 0.4], "label": 1}}


def test_without_a_valid_key_the_api_is_closed(doors: Doors) -> None:
    routes = (("GET", "/v1/sources"), ("GET", "/v1/nothing"), ("POST", "/v1/attributions"))
    for headers, (method, path) in product(NO_KEYS, routes):
        raw = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
        answer = doors.client.request(method, path, headers=raw, content=b"{")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "no_key"
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_whoever_has_a_key_that_expired_is_told_when(doors: Doors, clock: Clock) -> None:
    secret = doors.access.create("short", "admin", expires=clock.now + timedelta(days=2)).secret
    revoked = doors.access.create("gone", "admin", expires=clock.now + timedelta(days=2)).secret
    doors.access.revoke("gone")
    clock.turn(days=3)
    told = "this key expired on 2026-11-20 at 12:00 UTC"
    for key, expired in ((secret, True), (revoked, False), ("imprint_" + "A" * 43, False)):
        answer = doors.client.get("/v1/store", headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "no_key"
        assert (told in answer.text) == expired
        login = Browser(doors.app).post("/login", data={"key": key}, csrf=False)
        assert login.status_code == 401 and (told.replace("this", "This") in login.text) == expired


def test_a_key_of_each_role_opens_what_its_role_permits(doors: Doors) -> None:
    statuses = {
        role: doors.client.post("/v1/attributions", json=QUERY, headers=doors.bear(role)).status_code for role in ROLES
    }
    assert statuses == {"query": 200, "publisher": 403, "auditor": 200, "admin": 200}
    credited = {**QUERY, "credit": True}
    headers = {"Idempotency-Key": "one"}
    statuses = {
        role: doors.client.post("/v1/attributions", json=credited, headers=headers | doors.bear(role)).status_code
        for role in ROLES
    }
    assert statuses == {"query": 200, "publisher": 403, "auditor": 403, "admin": 200}


def test_whoever_may_not_ask_is_refused_before_anything_is_read(doors: Doors) -> None:
    kind = {"Content-Type": "application/json"}
    statuses = {
        role: doors.client.post("/v1/attributions", content=b"{", headers=kind | doors.bear(role)).status_code
        for role in ROLES
    }
    assert statuses == {"query": 400, "publisher": 403, "auditor": 400, "admin": 400}
    refused = doors.browse("admin").post("/v1/attributions", content=b"{", headers=kind, csrf=False)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "bad_csrf"


def test_a_wrong_key_is_not_rescued_by_a_session(doors: Doors) -> None:
    browser = doors.browse("admin")
    assert browser.get("/v1/sources").status_code == 200
    assert browser.get("/v1/sources", headers={"Authorization": f"Bearer imprint_{'A' * 43}"}).status_code == 401
    assert browser.get("/v1/sources", headers={"Authorization": "Basic eDp5"}).status_code == 401


def test_a_session_is_no_key_and_a_key_is_no_session(doors: Doors) -> None:
    browser = doors.browse("admin")
    token = browser.cookies["imprint"]
    for _ in range(2):  # the second time from memory
        assert browser.get("/keys").status_code == 200
        assert doors.client.get("/v1/store", headers={"Authorization": f"Bearer {token}"}).status_code == 401
        assert doors.client.get("/v1/store", headers=doors.bear("admin")).status_code == 200
        assert doors.client.get("/keys", headers={"Cookie": f"imprint={doors.secrets['admin']}"}).status_code == 303
    assert doors.client.get("/keys", headers=doors.bear("admin")).status_code == 303


def test_a_revoked_key_and_its_sessions_are_refused(doors: Doors) -> None:
    browser = doors.browse("auditor")
    assert browser.get("/v1/store").status_code == 200
    doors.access.revoke("audit")
    assert browser.get("/v1/store").status_code == 401
    assert browser.get("/keys").headers["Location"] == "/login?next=%2Fkeys"
    assert doors.client.get("/v1/store", headers=doors.bear("auditor")).status_code == 401


def test_a_session_that_changes_something_in_the_api_needs_its_csrf_token(doors: Doors) -> None:
    browser, other = doors.browse("query"), doors.browse("query")
    for header in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": "wrong"}, {"X-CSRF-Token": other.token}):
        answer = browser.post("/v1/attributions", json=QUERY, headers=header, csrf=False)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "bad_csrf"
    headers = {"X-CSRF-Token": browser.token}
    assert browser.post("/v1/attributions", json=QUERY, headers=headers, csrf=False).status_code == 200


def test_a_form_needs_the_csrf_token_of_its_own_session(doors: Doors) -> None:
    browser, other = doors.browse("admin"), doors.browse("admin")
    form = {"name": "new", "role": "query", "days": ""}
    for token in ({}, {"csrf": ""}, {"csrf": "wrong"}, {"csrf": other.token}, {"csrf": browser.token + "A"}):
        answer = browser.post("/keys", data={**form, **token}, csrf=False)
        assert answer.status_code == 403 and "bad_csrf" in answer.text
    twice = f"name=new&role=query&csrf=wrong&csrf={browser.token}"
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    assert browser.post("/keys", content=twice, headers=headers, csrf=False).status_code == 400
    assert browser.post("/logout", csrf=False, data={"csrf": "wrong"}).status_code == 403
    assert browser.post("/keys", json={**form, "csrf": browser.token}, csrf=False).status_code == 415
    assert [key.name for key in doors.access.list()] == ["app", "audit", "press", "root"]
    assert browser.post("/keys", data=form).status_code == 200


def test_a_page_sends_whoever_is_not_logged_in_to_the_login_and_back(doors: Doors) -> None:
    answer = doors.client.get("/keys?a=b%26c")
    assert answer.status_code == 303
    assert answer.headers["Location"] == "/login?next=%2Fkeys%3Fa%3Db%2526c"
    browser = Browser(doors.app)
    page = browser.get(answer.headers["Location"])
    assert 'name="next" value="/keys?a=b%26c"' in page.text
    done = browser.post("/login", data={"key": doors.secrets["admin"], "next": "/keys?a=b%26c"}, csrf=False)
    assert done.status_code == 303 and done.headers["Location"] == "/keys?a=b%26c"
    assert doors.client.post("/keys", data={"name": "x"}).headers["Location"] == "/login"


def test_a_page_that_a_role_may_not_see_is_refused_by_name(doors: Doors) -> None:
    answer = doors.browse("publisher").get("/keys")
    assert answer.status_code == 403 and "publisher" in answer.text and "text/html" in answer.headers["Content-Type"]


def test_a_session_lasts_as_long_as_the_settings_say(doors: Doors, clock: Clock) -> None:
    browser = doors.browse("admin")
    clock.turn(hours=11.9)
    assert browser.get("/keys").status_code == 200
    clock.turn(hours=0.2)
    assert browser.get("/keys").status_code == 303
