"""Which role opens which route: of all routes there are, so that a new one cannot be forgotten."""

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from httpx2 import Response
from starlette.testclient import TestClient

from imprint.serve.access import Access
from imprint.serve.access.roles import ROLES, Role
from imprint.serve.app import create_app
from imprint.serve.settings import Settings
from tests.serve.access.doors import ADDRESS, Doors
from tests.serve.news import News, make_ledger

ALL: frozenset[Role] = frozenset(ROLES)
OPEN = None  # to everybody, without a key
ASKERS: frozenset[Role] = frozenset({"query", "auditor", "admin"})
READERS: frozenset[Role] = frozenset({"publisher", "auditor", "admin"})
VERIFIERS: frozenset[Role] = frozenset({"auditor", "admin"})
ADMINS: frozenset[Role] = frozenset({"admin"})
ROUTES: dict[str, frozenset[Role] | None] = {
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /v1/openapi.json": OPEN,
    "HEAD /v1/openapi.json": OPEN,
    "POST /v1/attributions": ASKERS,
    "GET /v1/sources": ALL,
    "GET /v1/store": ALL,
    "GET /v1/credit/entries": READERS,
    "GET /v1/credit/entries/{sequence}": READERS,
    "GET /v1/credit/totals": READERS,
    "GET /v1/credit/comparison": VERIFIERS,
    "GET /v1/credit/sources/{source:path}": READERS,
    "GET /v1/credit/verification": READERS,
    "POST /v1/credit/verification": VERIFIERS,
    "GET /v1/credit/heads": READERS,
    "GET /v1/credit/periods": READERS,
    "GET /v1/credit/statements/{period}/{name:path}": READERS,
    "GET /v1/credit/export": READERS,
    "GET /static/{digest}/{name}": OPEN,
    "GET /": ALL,
    "GET /query": ASKERS,
    "POST /query": ASKERS,
    "POST /query/documents": ASKERS,
    "GET /trust": READERS,
    "GET /credit": READERS,
    "POST /credit/verify": VERIFIERS,
    "GET /credit/entries/{sequence}": READERS,
    "GET /sources": ALL,
    "GET /sources/{source:path}": ALL,
    "GET /login": OPEN,
    "POST /login": OPEN,
    "GET /login/{token}": OPEN,
    "POST /login/{token}": OPEN,
    "POST /logout": ALL,
    "GET /keys": ADMINS,
    "POST /keys": ADMINS,
    "POST /keys/{name}/revoke": ADMINS,
}
VALUES = {"{sequence}": "0", "{source:path}": "publisher-0", "{period}": "2026-11", "{name:path}": "publisher-0.csv",
          "{name}": "nobody", "{digest}": "0", "{token}": "A" * 43}  # fmt: skip


@pytest.fixture(scope="module")
def doors(news: News, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """A service with a key of each role, for all tests here."""
    folder = tmp_path_factory.mktemp("doors")
    with make_ledger(folder / "credit.db") as ledger:
        access = Access(folder / "access.db")
        app = create_app(Settings(metrics="", rate=1e6), news.serve(ledger), access)
        with TestClient(app, base_url=ADDRESS, follow_redirects=False) as client:
            yield Doors(app, client, access)
        access.close()


def list_routes(app: FastAPI) -> list[str]:
    """List all routes as the table does."""
    return [
        f"{method} {route.path}" for route in iter_route_contexts(app.routes) for method in sorted(route.methods or ())
    ]


def locate(route: str) -> tuple[str, str]:
    method, _, path = route.partition(" ")
    for name, value in VALUES.items():
        path = path.replace(name, value)
    return method, path


def is_let_in(answer: Response) -> bool:
    sent_away = answer.status_code == 303 and answer.headers["Location"].startswith("/login")
    assert answer.status_code < 500
    return answer.status_code not in (401, 403) and not sent_away


def test_every_route_is_in_the_table_and_nothing_else(doors: Doors) -> None:
    assert sorted(list_routes(doors.app)) == sorted(ROUTES)


@pytest.mark.parametrize("route", [route for route, roles in ROUTES.items() if roles is not None])
def test_without_a_key_a_route_is_closed(doors: Doors, route: str) -> None:
    assert not is_let_in(doors.client.request(*locate(route)))
    made_up = {"Authorization": f"Bearer imprint_{'A' * 43}", "Cookie": f"imprint={'A' * 43}"}
    assert not is_let_in(doors.client.request(*locate(route), headers=made_up))


@pytest.mark.parametrize("route", [route for route in ROUTES if "/v1/" in route])
def test_a_key_opens_the_routes_of_its_role_alone(doors: Doors, route: str) -> None:
    opened = {role for role in ROLES if is_let_in(doors.client.request(*locate(route), headers=doors.bear(role)))}
    assert opened == (ROUTES[route] or ALL)


@pytest.mark.parametrize("role", ROLES)
def test_a_session_opens_the_routes_of_its_role_alone(doors: Doors, role: Role) -> None:
    browser = doors.browse(role)
    token, opened = browser.token, set()
    for route in ROUTES:
        method, path = locate(route)
        if path in ("/logout", "/login"):
            continue
        headers = {"X-CSRF-Token": token} if path.startswith("/v1/") else {}
        data = {"csrf": token} if method == "POST" and not path.startswith("/v1/") else None
        if is_let_in(browser.request(method, path, headers=headers, data=data)) and ROUTES[route] is not OPEN:
            opened.add(route)
    expected = {route for route, roles in ROUTES.items() if roles is not None and role in roles}
    assert opened == expected - {"POST /logout"}


@pytest.mark.parametrize("route", [route for route in ROUTES if route.startswith("POST") and ROUTES[route] is not OPEN])
def test_a_session_changes_nothing_without_its_csrf_token(doors: Doors, route: str) -> None:
    browser, other = doors.browse("admin"), doors.browse("admin")
    method, path = locate(route)
    for token in ("", other.token):
        form = None if path.startswith("/v1/") else {"csrf": token}
        answer = browser.request(method, path, headers={"X-CSRF-Token": token}, data=form)
        assert answer.status_code == 403 and "bad_csrf" in answer.text


def test_a_publisher_sees_its_own_sources_alone(doors: Doors) -> None:
    found = doors.client.get("/v1/sources", headers=doors.bear("publisher")).json()
    assert [source["id"] for source in found] == ["publisher-0"]
    assert len(doors.client.get("/v1/sources", headers=doors.bear("auditor")).json()) == 6


def test_no_path_leads_to_files(doors: Doors) -> None:
    for path in ("/../access.db", "/static/../../access.db", "/static/%2e%2e/access.db", "/static/0/..%2faccess.db"):
        assert doors.client.get(path).status_code in (400, 404)
