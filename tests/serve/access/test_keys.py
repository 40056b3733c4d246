"""Keys: secrets that are shown once, what is kept of them, and when they stop working."""

import os
import re
import stat
import threading
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from imprint.credit.ledger import Ledger
from imprint.errors import AccessError, ConfigurationError
from imprint.serve.access import Access, tables
from imprint.serve.access.roles import ROLES, Identity
from imprint.serve.access.secret import hash_secret
from tests.serve.access.doors import Clock
from tests.serve.news import make_ledger


def count_reads(access: Access, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows whenever the database is read."""
    reads, read = [], tables.reading

    def reading(*given: Any) -> Any:
        reads.append(1)
        return read(*given)

    monkeypatch.setattr(tables, "reading", reading)
    return reads


def test_a_key_has_256_bits_and_opens_what_it_was_made_for(access: Access) -> None:
    made = access.create("times", "publisher", sources=["times", "sunday times"])
    assert re.fullmatch(r"imprint_[A-Za-z0-9_-]{43}", made.secret)
    assert access.identify_key(made.secret) == Identity("times", "publisher", ("times", "sunday times"))
    assert len({access.create(f"key-{n}", "query").secret for n in range(20)}) == 20


def test_nothing_that_is_kept_or_shown_has_the_secret(access: Access, place: str, tmp_path: Path) -> None:
    made = access.create("app", "query")
    assert made.secret not in repr(made) and made.secret[16:] not in str(asdict(access.list()[0]))
    access.open_session(made.secret, 60)
    if "://" not in place:
        kept = b"".join(file.read_bytes() for file in tmp_path.glob("access.db*"))
        assert made.secret[8:16].encode() in kept and hash_secret(made.secret) in kept
        assert made.secret[16:].encode() not in kept


def test_a_wrong_key_with_the_right_beginning_opens_nothing(access: Access) -> None:
    secret = access.create("app", "query").secret
    other = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    for wrong in (
        other,
        secret[:-1],
        secret + "A",
        secret.upper(),
        secret[8:],
        "",
        "imprint_",
        "é" * 51,
        "\ud800" * 51,
    ):
        assert access.identify_key(wrong) is None
    assert access.identify_session(secret) is None


def test_an_expired_key_opens_nothing(access: Access, clock: Clock) -> None:
    secret = access.create("app", "query", expires=clock.now + timedelta(days=1)).secret
    session = access.open_session(secret, 10 * 86400)
    assert session is not None and access.identify_session(session) is not None
    clock.turn(days=1, seconds=-0.5)
    assert access.identify_key(secret) is not None and access.identify_session(session) is not None
    clock.turn(seconds=0.5)  # what was looked up half a second ago does not count any more either
    assert access.identify_key(secret) is None and access.identify_session(session) is None
    assert access.open_session(secret, 60) is None
    with pytest.raises(ConfigurationError, match="no valid key 'app'"):
        access.make_link("app")


def test_a_revoked_key_opens_nothing_here_at_once_and_elsewhere_within_two_seconds(
    access: Access, place: str, clock: Clock
) -> None:
    secret = access.create("app", "query").secret
    other = Access(place, clock=clock)
    session = access.open_session(secret, 600)
    assert session is not None
    link = access.make_link("app")
    for each in (access, other):
        assert each.identify_key(secret) is not None and each.identify_session(session) is not None
    access.revoke("app")
    assert access.identify_key(secret) is None and access.identify_session(session) is None
    clock.turn(seconds=2)
    assert other.identify_key(secret) is None and other.identify_session(session) is None
    assert other.use_link(link, 600) is None and other.open_session(secret, 600) is None
    other.close()


def test_the_name_of_a_revoked_key_is_not_used_again(access: Access) -> None:
    access.create("app", "query")
    access.revoke("app")
    access.revoke("app")
    with pytest.raises(ConfigurationError, match="there is, or was, a key called 'app'"):
        access.create("app", "admin")
    assert [(key.name, key.role, key.revoked is not None) for key in access.list()] == [("app", "query", True)]


def test_revoking_a_key_that_is_not_there_suggests_one_that_is(access: Access) -> None:
    access.create("times", "query")
    with pytest.raises(ConfigurationError, match="did you mean times"):
        access.revoke("tims")


@pytest.mark.parametrize(
    ("name", "role", "sources", "reason"),
    [
        ("", "query", [], "the name of a key"),
        ("a" * 65, "query", [], "the name of a key"),
        ("a b", "query", [], "the name of a key"),
        ("a\n", "query", [], "the name of a key"),
        ("../x", "query", [], "the name of a key"),
        ("é", "query", [], "the name of a key"),
        ("x", "root", [], "a role is one of query, publisher, auditor, admin"),
        ("x", "publisher", [], "a publisher needs the ids of its sources"),
        ("x", "query", ["times"], "only publishers have sources"),
        ("x", "admin", ["times"], "only publishers have sources"),
        ("x", "publisher", ["times", "times"], "name each source once"),
        ("x", "publisher", [""], "name each source once"),
        ("x", "publisher", ["tims"], "did you mean times"),
    ],
)
def test_a_key_that_makes_no_sense_is_refused(
    access: Access, name: str, role: Any, sources: list[str], reason: str
) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        access.create(name, role, sources=sources, known=["times", "post"])
    assert access.list() == []


def test_a_key_that_has_expired_already_is_refused(access: Access, clock: Clock) -> None:
    with pytest.raises(ConfigurationError, match="expired already"):
        access.create("x", "query", expires=clock.now)


def test_looking_up_again_asks_the_database_once_a_second(
    access: Access, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = access.create("app", "query").secret
    reads = count_reads(access, monkeypatch)
    for _ in range(50):
        assert access.identify_key(secret) is not None
    assert len(reads) == 1
    clock.turn(seconds=1)
    access.identify_key(secret)
    assert len(reads) == 2


def test_what_is_remembered_is_bounded(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.serve.access._MOST", 3)
    secrets = [access.create(f"key-{n}", "query").secret for n in range(5)]
    assert all(access.identify_key(secret) is not None for secret in secrets)
    assert [access.recall(secret) is not None for secret in secrets] == [False, False, True, True, True]


def test_the_last_use_is_noted_but_not_at_every_request(access: Access, clock: Clock) -> None:
    secret = access.create("app", "query").secret
    assert access.list()[0].last_used is None
    access.identify_key(secret)
    first = access.list()[0].last_used
    assert first == clock.now
    clock.turn(minutes=9)
    access.identify_key(secret)
    assert access.list()[0].last_used == first
    clock.turn(minutes=1)
    access.identify_key(secret)
    assert access.list()[0].last_used == clock.now


def test_a_database_that_cannot_be_written_still_lets_keys_in(
    access: Access, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = access.create("app", "query").secret

    def fail(*_: Any) -> Any:
        raise AccessError("the disk is full.")

    monkeypatch.setattr(tables, "writing", fail)
    assert access.identify_key(secret) is not None
    assert "the last use of a key could not be noted" in caplog.text and secret not in caplog.text


def test_two_processes_that_start_at_once_make_one_database(place: str) -> None:
    made: list[Access] = []
    barrier = threading.Barrier(4)

    def start() -> None:
        barrier.wait(60)
        made.append(Access(place))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 4
    secret = made[0].create("app", "query").secret
    assert all(each.identify_key(secret) is not None for each in made)
    for each in made:
        each.close()


def test_the_file_is_readable_to_its_owner_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        opened = Access(tmp_path / "access.db")
        opened.create("app", "query")
        assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
        opened.close()
    finally:
        os.umask(mask)


def test_a_ledger_may_live_in_the_same_database(access: Access, place: str) -> None:
    access.create("app", "query")
    make_ledger(place).close()
    with Ledger(place) as ledger:
        assert len(ledger) > 0
    assert access.list()[0].name == "app"


def test_a_database_of_another_version_is_refused(place: str) -> None:
    Access(place).close()
    url = place.replace("postgresql://", "postgresql+psycopg://") if "://" in place else f"sqlite:///{place}"
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE access_about SET schema = 2"))
    engine.dispose()
    with pytest.raises(ConfigurationError, match="schema 2, this version reads 1: upgrade imprint"):
        Access(place)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "access.db").write_text("not a database, but a long enough text that begins unlike one")
    with pytest.raises(AccessError, match="database"):
        Access(tmp_path / "access.db")
    with pytest.raises(AccessError, match="cannot be opened"):
        Access(tmp_path / "no such folder" / "access.db")
    with pytest.raises(AccessError, match="SQLite or PostgreSQL"):
        Access("mysql://host/name")


def test_probing_fails_once_the_tables_are_gone(access: Access, place: str) -> None:
    access.probe()
    with tables.writing(access._engine) as connection:
        tables.metadata.drop_all(connection)
    with pytest.raises(AccessError, match="cannot be used"):
        access.probe()


def test_every_role_may_do_what_is_said_of_it() -> None:
    may = {
        role: {p for p in ("attribute", "credit", "see_credit", "manage_keys") if Identity("x", role).may(p)}
        for role in ROLES
    }
    assert may == {
        "query": {"attribute", "credit"},
        "publisher": set(),
        "auditor": {"attribute", "see_credit"},
        "admin": {"attribute", "credit", "see_credit", "manage_keys"},
    }
    press = Identity("press", "publisher", ("times",))
    assert press.sees("times") and not press.sees("post")
    assert all(Identity("x", role).sees("post") for role in ("query", "auditor", "admin"))
