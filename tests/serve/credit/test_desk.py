"""A desk that many ask at once counts each entry once, and one that is closed stops what it began."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from imprint.credit import close_period
from imprint.errors import CreditUnavailable
from imprint.keys import make_keys
from imprint.serve.credit.verification import Verifier
from imprint.serve.settings import Settings
from tests.credit.crediting import EXPECTED, fill, make_ledger, make_result
from tests.credit.insider import rewrite, run
from tests.serve.credit.asking import Bureau, get, open_bureau
from tests.serve.news import News


def test_requests_at_once_count_each_entry_once_while_others_credit(bureau: Bureau) -> None:
    fill(bureau.ledger, (5,))
    client, counts = bureau.client("auditor"), list[int]()

    def ask(place: int) -> None:
        if place % 3 == 0:
            bureau.ledger.credit(make_result(2, place), EXPECTED)
        else:
            counts.append(get(client, "totals")["queries"])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(ask, range(24)))
    assert get(client, "totals")["queries"] == 5 + 8 * 2
    closing = close_period(bureau.ledger, "p1")
    assert closing.about["entries"] == 21 and all(5 <= count <= 21 for count in counts)


def test_names_of_many_sources_are_read_once(bureau: Bureau) -> None:
    assert bureau.desk.names is bureau.desk.names and bureau.desk.names


def test_a_service_verifies_and_counts_when_it_starts_and_stops_both_when_it_ends(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger, open_bureau(news, ledger, tmp_path, metrics="") as bureau:
        fill(ledger, (20,))
        with TestClient(bureau.app, base_url="http://127.0.0.1"):
            bureau.desk.verifier.wait()
            assert bureau.desk.verifier.last.status == "holds"
        assert not {"imprint-verifying", "imprint-counting"} & {each.name for each in threading.enumerate()}
        assert bureau.app.state.metrics.problems._value.get() == 0


def test_why_a_log_could_not_be_verified_is_logged(
    news: News, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger:
        verifier = Verifier(ledger, Settings(heads=tmp_path / "heads.jsonl"))
        verifier.start()
        verifier.wait()
        verifier.close()
    assert verifier.last.status == "failed" and "heads.jsonl" in verifier.last.error
    assert f"the ledger could not be verified: {verifier.last.error}" in caplog.text


def test_closing_ends_a_verification_early_and_keeps_what_was_known(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger:
        fill(ledger, (300,))
        verifier, begun, asked = Verifier(ledger, Settings()), threading.Event(), list[int]()
        note = verifier._note

        def stop_at_once(done: int, total: int) -> None:
            note(done, total)
            asked.append(done)
            verifier._closing.set()
            begun.set()

        verifier._note = stop_at_once  # type: ignore[method-assign]
        verifier.start()
        assert begun.wait(60)
        verifier.close()
        assert asked == [100] and verifier.last.status == "never" and not verifier.start()


def test_a_database_that_checks_its_own_file_does_not_keep_the_service_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()

    def check_file(*given: Any, **named: Any) -> Any:
        entered.set()
        leave.wait(30)
        raise CreditUnavailable("interrupted")

    monkeypatch.setattr("imprint.serve.credit.verification.verify", check_file)
    monkeypatch.setattr("imprint.serve.credit.verification.CLOSING", 0.01)
    with make_ledger(tmp_path / "credit.db") as ledger:
        verifier = Verifier(ledger, Settings())
        verifier.start()
        assert entered.wait(60)
        verifier.close()
        assert verifier.running is not None and not verifier.start()
        leave.set()
        verifier.wait()


def test_statements_that_cannot_be_written_say_so_and_nothing_of_tampering(
    news: News, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_keys(tmp_path / "key")
    (tmp_path / "file").touch()
    with (
        make_ledger(tmp_path / "credit.db") as ledger,
        open_bureau(news, ledger, tmp_path, statements=tmp_path / "file" / "statements") as bureau,
    ):
        fill(ledger, (1,))
        closing = close_period(ledger, "p1")
        ledger.sign_head(tmp_path / "key")
        client = bureau.client("publisher", ("times",))
        answer = client.get("/v1/credit/statements/p1/times.csv")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_written")
        assert str(tmp_path) not in answer.text and str(tmp_path / "file") in caplog.text
        (tmp_path / "file").unlink()
        assert client.get("/v1/credit/statements/p1/times.csv").status_code == 200  # once there is a folder
        (tmp_path / "file").rename(tmp_path / "kept")
        run(ledger, rewrite(closing.sequence - 1, lambda about: about.update(pot=1)))
        answer = client.get("/v1/credit/statements/p1/times.csv")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "damaged")


def test_statements_are_kept_apart_by_log_and_written_once(news: News, tmp_path: Path) -> None:
    make_keys(tmp_path / "key")
    sizes = list[int]()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        with (
            make_ledger(folder / "credit.db") as ledger,
            open_bureau(news, ledger, folder, statements=tmp_path / "statements") as bureau,
        ):
            fill(ledger, (len(name) + len(sizes),))
            closing: Any = close_period(ledger, "..")
            ledger.sign_head(tmp_path / "key")
            file = bureau.desk.statements.find(closing, "times", "csv")
            assert file.is_relative_to(tmp_path / "statements" / ledger.name)
            before = file.stat().st_mtime_ns
            assert bureau.desk.statements.find(closing, "times", "csv").stat().st_mtime_ns == before
            sizes.append(file.read_text().count("\n"))
    assert sizes == [4, 5]
