"""Running totals agree with a fresh count wherever they were stopped, and half a log is never shown as a whole."""

import contextlib
from datetime import UTC, datetime

import pytest
from sqlalchemy import update

from imprint.credit import Ledger, close_period
from imprint.serve.credit.tally import Counting, Sums, Tally
from tests.credit.crediting import fill
from tests.credit.insider import L, rewrite, run


def test_half_a_log_is_refused_and_the_next_request_reads_on(ledger: Ledger) -> None:
    fill(ledger, (10,))
    tally = Tally(ledger)
    for _ in range(len(ledger) // 4):
        with pytest.raises(Counting) as refused:
            tally.catch_up(4)
        assert refused.value.status == 503 and "Retry-After" in refused.value.headers
    tally.catch_up(4)
    assert tally.running() == (0, len(ledger), whole(ledger).running()[2])


def whole(ledger: Ledger) -> Tally:
    tally = Tally(ledger)
    tally.catch_up(10**6)
    return tally


@pytest.mark.parametrize("step", [1, 3, 100])
def test_totals_do_not_depend_on_when_they_were_looked_at(ledger: Ledger, step: int) -> None:
    tally = Tally(ledger)
    for batches in ((3,), (2, 2), (1,)):
        fill(ledger, batches)
        read_in_steps(tally, step)
    close_period(ledger, "p1")
    fill(ledger, (4,))
    read_in_steps(tally, step)
    assert tally.running() == whole(ledger).running()
    assert tally.between().totals == whole(ledger).between().totals
    assert tally.running()[2].entries == 4 and tally.between().totals.entries == 12


def read_in_steps(tally: Tally, step: int) -> None:
    while True:
        try:
            return tally.catch_up(step)
        except Counting:
            continue


def test_totals_of_days_do_not_depend_on_months_nor_on_the_order_in_which_days_were_read(ledger: Ledger) -> None:
    days = ("2026-01-30", "2026-01-31", "2026-02-01", "2026-02-28", "2026-03-01", "2026-02-02", "2026-03-02")
    fill(ledger, (1,) * len(days))
    for place, day in enumerate(days):
        move_to(ledger, place + 3, f"{day}T12:00:00.000000Z")
    tally = whole(ledger)
    for since in (None, "2026-01-31", "2026-02-01", "2026-02-02", "2026-03-02"):
        for until in (None, "2026-02-01", "2026-02-03", "2026-03-01", "2026-03-02"):
            expected = sum((since is None or day >= since) and (until is None or day < until) for day in days)
            sums = tally.between(since, until)
            assert sums.totals.entries == expected
            assert sums.signs["times"].judged == expected
    assert {day: account.entries for day, (account, _) in tally.days("times").items()} == dict.fromkeys(sorted(days), 1)


def move_to(ledger: Ledger, sequence: int, time: str) -> None:
    """Change the time of an entry as if it had been written then."""
    values = update(L).where(L.c.sequence == sequence).values(time=time)
    run(ledger, rewrite(sequence, lambda about: about.update(time=time), rehash=True), values)


def test_a_year_is_added_up_from_its_months(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, (1,) * 30)
    for place in range(30):
        move_to(ledger, place + 3, f"2026-{1 + place // 10:02}-{1 + place % 10:02}T12:00:00.000000Z")
    tally, merged = whole(ledger), list[Sums]()
    monkeypatch.setattr(Sums, "merge", lambda self, other: merged.append(other))
    tally.between()
    assert len(merged) == 4  # three months, and the newest day
    tally.between("2026-01-02")
    assert len(merged) == 4 + 9 + 3


def test_what_came_after_the_end_of_a_period_is_read_again_a_part_at_a_time(ledger: Ledger) -> None:
    fill(ledger, (2,))
    end = datetime.now(UTC)
    fill(ledger, (30,))
    close_period(ledger, "p1", until=end)
    fill(ledger, (1,))
    tally, refused = Tally(ledger), 0
    while tally.running()[2].entries != 31:
        with contextlib.suppress(Counting):
            tally.catch_up(5)
            break
        refused += 1
    assert refused > 2 * 30 // 5 and tally.running() == whole(ledger).running()


def test_what_came_after_the_end_of_a_closed_period_belongs_to_the_next(ledger: Ledger) -> None:
    tally = Tally(ledger)
    fill(ledger, (3,))
    end = datetime.now(UTC)
    fill(ledger, (2,))
    tally.catch_up()
    closing = close_period(ledger, "p1", until=end)
    tally.catch_up()
    first, _, totals = tally.running()
    assert first == closing.about["stop"] and totals.entries == 2
    assert close_period(ledger, "p2").about["total"] == totals.pot


def test_a_source_knows_how_many_of_its_effects_stand_out(ledger: Ledger) -> None:
    fill(ledger, (20,))
    signs = whole(ledger).between().signs["times"]
    rows = [row for leaf in ledger.entries(kind="credit") for row in leaf.rows if row["source"] == "times"]
    assert signs.judged == 20 and signs.earned == sum(row["share"] > 0 for row in rows) and signs.size == 5
    quantile = 3.182  # of Student's distribution with 3 degrees of freedom
    assert signs.clear == sum(abs(row["helps"]) > quantile * row["error"] for row in rows)
