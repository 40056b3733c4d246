"""A service whose ledger is filled by hand, and clients of it with keys of each role."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient

from imprint.credit import Ledger
from imprint.serve.access import Access
from imprint.serve.access.cookies import name_cookie
from imprint.serve.access.roles import Role
from imprint.serve.app import create_app
from imprint.serve.credit import CreditDesk
from imprint.serve.service import Service
from imprint.serve.settings import Settings
from tests.serve.news import News


@dataclass
class Bureau:
    """A service over a ledger, whose lifespan does not run: nothing happens but by requests."""

    app: FastAPI
    ledger: Ledger
    access: Access
    settings: Settings

    @property
    def desk(self) -> CreditDesk:
        found: CreditDesk = self.app.state.credit
        return found

    def verify(self) -> None:
        """Verify the ledger, and wait for the end."""
        self.desk.verifier.start()
        self.desk.verifier.wait()

    def client(self, role: Role, sources: tuple[str, ...] = ()) -> TestClient:
        """Return a client with a new key."""
        name = f"{role}-{len(self.access.list())}"
        key = self.access.create(name, role, sources=sources)
        headers = {"Authorization": f"Bearer {key.secret}"}
        return TestClient(self.app, base_url="http://127.0.0.1", headers=headers)

    def browse(self, role: Role, sources: tuple[str, ...] = ()) -> TestClient:
        """Return a client that is logged in, as a browser is."""
        name = f"{role}-{len(self.access.list())}"
        key = self.access.create(name, role, sources=sources)
        client = TestClient(self.app, base_url="http://127.0.0.1", follow_redirects=False)
        token = self.access.open_session(key.secret, 3600)
        assert token is not None
        client.cookies.set(name_cookie(https=False), token)
        return client


@contextmanager
def open_bureau(news: News, ledger: Ledger, folder: Path, **settings: Any) -> Iterator[Bureau]:
    chosen = Settings(rate=1e6, **settings)
    service = Service(news.task, news.store, policy=None, ledger=ledger, settings=chosen)
    access = Access(str(folder / "access.db"))
    bureau = Bureau(create_app(chosen, service, access), ledger, access, chosen)
    yield bureau
    bureau.desk.close()
    service.close()
    access.close()


def get(client: TestClient, path: str, status: int = 200, **query: Any) -> Any:
    answer = client.get(f"/v1/credit/{path}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()
