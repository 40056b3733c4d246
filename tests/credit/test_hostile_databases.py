"""A database in which somebody exchanged tables, indexes or files is refused, or found out by `verify`."""

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from imprint.credit import Ledger, Tariff
from imprint.credit.periods import close_period
from imprint.credit.statements import write_statements
from imprint.credit.verifying import verify
from imprint.errors import CreditError
from tests.credit.crediting import EXPECTED, fill, make_ledger, make_result
from tests.credit.insider import rebuild, rewrite, run

INDEX = "sqlite_autoindex_imprint_requests_1"
NOBODY = 65534
_KEY = Ed25519PrivateKey.generate()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a closed ledger, with two requests."""
    with make_ledger(tmp_path / "credit.db") as ledger:
        ledger.credit(make_result(2, seed=1), EXPECTED, key="a")
        ledger.credit(make_result(1, seed=2), EXPECTED, key="b")
    return tmp_path / "credit.db"


def change_by_hand(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def test_an_index_that_hides_a_request_is_found(file: Path) -> None:
    """The root of the index over callers and keys is exchanged with that of an empty one."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE other(caller TEXT, key TEXT, PRIMARY KEY(caller, key))")
        connection.execute("PRAGMA writable_schema=ON")
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
        pairs = {INDEX: "sqlite_autoindex_other_1", "sqlite_autoindex_other_1": INDEX}
        for name, other in pairs.items():
            connection.execute("UPDATE sqlite_master SET rootpage=? WHERE name=?", (roots[other], name))
        connection.commit()
    with Ledger(file) as ledger:
        found = verify(ledger, progress=False)
    assert any("the file of the database is damaged" in str(each) for each in found.problems)


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE hidden AS SELECT * FROM imprint_heads", "DROP TABLE imprint_heads",
         "CREATE VIEW Imprint_Heads AS SELECT * FROM hidden"),
        ("DROP TABLE imprint_requests", "CREATE TABLE IMPRINT_requests (caller, key, salt, secret, sealed, digest, "
         "first, count, UNIQUE(count) ON CONFLICT REPLACE)"),
        ("DROP TABLE imprint_heads", "CREATE TABLE imprint_heads (size, time, head, signature)"),
        ("CREATE INDEX IMPRINT_more ON imprint_leaves (time)",),
        ("DROP INDEX ix_imprint_requests_first",),
        ("DROP TABLE imprint_nodes",),
    ],
    ids=["a view", "another table of requests", "no key", "one more index", "no index", "no table"],
)  # fmt: skip
def test_a_database_with_other_objects_is_refused(statements: tuple[str, ...], file: Path) -> None:
    change_by_hand(file, *statements)
    with pytest.raises(CreditError, match=r"that no ledger has|that every ledger has"):
        Ledger(file)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Become somebody who may read a folder and not write to it."""
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)
        folder.chmod(0o755)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody can enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def open_to_readers(folder: Path) -> None:
    for file in folder.iterdir():
        file.chmod(0o644)


def test_an_auditor_who_may_not_write_reads_a_closed_ledger(folder: Path) -> None:
    place = folder / "credit ?&#.db"
    with make_ledger(place) as ledger:
        fill(ledger)
    open_to_readers(folder)
    with read_only(folder), Ledger(place) as ledger:
        assert verify(ledger, progress=False).holds and len(ledger) == 11 and str(place) in repr(ledger)
        with pytest.raises(CreditError, match="readonly"):
            ledger.sign_head(_KEY)


def test_an_auditor_who_may_not_write_reads_what_is_in_the_write_ahead_log(folder: Path) -> None:
    place = folder / "credit.db"
    with make_ledger(place) as ledger:
        fill(ledger, (3,))
    with Ledger(place) as writer:
        fill(writer, (2,))
        open_to_readers(folder)
        with read_only(folder), Ledger(place) as ledger:
            assert len(ledger) == len(writer) == 8 and verify(ledger, progress=False).holds
        (folder / "copy.db").write_bytes(place.read_bytes())
        (folder / "copy.db-wal").write_bytes((folder / "credit.db-wal").read_bytes())
    with read_only(folder), pytest.raises(CreditError, match=r"copy the file and copy\.db-wal"):
        Ledger(folder / "copy.db")


CREDIT_AGAIN = {
    "one entry more": "UPDATE imprint_requests SET count = 2 WHERE key = 'a'",
    "a place beyond the log": "UPDATE imprint_requests SET first = 999 WHERE key = 'a'",
    "a place that is none": "UPDATE imprint_requests SET first = 'x' WHERE key = 'a'",
    "a count that is none": "UPDATE imprint_requests SET count = 'x' WHERE key = 'a'",
    "the place of another": "UPDATE imprint_requests SET first = 5 WHERE key = 'a'",
    "places exchanged": "UPDATE imprint_requests SET first = 8 - first",
    "two requests at one place": "UPDATE imprint_requests SET first = 5",
}


@pytest.mark.parametrize("change", CREDIT_AGAIN)
def test_a_request_that_points_elsewhere_is_not_answered_and_verify_says_so(change: str, tmp_path: Path) -> None:
    """0 log, 1 tariff, 2 policy, 3 a query, 4 a closed period, 5 a query."""
    with make_ledger(tmp_path / "credit.db") as ledger:
        ledger.credit(make_result(1, seed=1), EXPECTED, key="a")
        close_period(ledger, "2026-11")
        ledger.credit(make_result(1, seed=2), EXPECTED, key="b")
        assert ledger.credit(make_result(1, seed=1), EXPECTED, key="a").sequences == (3,)
        change_by_hand(tmp_path / "credit.db", CREDIT_AGAIN[change])
        assert not verify(ledger, progress=False).holds
        with pytest.raises(CreditError, match="are not where the database says"):
            ledger.credit(make_result(1, seed=1), EXPECTED, key="a")
        assert len(ledger) == 6


def test_columns_that_contradict_an_entry_are_not_believed(file: Path, tmp_path: Path) -> None:
    with Ledger(file) as ledger:
        until = datetime.now(UTC)
        change_by_hand(file, "UPDATE imprint_leaves SET time = '2999' WHERE sequence >= 4")
        with pytest.raises(CreditError, match="entry 4 was changed"):
            close_period(ledger, "2026-11", until=until)
        change_by_hand(file, "UPDATE imprint_leaves SET time = '2000' WHERE sequence >= 4")
        with pytest.raises(CreditError, match="entry 4 was changed"):
            close_period(ledger, "2026-11", until=until)


def test_an_entry_whose_kind_was_changed_is_not_left_out(file: Path, tmp_path: Path) -> None:
    with Ledger(file) as ledger:
        close_period(ledger, "2026-11")
        ledger.sign_head(_KEY)
        change_by_hand(file, "UPDATE imprint_leaves SET kind = 'policy' WHERE sequence = 4")
        with pytest.raises(CreditError, match="entry 4 was changed"):
            write_statements(ledger, "2026-11", tmp_path / "out", progress=False)
        with pytest.raises(CreditError, match="entry 4 was changed"):
            list(ledger.entries(kind="credit"))
        change_by_hand(file, "INSERT INTO imprint_kinds VALUES ('tariff', 2), ('policy', 1)")
        with pytest.raises(CreditError, match="entry 2 is no tariff"):
            _ = ledger.tariff
        with pytest.raises(CreditError, match="entry 1 was changed"):
            ledger.policy(EXPECTED.sha256)


def test_entries_that_no_head_covers_are_counted(file: Path) -> None:
    with Ledger(file) as ledger:
        head = ledger.sign_head(_KEY)
        options: dict[str, Any] = {"heads": [head], "key": _KEY.public_key(), "progress": False}
        assert verify(ledger, **options).remarks == ()
        fill(ledger, (2,))
        assert verify(ledger, **options).remarks[0].startswith("2 entries were written after the newest head")


def test_a_tariff_that_was_hidden_for_a_moment_is_found_afterwards(file: Path) -> None:
    with Ledger(file) as ledger:
        sequence = ledger.set_tariff(Tariff("EUR", per_query=500)).sequence
        change_by_hand(file, f"DELETE FROM imprint_kinds WHERE sequence = {sequence}")
        ledger.credit(make_result(1, seed=3), EXPECTED)
        change_by_hand(file, f"INSERT INTO imprint_kinds VALUES ('tariff', {sequence})")
        found = [str(problem) for problem in verify(ledger, progress=False).problems]
    assert found == [f"entry {sequence + 1}: it names entry 1 as its tariff, which did not hold then"]


def test_objects_that_were_added_to_an_open_ledger_are_found(file: Path) -> None:
    with Ledger(file) as ledger:
        change_by_hand(file, "CREATE TRIGGER sneaky AFTER INSERT ON imprint_leaves BEGIN SELECT 1; END")
        assert "has a trigger 'sneaky' that no ledger has" in str(verify(ledger, progress=False).problems[0])


@pytest.mark.parametrize("sequence", [1, 2, 3])
@pytest.mark.parametrize("name", ["tariff", "policy", "pot", "runs"])
@pytest.mark.parametrize("value", [None, 5, [1], {"zzz": 1}, "x"], ids=str)
def test_entries_with_values_of_wrong_types_lead_to_one_line(sequence: int, name: str, value: Any, file: Path) -> None:
    with Ledger(file) as ledger:
        run(ledger, rewrite(sequence, lambda about: about.update({name: value})), rebuild)
        calls: list[Callable[[], Any]] = [
            lambda: ledger.tariff,
            lambda: ledger.policy(EXPECTED.sha256),
            lambda: ledger.credit(make_result(1, seed=8), EXPECTED),
            lambda: close_period(ledger, "2026-11"),
            lambda: verify(ledger, progress=False),
        ]
        for call in calls:
            with suppress(CreditError):
                call()
