"""A clock that is wrong is noticed: entries keep the order of their times, so one in the future dates all others."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from imprint.credit import Ledger, close_period
from imprint.credit.log import format_time
from imprint.credit.verifying import verify
from tests.credit.crediting import fill, make_ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Any:
    """Times do not depend on the database, so SQLite alone."""
    with make_ledger(tmp_path / "credit.db") as made:
        yield made


def fill_with_a_clock_ahead(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, **ahead: float) -> str:
    """Credit a query on a machine whose clock is ahead; return the time of the entry."""
    time = format_time(datetime.now(UTC) + timedelta(**ahead))
    with monkeypatch.context() as patch:
        patch.setattr("imprint.credit.ledger.now_or_last", lambda last="": max(time, last))
        fill(ledger, (1,))
    return time


def find_remark(ledger: Ledger) -> str:
    found = verify(ledger, progress=False)
    assert found.holds
    return next((remark for remark in found.remarks if "clock" in remark), "")


def test_a_time_in_the_future_is_noticed(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, (1,))
    time = fill_with_a_clock_ahead(ledger, monkeypatch, days=40)
    expected = f"The last entry, 4, is dated {time[:10]} {time[11:19]} UTC, which is in the future"
    assert find_remark(ledger).startswith(expected)


def test_it_is_still_noticed_after_entries_that_took_that_time(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this machine's clock is behind: whoever reads the log sees one date on everything."""
    time = fill_with_a_clock_ahead(ledger, monkeypatch, days=3)
    assert close_period(ledger, "2026-11").about["time"] == time
    assert find_remark(ledger).startswith("The last entry, 4, is dated ")


def test_clocks_that_differ_by_a_little_are_not_remarked_on(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_with_a_clock_ahead(ledger, monkeypatch, minutes=4)
    assert find_remark(ledger) == ""
    fill_with_a_clock_ahead(ledger, monkeypatch, minutes=6)
    assert find_remark(ledger)
