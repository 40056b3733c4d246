"""Whoever changes the database by hand is found out, by the ledger itself or by somebody who holds an earlier head."""

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, delete, insert, select, update

from imprint.credit import Ledger, tables
from imprint.credit import log as credit_log
from imprint.credit.canonical import encode
from imprint.credit.heads import Head, publish_head, read_heads, sign_head
from imprint.credit.leaves import split_lines
from imprint.credit.merkle import (
    check_consistency,
    check_inclusion,
    prove_inclusion,
)
from imprint.credit.periods import close_period
from imprint.credit.proofs import prove_growth
from imprint.credit.statements import write_statements
from imprint.credit.verifying import verify
from imprint.errors import CreditError
from tests.credit.crediting import EXPECTED, fill, make_ledger, make_result
from tests.credit.insider import L, change_entry, change_line, rebuild, rewrite, run

P, KEY = tables.payloads, Ed25519PrivateKey.generate()


@pytest.fixture
def filled(ledger: Ledger) -> Ledger:
    """0 log, 1 tariff, 2 policy, 3 to 10 credited queries, 11 a closed period, 12 to 14 more queries."""
    fill(ledger, (3, 1, 4), payloads=None)
    close_period(ledger, "2026-11")
    ledger.credit(make_result(3, seed=9), EXPECTED, payloads=[b"a", b"b", b"c"], key="k")
    return ledger


def problems(ledger: Ledger, heads: list[Head] | None = None) -> list[str]:
    found = verify(ledger, heads=heads or [], key=KEY.public_key(), progress=False)
    assert found.holds == (not found.problems)
    return [str(problem) for problem in found.problems]


def test_what_nobody_touched_verifies(filled: Ledger) -> None:
    filled.sign_head(KEY)
    assert problems(filled) == []
    found = verify(filled, key=KEY.public_key(), progress=False)
    assert found.entries == 15 and found.heads == 1 and repr(found).startswith("verified: 15 entries and 1 signed head")


def test_what_was_not_compared_is_said(filled: Ledger) -> None:
    assert "No published head was compared" in repr(verify(filled, progress=False))
    filled.sign_head(KEY)
    assert "signatures of heads were not checked" in repr(verify(filled, progress=False))


CHANGES: dict[str, tuple[Any, str]] = {
    "a header": (rewrite(5, lambda about: about.update(pot=9)), "entry 5: its content was changed"),
    "a header with its hash": (rewrite(5, lambda a: a.update(query="x"), rehash=True), "do not lead to the root"),
    "an amount": (change_line(5, b'"amount":', b'"amount":1'), "entry 5: its lines were changed"),
    "a source's name": (change_line(5, b'"times"', b'"tomes"'), "entry 5: its lines were changed"),
    "a time column": (update(L).where(L.c.sequence == 5).values(time="2020"), "entry 5: the database says time 2020"),
    "a kind column": (update(L).where(L.c.sequence == 5).values(kind="policy"), "entry 5: the database says kind"),
    "bytes": (update(L).where(L.c.sequence == 5).values(header=b"{"), "entry 5: it cannot be read"),
    "no lines": (update(L).where(L.c.sequence == 5).values(lines=None), "entry 5: its lines or their salt were"),
    "a salt": (update(L).where(L.c.sequence == 5).values(salt=b"0" * 32), "entry 5: its lines were changed"),
    "a short salt": (update(L).where(L.c.sequence == 5).values(salt=b"0" * 31), "entry 5: its lines or their salt"),
    "a removed entry": (delete(L).where(L.c.sequence == 5), "entry 5 is missing"),
    "two removed entries": (delete(L).where(L.c.sequence.in_([5, 6])), "entries 5 to 6 are missing"),
    "the last entries": (delete(L).where(L.c.sequence >= 12), "the database claims 15 entries, but contains 12"),
    "the peaks": (update(tables.log).values(peaks=b"0" * 128), "do not lead to the root"),
    "the size": (update(tables.log).values(size=7, peaks=b"0" * 96), "the database claims 7 entries, but contains 15"),
    "a payload": (update(P).where(P.c.sequence == 13).values(payload=b"z"), "entry 13: its query was changed"),
    "a removed payload": (delete(P).where(P.c.sequence == 13), "entry 13: its query is gone, and the log"),
    "a mark": (delete(tables.kinds).where(tables.kinds.c.kind == "period"), "the table of kinds differs"),
    "what a request asked": (update(tables.requests).where(tables.requests.c.key == "k").values(secret=None),
                             "entry 12: what its request asked for is gone"),
    "the secret of a request": (update(tables.requests).values(secret=b"0" * 32), "the secret of its request was"),
    "the hash of a request": (update(tables.requests).values(digest=b"0" * 32), "its request was changed or removed"),
    "the caller of a request": (update(tables.requests).where(tables.requests.c.key == "k").values(caller="x"),
                                "entry 12: its request was changed"),
    "an empty salt": (update(L).where(L.c.sequence == 0).values(salt=b""), "entry 0: its lines or their salt"),
    "a request": (update(tables.requests).values(first=900), "its request was changed or removed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_every_change_by_hand_is_found(kind: str, filled: Ledger) -> None:
    change, expected = CHANGES[kind]
    run(filled, change)
    found = problems(filled)
    assert any(expected in text for text in found), found


def test_exchanged_entries_are_found(filled: Ledger) -> None:
    move = [update(L).where(L.c.sequence == a).values(sequence=b) for a, b in ((4, 99), (5, 4), (99, 5))]
    run(filled, *move)
    found = problems(filled)
    assert "entry 4: it was written as entry 5, and has been moved" in found
    run(filled, rebuild)
    assert "entry 4: it was written as entry 5, and has been moved" in problems(filled)


def test_an_inserted_entry_is_found(filled: Ledger) -> None:
    def copy_last(connection: Connection) -> None:
        row = connection.execute(select(L).where(L.c.sequence == 14)).one()
        connection.execute(insert(L).values({**row._asdict(), "sequence": 15}))

    run(filled, copy_last)
    assert any("it was written as entry 14, and has been moved" in text for text in problems(filled))
    run(filled, update(L).where(L.c.sequence == 15).values(sequence=-1))
    assert any("inserted before the beginning" in text for text in problems(filled))


def test_an_amount_that_the_policy_does_not_give_is_found_even_if_every_hash_fits(filled: Ledger) -> None:
    """An insider shifts a cent from one source to another, and makes the whole log fit."""

    def shift(about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        giver = next(each for each in rows if each["amount"] > 0)
        taker = next(each for each in rows if each is not giver)
        giver["amount"], taker["amount"] = giver["amount"] - 1, taker["amount"] + 1

    run(filled, change_entry(5, shift), rebuild)
    entry, period = [problem for problem in verify(filled, progress=False).problems if problem.sequence]
    assert (entry.sequence, period.sequence, period.span) == (5, 11, (0, 10))
    assert entry.text.startswith("its shares and amounts do not follow from its scores and its policy: blog has ")
    assert period.text.startswith("period 2026-11 does not follow from its entries: blog has ")


def test_an_interval_that_was_narrowed_is_found_even_if_every_hash_fits(filled: Ledger) -> None:
    run(filled, change_entry(11, lambda about, rows: rows[3].update(low=rows[3]["share"])), rebuild)
    assert problems(filled) == ["entry 11: the intervals of period 2026-11 do not follow from its entries"]


def test_degrees_of_freedom_that_lower_the_threshold_are_found_even_if_every_hash_fits(filled: Ledger) -> None:
    run(filled, change_entry(13, lambda about, rows: about.update(freedom=200)), rebuild)
    assert "entry 13: its standard errors do not follow from the spread of its runs" in problems(filled)


def test_what_differs_from_its_hash_is_not_paid_and_not_printed(filled: Ledger, tmp_path: Path) -> None:
    """An insider does not wait for the next verification: what was changed must not be closed or sent to anybody."""
    run(filled, change_entry(13, lambda about, rows: about.update(pot=10**9)))
    with pytest.raises(CreditError, match="entry 13 was changed since it was written"):
        close_period(filled, "2026-12")
    with pytest.raises(CreditError, match="entry 13 was changed since it was written"):
        filled.entry(13)


def test_an_entry_that_was_removed_or_hidden_is_not_left_out_of_a_period(filled: Ledger) -> None:
    run(filled, update(L).where(L.c.sequence == 13).values(kind="policy"))
    with pytest.raises(CreditError, match="entry 13 was changed since it was written"):
        close_period(filled, "2026-12")
    run(filled, update(L).where(L.c.sequence == 13).values(kind="credit"))
    run(filled, delete(L).where(L.c.sequence == len(filled) - 2))
    with pytest.raises(CreditError, match="is missing: run `imprint credit verify`"):
        close_period(filled, "2027-01")


def test_statements_of_a_log_that_differs_from_its_signed_head_are_not_written(filled: Ledger, tmp_path: Path) -> None:
    filled.sign_head(KEY)
    run(filled, rewrite(5, lambda about: about.update(query="other"), rehash=True))
    with pytest.raises(CreditError, match="is not in the log that was signed"):
        write_statements(filled, "2026-11", tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*.html"))


def test_statements_of_a_rewritten_log_are_not_written_while_the_database_has_an_earlier_head(
    filled: Ledger, tmp_path: Path
) -> None:
    filled.sign_head(KEY)
    run(filled, rewrite(4, lambda about: about.update(query="other")), rebuild)
    fill(filled, (1,))
    with tables.reading(filled.engine) as connection:
        state = credit_log.read_state(connection)
    forged = sign_head(KEY, filled.name, state.size, state.root, "2099-01-01T00:00:00.000000Z")
    with pytest.raises(CreditError, match="did not grow from the head of 15 entries"):
        write_statements(filled, "2026-11", tmp_path / "out", head=forged, progress=False)
    with pytest.raises(CreditError, match="the log was changed since it was written"):
        filled.sign_head(KEY)


def test_a_log_that_was_rewritten_as_a_whole_is_found_by_anyone_who_holds_an_earlier_head(filled: Ledger) -> None:
    """Nothing inside the database can show it: that is why heads are published."""
    held = filled.sign_head(KEY)
    run(filled, delete(tables.heads), rewrite(4, lambda about: about.update(query="other")), rebuild)
    assert problems(filled) == []
    assert problems(filled, [held]) == [
        f"a head of 15 entries was signed at {held.time}, with another root: one of entries 0 to 14 was changed, "
        "removed or inserted since"
    ]
    new = filled.sign_head(KEY)
    assert (new.log, new.size) == (held.log, held.size) and new.root != held.root
    assert not check_consistency(15, 15, held.root, new.root, [])


def test_a_log_that_was_cut_short_is_found_by_anyone_who_holds_an_earlier_head(filled: Ledger) -> None:
    held = filled.sign_head(KEY)
    cut = [delete(each).where(each.c.sequence >= 12) for each in (L, tables.payloads, tables.kinds)]
    run(filled, *cut, delete(tables.heads), delete(tables.requests).where(tables.requests.c.first >= 12), rebuild)
    assert problems(filled) == []
    assert "the log was cut short" in problems(filled, [held])[0]


def test_heads_of_another_key_or_another_log_do_not_hold(filled: Ledger, tmp_path: Path) -> None:
    filled.sign_head(Ed25519PrivateKey.generate())
    assert "was not signed with key" in problems(filled)[0]
    other = make_ledger(tmp_path / "other.db")
    head = other.sign_head(KEY)
    run(filled, delete(tables.heads))
    assert f"of another log: {other.name}" in problems(filled, [head])[0]


def test_a_growing_log_proves_that_it_only_grew(filled: Ledger) -> None:
    old = filled.sign_head(KEY)
    fill(filled, (5, 2))
    new = filled.sign_head(KEY)
    with tables.reading(filled.engine) as connection:
        found = prove_growth(old, new, credit_log.read_nodes(connection))
    proof = [bytes.fromhex(node) for node in found["proof"]]
    assert (found["old"], found["root"]) == (old.size, old.root.hex())
    assert check_consistency(old.size, new.size, old.root, new.root, proof)
    assert not check_consistency(old.size, new.size, new.root, new.root, proof)


def test_a_log_that_did_not_grow_from_the_published_heads_is_not_signed(filled: Ledger, tmp_path: Path) -> None:
    """An insider deletes the heads that the database keeps; those in the file are still compared before signing."""
    file = tmp_path / "heads.jsonl"
    filled.sign_head(KEY, file)
    run(filled, rewrite(3, lambda about: about.update(pot=10**12)), delete(tables.heads), rebuild)
    before = file.read_bytes()
    with pytest.raises(CreditError, match="the log did not grow from the head of"):
        filled.sign_head(KEY, file)
    assert file.read_bytes() == before and not filled.heads()


def test_a_shorter_log_and_another_log_are_not_published_to_a_file_of_heads(filled: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "heads.jsonl"
    publish_head(file, sign_head(KEY, filled.name, 10**6, b"0" * 32, "2020-01-01T00:00:00.000000Z"))
    with pytest.raises(CreditError, match="did not grow from the head of 1000000 entries"):
        filled.sign_head(KEY, file)
    with make_ledger(tmp_path / "other.db") as other, pytest.raises(CreditError, match="has heads of another log"):
        other.sign_head(KEY, file)


def test_only_the_last_line_of_a_file_of_heads_may_be_cut_short(filled: Ledger, tmp_path: Path) -> None:
    """A line that somebody spoilt in the middle must not hide the head that it was."""
    file, one, two = tmp_path / "heads.jsonl", filled.sign_head(KEY), filled.sign_head(KEY)
    lines = [json.dumps(head.to_json()) for head in (one, two)]
    file.write_text(f"{lines[0]}\n{lines[1][:-9]}")
    assert read_heads(file) == [one]
    publish_head(file, two)  # removes what a crash has left
    assert read_heads(file) == [one, two]
    file.write_text(f"{lines[0]}\n{lines[1]}")
    publish_head(file, two)
    assert read_heads(file) == [one, two, two]
    for text in (f"{lines[0][:-9]}\n{lines[1]}\n", f"{lines[0]}\n{lines[1][:-1]} \n"):
        file.write_text(text)
        with pytest.raises(CreditError, match="is not a file of signed heads: line"):
            read_heads(file)
        with pytest.raises(CreditError, match="is not a file of signed heads: line"):
            filled.sign_head(KEY, file)


def test_published_heads_are_read_again_and_half_a_line_is_not_a_head(filled: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "heads.jsonl"
    one = filled.sign_head(KEY, file)
    fill(filled, (1,))
    two = filled.sign_head(KEY, file)
    with file.open("a") as out:
        out.write('{"head": "cut sho')
    assert list(read_heads(file)) == [one, two] == filled.heads()
    publish_head(tmp_path / "other.jsonl", one)
    assert list(read_heads(tmp_path / "other.jsonl")) == [one]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"head": 1, "signature": ""}', '{"head": "{}", "signature": "!"}', "x"]
)
def test_what_is_no_head_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "heads.jsonl").write_text(text + "\n")
    with pytest.raises(CreditError):
        read_heads(tmp_path / "heads.jsonl")


def test_a_forged_head_is_refused(filled: Ledger) -> None:
    head = filled.sign_head(KEY)
    about = json.loads(head.content)
    forged = Head(encode({**about, "size": 3}), head.signature)
    with pytest.raises(CreditError, match="was not signed with key"):
        forged.check(KEY.public_key())


def test_a_log_of_several_tiles_proves_every_entry(tmp_path: Path) -> None:
    """256 leaves make a tile: here are nodes at level 8, and entries in the first, a middle and the last tile."""
    ledger = make_ledger(tmp_path / "credit.db")
    for seed in range(7):
        ledger.credit(make_result(100, seed=seed), EXPECTED)
    head = ledger.sign_head(KEY)
    with tables.reading(ledger.engine) as connection:
        assert {tuple(row)[:2] for row in connection.execute(select(tables.nodes))} == {(8, 0), (8, 1)}
        leaves, node = list(credit_log.read_leaves(connection, 0, head.size)), credit_log.read_nodes(connection)
        for sequence in (0, 5, 255, 256, 511, 512, 600, head.size - 1):
            proof = prove_inclusion(sequence, head.size, node)
            assert leaves[sequence].sequence == sequence
            assert check_inclusion(leaves[sequence].hash, sequence, head.size, proof, head.root)
            assert not check_inclusion(leaves[sequence - 1].hash, sequence, head.size, proof, head.root)
    assert problems(ledger) == []
    run(ledger, update(tables.nodes).where(tables.nodes.c.index == 1).values(hash=b"0" * 32))
    assert any("entries 256 to 511 do not match their stored tree node" in text for text in problems(ledger))


def test_lines_are_split_into_the_bytes_that_were_joined(ledger: Ledger) -> None:
    entry = ledger.credit(
        make_result(1, source_ids=("a\nb", "c", "ü", "\u2028"), source_names=("",) * 4), EXPECTED
    ).entries[0]
    assert ledger.entry(entry.sequence) == entry and len(entry.lines) == 4
    assert split_lines(None) == ()
    assert problems(ledger) == []


def test_code_that_an_insider_put_into_the_database_is_refused(filled: Ledger, place: str) -> None:
    """A trigger or a rule could change what is written after it was hashed, or write more than was asked."""
    name = tables.leaves.name
    codes = [f"CREATE RULE sneaky AS ON INSERT TO {name} DO ALSO DELETE FROM {tables.payloads.name}"]
    if tables.is_sqlite(filled.engine):
        codes = [
            f"CREATE TRIGGER sneaky AFTER INSERT ON {name} BEGIN DELETE FROM {tables.payloads.name}; END",
            f"CREATE VIEW imprint_sneaky AS SELECT * FROM {name}",
            f"CREATE INDEX sneaky ON {name} (time)",
        ]
    for code in codes:
        run(filled, lambda connection, code=code: connection.exec_driver_sql(code))
        with pytest.raises(
            CreditError, match=r"has a (trigger|rule|view|index) '(imprint_)?sneaky' that no ledger has"
        ):
            Ledger(place)
        kind, sneaky = code.split()[1:3]
        on = "" if tables.is_sqlite(filled.engine) else f" ON {name}"
        run(filled, lambda connection, code=f"DROP {kind} {sneaky}{on}": connection.exec_driver_sql(code))
    Ledger(place).close()
