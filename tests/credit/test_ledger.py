"""Crediting: what an entry says, requests that come twice, several writers, and what is refused."""

import hashlib
import stat
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint.credit import PARTS, Ledger, Policy, Tariff, tables
from imprint.credit.periods import close_period
from imprint.credit.verifying import verify
from imprint.errors import ConflictError, CreditError, ReliabilityWarning
from tests.credit.crediting import EXPECTED, SOURCES, THIS_RUN, fill, labels, make_ledger, make_result


def test_an_entry_says_everything_that_a_share_follows_from(ledger: Ledger) -> None:
    result = make_result(2)
    entry = ledger.credit(result, EXPECTED, ids=["q-1", "q-2"], payloads=[b"one", b"two"]).entries[1]
    about = entry.about
    assert (about["query"], about["question"], about["policy"]) == ("q-2", "expected", EXPECTED.sha256)
    assert (about["store"], about["model"], about["n"], about["better"]) == ("5" * 64, "a" * 64, 40, "lower")
    assert about["validation"]["outcome"] == "sizes validated" and about["validation"]["figures"]["p"] == 0.001
    assert about["pot"] == 2000 and about["runs"] == {"over": "runs", "shares": [0.25] * 4}
    assert [row["source"] for row in entry.rows] == sorted(SOURCES)
    errors = result.standard_error
    assert errors is not None
    for place, row in enumerate(entry.rows):
        assert row["score"] == float(result.scores[1, place]) and row["error"] == float(errors[1, place])
        assert len(row["deviations"]) == 4
    rest = about["unattributed"]
    assert sum(row["share"] for row in entry.rows) + rest["share"] == PARTS
    assert sum(row["amount"] for row in entry.rows) + rest["amount"] == 2000


def test_a_measurement_that_should_be_high_pays_for_raising_it(ledger: Ledger) -> None:
    low, high = (ledger.credit(make_result(1, better=better), EXPECTED).entries[0] for better in ("lower", "higher"))
    paid = [[row["share"] > 0 for row in entry.rows] for entry in (low, high)]
    assert any(paid[0]) and any(paid[1]) and not any(a and b for a, b in zip(*paid, strict=True))


def test_what_was_asked_is_hashed_with_a_salt_and_kept_apart(ledger: Ledger) -> None:
    one, two = ledger.credit(make_result(2), EXPECTED, payloads=[b"same", b"same"]).entries
    assert one.about["payload"] != two.about["payload"] != hashlib.sha256(b"same").hexdigest()
    assert ledger.payload(one.sequence) == b"same"
    assert b"same" not in one.header and not any(b"same" in line for line in one.lines)


def test_the_policy_is_in_the_log_once_and_before_its_entries(ledger: Ledger) -> None:
    first = ledger.credit(make_result(1), EXPECTED).sequences[0]
    fill(ledger)
    ledger.credit(make_result(1, question="this_run"), THIS_RUN)
    places = [leaf.sequence for leaf in ledger.entries(kind="policy")]
    assert places[0] == first - 1 and len(places) == 2
    assert ledger.policy(EXPECTED.sha256) == EXPECTED


def test_a_pot_of_the_caller_comes_before_the_tariff(ledger: Ledger) -> None:
    given = ledger.credit(make_result(2), EXPECTED, pot=[7, 11]).entries
    assert [entry.about["pot"] for entry in given] == [7, 11]
    ledger.set_tariff(replace(ledger.tariff, per_query=5))
    assert ledger.credit(make_result(1), EXPECTED).entries[0].about["pot"] == 5
    with pytest.raises(CreditError, match="this ledger pays in EUR"):
        ledger.set_tariff(Tariff("USD"))


# --- requests that come twice


def test_the_same_request_returns_its_stored_answer(ledger: Ledger) -> None:
    first = ledger.credit(make_result(3), EXPECTED, payloads=[b"a", b"b", b"c"], key="k")
    again = ledger.credit(make_result(3), EXPECTED, payloads=[b"a", b"b", b"c"], key="k")
    assert again.repeated and not first.repeated and again.entries == first.entries
    assert len(list(ledger.entries(kind="credit"))) == 3


def test_scores_that_differ_in_the_last_digit_are_the_same_request_where_it_says_what_was_asked(ledger: Ledger) -> None:
    first = ledger.credit(make_result(1), EXPECTED, payloads=[b"a"], key="k")
    other = make_result(1)
    rounded = replace(other, scores=other.scores * (1 + 1e-12))
    assert ledger.credit(rounded, EXPECTED, payloads=[b"a"], key="k").entries == first.entries
    ledger.credit(make_result(1), EXPECTED, key="without")
    with pytest.raises(ConflictError):
        ledger.credit(rounded, EXPECTED, key="without")


@pytest.mark.parametrize(
    "change",
    [{"payloads": [b"other"]}, {"pot": 3}, {"policy": Policy("house", "expected", level=0.9)}, {"ids": ["x"]},
     {"model": "m"}, {"result": make_result(1, measure="margin")}],
)  # fmt: skip
def test_another_request_with_the_same_key_is_a_conflict(change: dict[str, Any], ledger: Ledger) -> None:
    request: dict[str, Any] = {"result": make_result(1), "policy": EXPECTED, "payloads": [b"a"], "key": "k"}
    ledger.credit(**request)
    before = len(ledger)
    with pytest.raises(ConflictError, match="the key 'k' of caller '-' was used for another request"):
        ledger.credit(**{**request, **change})
    assert len(ledger) == before
    assert not ledger.credit(**request, caller="somebody-else").repeated


def test_a_request_is_known_by_what_was_asked_whatever_was_made_of_it(ledger: Ledger, place: str) -> None:
    asked: dict[str, Any] = {"caller": "app", "key": "k", "asked": b'[{"prompt":"a"}]'}
    first = ledger.credit(make_result(2), EXPECTED, payloads=[b"a", b"b"], **asked)
    other = Policy("house", "expected", version=2, level=0.9)
    with Ledger(place) as opened:
        again = opened.credit(make_result(2, seed=5), other, payloads=[b"c", b"d"], model="m", **asked)
    assert again.repeated and again.entries == first.entries and not first.repeated
    assert ledger.find(asked["asked"], 2, caller="app", key="k") == again
    assert len(list(ledger.entries(kind="credit"))) == 2 and verify(ledger, progress=False).holds


def test_what_was_not_asked_is_not_found_and_what_else_was_asked_is_a_conflict(ledger: Ledger) -> None:
    ledger.credit(make_result(1), EXPECTED, key="k", asked=b"a")
    assert ledger.find(b"a", 1, key="other") is None and ledger.find(b"a", 1, caller="other", key="k") is None
    with pytest.raises(ConflictError, match="used for another request"):
        ledger.find(b"b", 1, key="k")
    with pytest.raises(ConflictError, match="used for another request"):
        ledger.credit(make_result(1), EXPECTED, key="k", asked=b"b")
    with pytest.raises(ConflictError, match="used for another request"):
        ledger.credit(make_result(1), EXPECTED, key="k")
    ledger.credit(make_result(1), EXPECTED, key="described")
    with pytest.raises(ConflictError, match="used for another request"):
        ledger.find(b"", 1, key="described")
    with pytest.raises(CreditError, match="in bytes, got a str"):
        ledger.find("a", 1, key="k")  # type: ignore[arg-type]


def test_what_was_asked_is_forgotten_with_the_query(ledger: Ledger) -> None:
    ledger.credit(make_result(1), EXPECTED, payloads=[b"a"], key="k", asked=b"a")
    ledger.erase([entry.sequence for entry in ledger.entries(kind="credit")])
    with pytest.raises(ConflictError, match=r"erased since.* They stay credited"):
        ledger.find(b"a", 1, key="k")
    assert verify(ledger, progress=False).holds


def test_a_writer_waits_no_longer_for_another_than_it_is_told(ledger: Ledger, place: str) -> None:
    with Ledger(place, wait=1) as hasty, tables.writing(ledger.engine):
        with pytest.raises(CreditError, match=r"writing the database .* failed"):
            hasty.credit(make_result(1), EXPECTED)
        assert hasty.find(b"a", 1, key="k") is None  # reading waits for nobody
    assert len(list(ledger.entries(kind="credit"))) == 0


def test_what_could_never_be_credited_is_refused_before_there_are_queries(ledger: Ledger) -> None:
    ledger.check(labels(), EXPECTED)
    ledger.credit(make_result(1), EXPECTED)
    ledger.check(labels(), EXPECTED)
    with pytest.raises(CreditError, match="another policy 'house', version 1"):
        ledger.check(labels(), Policy("house", "expected", rule="positive_part"))
    with pytest.raises(CreditError, match="cannot tell whether a source helps"):
        ledger.check(labels(better=None), EXPECTED)
    with pytest.raises(CreditError, match="pays for 'expected'"):
        ledger.check(labels("this_run"), EXPECTED)


def test_a_batch_is_written_whole_or_not_at_all(ledger: Ledger) -> None:
    before = len(ledger)
    with pytest.raises(CreditError, match="the id of a query has"):
        ledger.credit(make_result(3), EXPECTED, ids=["good", "good-too", "not good"])
    for pot in ([1, -1], [1, True], True, 0.5):
        with pytest.raises(CreditError, match="whole number of micro-units"):
            ledger.credit(make_result(2), EXPECTED, pot=pot)  # type: ignore[arg-type]
    assert len(ledger) == before


def test_four_writers_leave_one_gapless_log(ledger: Ledger, place: str) -> None:
    failures: list[Exception] = []

    def write(writer: int) -> None:
        try:
            mine = Ledger(place)
            for turn in range(6):
                mine.credit(make_result(2, seed=turn), EXPECTED, caller=f"writer-{writer}", key=f"{turn}")
            mine.close()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(list(ledger.entries(kind="credit"))) == 48
    assert [leaf.sequence for leaf in ledger.entries()] == list(range(len(ledger)))
    assert len(list(ledger.entries(kind="policy"))) == 1
    assert verify(ledger, progress=False).holds


def test_the_same_request_at_the_same_time_is_written_once(ledger: Ledger, place: str) -> None:
    receipts: list[Any] = []

    def write() -> None:
        mine = Ledger(place)
        receipts.append(mine.credit(make_result(3), EXPECTED, payloads=[b"a", b"b", b"c"], key="k"))
        mine.close()

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(receipt.repeated for receipt in receipts) == [False, True, True, True]
    assert len({receipt.sequences for receipt in receipts}) == 1
    assert len(list(ledger.entries(kind="credit"))) == 3


# --- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"details": {"readout": "jvp", "examples_of_several_sources": 2}}, "2 training examples belong to more than"),
        ({"details": {"readout": "jvp"}}, "does not say whether its sources overlap"),
        ({"details": {"examples_of_several_sources": 0, "sources_in_several_groups": 1}}, "in several groups"),
        ({"difference": True}, "a difference of two results"),
        ({"better": None}, "does not say which values of 'loss' are better"),
        ({"question": "this_run"}, "pays for 'expected', and these effects answer 'this_run'"),
    ],
)
def test_results_that_nobody_can_be_paid_by_are_refused(change: dict[str, Any], message: str, ledger: Ledger) -> None:
    with pytest.raises(CreditError, match=message):
        ledger.credit(replace(make_result(1), labels=labels(**change)), EXPECTED)


def test_a_mean_and_numbers_that_are_none_are_refused(ledger: Ledger) -> None:
    with pytest.raises(CreditError, match="this result is a mean over queries"):
        ledger.credit(make_result(3).mean(), EXPECTED)
    broken = replace(make_result(1), scores=torch.full((1, 4), float("nan")))
    with pytest.raises(CreditError, match="not a finite number"):
        ledger.credit(broken, EXPECTED, payloads=[b"a"])


@pytest.mark.parametrize("name", ["", "a b", "ü", "x" * 201])
def test_callers_and_keys_are_plain_names(name: str, ledger: Ledger) -> None:
    with pytest.raises(CreditError, match="printable ASCII"):
        ledger.credit(make_result(1), EXPECTED, caller=name)


@pytest.mark.parametrize("given", [{"ids": ["a"]}, {"payloads": [b"a"]}, {"pot": [1]}])
def test_there_is_one_of_everything_for_each_query(given: dict[str, Any], ledger: Ledger) -> None:
    with pytest.raises(CreditError, match="there are 2 queries and 1"):
        ledger.credit(make_result(2), EXPECTED, **given)


def test_errors_over_the_checkpoints_of_one_run_are_no_threshold(ledger: Ledger) -> None:
    """What the seed does is not in them: a source could be paid for the luck of one run."""
    result = make_result(2)
    alone = replace(result, replicates=tuple(replace(each, over="checkpoints") for each in result.replicates))
    with pytest.warns(ReliabilityWarning, match="standard errors unknown"):
        entry = ledger.credit(alone, EXPECTED).entries[0]
    assert entry.about["rule"] == "nothing" and [row["error"] for row in entry.rows] == [None] * 4
    ledger.credit(alone, Policy("floor", "expected", floor=0.2))
    leaf = close_period(ledger, "p")
    assert any(row["share"] > 0 for row in leaf.rows) and all(row["low"] is None for row in leaf.rows)
    assert verify(ledger, progress=False).holds


def test_a_ledger_may_demand_signed_stores(tmp_path: Path) -> None:
    from imprint.keys import identify_key, load_public_key, make_keys

    make_keys(tmp_path / "key")
    ledger = Ledger.create(tmp_path / "credit.db", Tariff("EUR", 1), signed_by=tmp_path / "key.pub")
    name = identify_key(load_public_key(tmp_path / "key.pub"))
    with pytest.raises(CreditError, match=f"only stores that the key {name} has signed"):
        ledger.credit(make_result(1), EXPECTED)
    signed = make_result(1, fingerprints={"store": "5" * 64, "signer": name})
    assert ledger.credit(signed, EXPECTED).entries[0].about["signer"] == name
    ledger.check(signed.labels, EXPECTED)
    with pytest.raises(CreditError, match=f"only stores that the key {name} has signed"):
        ledger.check(labels(), EXPECTED)


# --- opening


def test_a_ledger_is_made_once_and_opened_by_its_place(place: str) -> None:
    made = make_ledger(place)
    fill(made)
    made.close()
    with pytest.raises(CreditError, match="already contains a ledger"):
        make_ledger(place)
    opened = Ledger(place)
    assert len(opened) == 11 and opened.name == made.name and opened.tariff == made.tariff
    opened.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CreditError, match=r"there is no ledger .*credit\.db: `imprint credit create -l .*credit\.db` makes one"
    ):
        Ledger(tmp_path / "credit.db")
    (tmp_path / "empty.db").touch()
    with pytest.raises(CreditError, match="does not contain a ledger"):
        Ledger(tmp_path / "empty.db")
    (tmp_path / "text.db").write_text("no database, but long enough to be looked at as one" * 100)
    with pytest.raises(CreditError, match="reading the database"):
        Ledger(tmp_path / "text.db")
    with pytest.raises(CreditError, match="SQLite or PostgreSQL"):
        Ledger("mysql://somewhere/db")


def test_a_password_is_never_shown() -> None:
    with pytest.raises(CreditError) as caught:
        Ledger("postgresql://user:secret@127.0.0.1:1/db")
    assert "secret" not in str(caught.value) and "127.0.0.1" in str(caught.value)


def test_only_its_owner_can_read_a_sqlite_ledger(tmp_path: Path) -> None:
    make_ledger(tmp_path / "credit.db")
    assert stat.S_IMODE((tmp_path / "credit.db").stat().st_mode) == 0o600


# --- erasing


def test_what_was_asked_is_erased_for_good_and_the_entry_still_verifies(ledger: Ledger) -> None:
    receipt = ledger.credit(make_result(2), EXPECTED, payloads=[b"erase-me-1234", b"keep"])
    one, two = receipt.sequences
    assert ledger.erase([one]) == 1 and ledger.erase([one]) == 0
    assert ledger.payload(one) is None and ledger.payload(two) == b"keep"
    assert verify(ledger, progress=False).holds
    erasure = next(iter(ledger.entries(kind="erasure")))
    assert erasure.about["erased"] == [one] and erasure.about["reason"] == "on request"


def test_nothing_of_it_stays_in_the_files_of_sqlite(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path / "credit.db")
    marked = b"erase-me-" * 200
    sequence = ledger.credit(make_result(1), EXPECTED, payloads=[marked]).sequences[0]

    def found() -> bool:
        return any(b"erase-me-erase-me-" in file.read_bytes() for file in tmp_path.iterdir())

    assert found()
    ledger.erase([sequence])
    ledger.close()
    assert not found()


def test_payloads_are_erased_when_their_retention_ends(ledger: Ledger) -> None:
    short = ledger.credit(make_result(1), EXPECTED, payloads=[b"a"], retention=timedelta(days=1)).sequences[0]
    long = ledger.credit(make_result(1), EXPECTED, payloads=[b"b"], retention=timedelta(days=9)).sequences[0]
    forever = ledger.credit(make_result(1), EXPECTED, payloads=[b"c"]).sequences[0]
    assert ledger.erase_expired() == 0
    assert ledger.erase_expired(datetime.now(UTC) + timedelta(days=2)) == 1
    assert [ledger.payload(each) for each in (short, long, forever)] == [None, b"b", b"c"]
