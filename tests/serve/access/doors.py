"""An application with a key of each role, and a clock to turn."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any

from fastapi import FastAPI
from httpx2 import Response
from starlette.testclient import TestClient

from imprint.serve.access import Access
from imprint.serve.access.roles import Role

ADDRESS = "http://127.0.0.1"
KEYS: dict[Role, str] = {"query": "app", "publisher": "press", "auditor": "audit", "admin": "root"}


class Clock:
    """Says what time it is, and stands still until it is turned."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 18, 12, tzinfo=UTC)

    def __call__(self) -> float:
        return self.now.timestamp()

    def turn(self, **span: float) -> None:
        self.now += timedelta(**span)


class Doors:
    """An application, a client that talks to it, and the secrets of its keys by role."""

    def __init__(self, app: FastAPI, client: TestClient, access: Access) -> None:
        self.app, self.client, self.access = app, client, access
        self.secrets = {role: self.make(role, name) for role, name in KEYS.items()}

    def make(self, role: Role, name: str) -> str:
        sources = ["publisher-0"] if role == "publisher" else []
        return self.access.create(name, role, sources=sources).secret

    def bear(self, role: Role) -> dict[str, str]:
        """Return the header with the key of a role."""
        return {"Authorization": f"Bearer {self.secrets[role]}"}

    def browse(self, role: Role) -> "Browser":
        """Log in as a role, in a browser of its own."""
        browser = Browser(self.app)
        answer = browser.post("/login", data={"key": self.secrets[role]}, csrf=False)
        assert answer.status_code == 303, answer.text
        return browser


class Browser(TestClient):
    """Keeps cookies, follows no redirect by itself, and sends the CSRF token of the last page with each form."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(app, base_url=ADDRESS, follow_redirects=False)

    @property
    def token(self) -> str:
        """The CSRF token that pages of this session carry."""
        found = re.search(r'name="csrf" value="([^"]*)"', self.get("/nowhere").text)
        assert found is not None
        return found[1]

    def post(self, url: Any, *, csrf: bool = True, **more: Any) -> Response:
        if csrf:
            more["data"] = {**more.get("data", {}), "csrf": self.token}
        return super().post(url, **more)
