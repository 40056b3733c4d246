"""A PostgreSQL that falls silent holds nobody for good: no request, and no process at its end."""

import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event

from imprint.credit import tables
from imprint.errors import AccessError, ServiceError
from imprint.serve.access import Access
from imprint.serve.access import tables as access_tables
from imprint.serve.client import Client
from tests.serve.news import News
from tests.serve.processes import Served, make_site

PATIENCE = 60.0  # seconds, after which a test fails instead of waiting


class Link:
    """A way to the server of a folder, through a socket in another one, on which nothing passes once it is cut."""

    def __init__(self, server: Path, folder: Path) -> None:
        self.folder = folder
        self._server, self._cut = server / ".s.PGSQL.5432", threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(folder / ".s.PGSQL.5432"))
        self._listening.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                there = socket.socket(socket.AF_UNIX)
                there.connect(str(self._server))
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65_536):
                if not self._cut.is_set():
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def link(server: Any) -> Iterator[Link]:
    with tempfile.TemporaryDirectory(prefix="imprint-link-") as folder:  # paths of sockets must be short
        made = Link(server.folder, Path(folder))
        yield made
        made.close()


@pytest.mark.system
def test_a_process_whose_database_falls_silent_answers_and_ends_when_it_is_told_to(
    news: News, tmp_path: Path, server: Any, link: Link
) -> None:
    site = make_site(news, tmp_path, server.make_database().replace(str(server.folder), str(link.folder)))
    (site.folder / "serve.toml").write_text("deadline = 1\n")
    limits = {"service._FINDING_SECONDS": 0.2, "running._FINISHING": 1, "running._CLOSING": 1}
    patched = {f"imprint.serve.{name}": seconds for name, seconds in limits.items()}
    with Served(site, more=("--config", str(site.folder / "serve.toml")), patched=patched) as served:
        client = Client(served.url, site.secret, patience=0.01)
        client.attribute(news.ask(0), credit=True)
        link.cut()
        with pytest.raises(ServiceError) as refused:
            client.attribute(news.ask(1), credit=True)
        assert refused.value.status == 503
        assert served.stop() == 1
        lines = [json.loads(line) for line in served.log.read_text(encoding="utf-8").splitlines()]
    assert lines[-1]["event"].startswith("ending with something unfinished, 3 s after")


@pytest.mark.system
def test_a_look_at_a_key_that_is_locked_is_given_up(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_tables, "_WAIT", 1)
    place = server.make_database()
    access = Access(place)
    secret, found = access.create("app", "query").secret, list[Any]()

    def look() -> None:
        with pytest.raises(AccessError, match="statement timeout"):
            found.append(access.identify_key(secret))
        found.append("refused")

    locking = create_engine(place.replace("postgresql:", "postgresql+psycopg:"))
    with locking.connect() as connection:
        connection.exec_driver_sql("LOCK TABLE access_keys IN ACCESS EXCLUSIVE MODE")
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        looking.join(PATIENCE)
    assert found == ["refused"]
    locking.dispose()
    access.close()


@pytest.mark.system
def test_a_writer_that_pauses_loses_the_lock_of_the_log(news: News, server: Any, tmp_path: Path) -> None:
    ledger = make_site(news, tmp_path, server.make_database()).open_ledger()
    with tables.writing(ledger.engine) as (connection, _, _):
        found = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar_one()
    assert found == "5min"
    ledger.close()


def test_a_machine_that_is_silent_is_given_up_unless_its_url_says_otherwise() -> None:
    def find_arguments(url: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def connect(dialect: Any, record: Any, given: Any, arguments: dict[str, Any]) -> None:
            found.update(arguments)
            raise ConnectionRefusedError

        engine = tables.connect(url, wait=7)
        event.listen(engine, "do_connect", connect)
        with pytest.raises(ConnectionRefusedError):
            engine.connect()
        return found

    found = find_arguments("postgresql://user@db.example/credit")
    assert (found["connect_timeout"], found["tcp_user_timeout"]) == (7, 30_000)
    assert found["keepalives_idle"] + found["keepalives_interval"] * found["keepalives_count"] == 30
    assert find_arguments("postgresql://user@db.example/credit?tcp_user_timeout=9")["tcp_user_timeout"] == "9"
