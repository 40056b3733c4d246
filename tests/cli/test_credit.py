"""`imprint keys`, `sign` and `credit`, from the first key to a checked statement and a tampered entry."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from tests.cli.commands import COMMANDS, MODEL, TASK, Command
from tests.credit.crediting import make_result

POLICY = 'name = "house rules"\nquestion = "expected"\nfallback = "by_size"\n'


@pytest.fixture
def folder(empty: Path) -> Path:
    """A folder with scores and a policy."""
    (empty / "policy.toml").write_text(POLICY)
    make_result(5).save(empty / "scores.safetensors")
    return empty


def run(command: Command, *arguments: object) -> str:
    done = command(*arguments)
    assert done.code == 0, done.err
    return done.out


def add(command: Command, *more: str) -> str:
    return run(command, "credit", "add", "-l", "credit.db", "scores.safetensors", "--policy", "policy.toml", *more)


@pytest.fixture
def ledger(folder: Path, command: Command) -> Path:
    run(command, "keys", "credit.key")
    run(command, "credit", "create", "-l", "credit.db", "--currency", "EUR", "--per-query", "0.5")
    add(command)
    return folder


@pytest.mark.parametrize("name", COMMANDS["credit"].commands)
def test_every_subcommand_teaches_by_an_example(name: str, command: Command) -> None:
    shown = run(command, "credit", name, "--help")
    for parameter in COMMANDS["credit"].commands[name].params:
        assert all(option in shown for option in parameter.opts if option.startswith("-"))
    assert f"imprint credit {name} " in shown.split("For example")[1]


def test_from_scores_to_a_statement_that_its_publisher_checks(ledger: Path, command: Command) -> None:
    assert "5 queries recorded: entries 8 to 12" in add(command)
    assert "entry" in run(command, "credit", "close", "-l", "credit.db", "2026-11").lower()
    head = json.loads(
        run(command, "credit", "head", "-l", "credit.db", "--key", "credit.key", "--publish", "heads.jsonl")
    )
    assert json.loads((ledger / "heads.jsonl").read_text()) == head
    assert "4 statements written to out" in run(
        command, "credit", "statements", "-l", "credit.db", "2026-11", "-o", "out"
    )
    shown = run(
        command, "credit", "check", "out/wire.jsonl", "--public-key", "credit.key.pub", "--heads", "heads.jsonl"
    )
    assert shown.startswith("holds: wire, 2026-11: ")
    values = json.loads(run(command, "credit", "check", "out/wire.jsonl", "--public-key", "credit.key.pub", "--json"))
    assert values["holds"] and values["entries"] == 10
    (ledger / "terms.toml").write_text('Payer = "Acme Ltd"\n"Write to" = "credit@acme.example"\n')
    one = ("--source", "times", "-o", "one", "--terms", "terms.toml")
    assert "1 statement written" in run(command, "credit", "statements", "-l", "credit.db", "2026-11", *one)
    assert "credit@acme.example" in (ledger / "one" / "times.html").read_text()
    shown = run(
        command, "credit", "verify", "-l", "credit.db", "--public-key", "credit.key.pub", "--heads", "heads.jsonl"
    )
    assert shown.startswith("verified: 14 entries and 1 signed head,")
    overview = json.loads(run(command, "credit", "show", "-l", "credit.db", "--json"))
    assert overview["entries"] == 14 and overview["periods"] == ["2026-11"]
    assert "2026-11" in run(command, "credit", "show", "-l", "credit.db")


def test_a_changed_amount_is_found(ledger: Path, command: Command) -> None:
    with sqlite3.connect(ledger / "credit.db") as database:
        lines = database.execute("SELECT lines FROM imprint_leaves WHERE sequence = 4").fetchone()[0]
        changed = lines.replace(b'"amount":', b'"amount":1')
        database.execute("UPDATE imprint_leaves SET lines = ? WHERE sequence = 4", (changed,))
    done = command("credit", "verify", "-l", "credit.db")
    assert done.code == 1 and "entry 4: its lines were changed" in done.out
    done = command("credit", "verify", "-l", "credit.db", "--json")
    assert done.code == 1 and json.loads(done.out)["problems"][0]["sequence"] == 4


def test_the_same_key_credits_nothing_twice(ledger: Path, command: Command) -> None:
    assert "5 queries recorded" in add(command, "--request-key", "a")
    assert "5 queries were recorded before" in add(command, "--request-key", "a")
    assert json.loads(add(command, "--request-key", "a", "--json"))["repeated"]
    done = command(
        "credit",
        "add",
        "-l",
        "credit.db",
        "scores.safetensors",
        "--policy",
        "policy.toml",
        "--request-key",
        "a",
        "--pot",
        "1",
    )
    assert done.code == 1 and "was used for another request" in done.err


def test_an_entry_is_shown_with_its_sources(ledger: Path, command: Command) -> None:
    shown = run(command, "credit", "show", "-l", "credit.db", "3")
    assert all(name in shown for name in ("times", "wire", "above_noise", "sizes validated", "0.5 EUR"))
    values = json.loads(run(command, "credit", "show", "-l", "credit.db", "3", "--json"))
    assert values["kind"] == "credit" and len(values["rows"]) == 4


def test_a_period_may_have_a_pot(folder: Path, command: Command) -> None:
    run(command, "credit", "create", "-l", "pots.db", "--currency", "EUR", "--smallest", "1")
    run(command, "credit", "add", "-l", "pots.db", "scores.safetensors", "--policy", "policy.toml")
    done = command("credit", "close", "-l", "pots.db", "p")
    assert done.code == 1 and "have no pot of their own" in done.err
    done = command("credit", "close", "-l", "pots.db", "p", "--pot", "120", "--until", "2999-01-01")
    assert done.code == 1 and "is in the future" in done.err
    assert command("credit", "close", "-l", "pots.db", "p", "--until", "tomorrow").code == 1
    assert "120 EUR" in run(command, "credit", "close", "-l", "pots.db", "p", "--pot", "120")


@pytest.mark.parametrize("amount", ["x", "-1", "0.0000001", "nan", "inf", ""])
def test_amounts_are_decimal_numbers(amount: str, folder: Path, command: Command) -> None:
    done = command("credit", "create", "-l", "credit.db", "--currency", "EUR", "--per-query", amount)
    assert done.code == 1 and "an amount" in done.err and not (folder / "credit.db").exists()


@pytest.mark.parametrize("text", ["", "name = 1", "[", 'name = "a"\nquestion = "both"', 'name = "a"'])
def test_a_policy_that_cannot_be_is_refused(text: str, ledger: Path, command: Command) -> None:
    (ledger / "other.toml").write_text(text)
    done = command("credit", "add", "-l", "credit.db", "scores.safetensors", "--policy", "other.toml")
    assert done.code == 1 and "Traceback" not in done.err


def test_a_policy_may_be_json(ledger: Path, command: Command) -> None:
    (ledger / "policy.json").write_text('{"name": "j", "question": "expected", "level": 0.9}')
    run(command, "credit", "add", "-l", "credit.db", "scores.safetensors", "--policy", "policy.json")
    (ledger / "policy.json").write_text("[]")
    assert command("credit", "add", "-l", "credit.db", "scores.safetensors", "--policy", "policy.json").code == 1


@pytest.mark.parametrize("amount", ["1_000", "２", "NaN", "1e3", "-1", " 1", "0.0000001", "1" * 13, "", "."])
def test_what_is_no_plain_amount_is_refused(amount: str, empty: Path, command: Command) -> None:
    done = command("credit", "create", "-l", "a.db", "--currency", "EUR", f"--per-query={amount}")
    assert done.code == 1 and "an amount is a number such as 0.002" in done.err and not (empty / "a.db").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("erase", "--entry", "99999999999999999999"),
        ("show", "99999999999999999999"),
        ("close", "p", "--until", "0001-01-01T00:00:00+23:59"),
        ("add", "scores.safetensors", "--policy", "long.json"),
        ("add", "scores.safetensors", "--policy", "deep.json"),
        ("add", "scores.safetensors", "--policy", "twice.json"),
        ("add", "scores.safetensors", "--policy", "long.toml"),
        ("add", "scores.safetensors", "--policy", "deep.toml"),
        ("add", "scores.safetensors", "--policy", "pipe.toml"),
        ("statements", "p", "--out", "out", "--terms", "pipe.toml"),
        ("verify", "--heads", "pipe.toml"),
    ],
    ids=" ".join,
)
def test_odd_values_and_files_end_in_a_sentence(arguments: tuple[str, ...], ledger: Path, command: Command) -> None:
    fields = '"name": "a", "question": "expected"'
    (ledger / "long.json").write_text(f'{{{fields}, "version": {"9" * 5000}}}')
    (ledger / "deep.json").write_text("[" * 100_000)
    (ledger / "twice.json").write_text(f'{{{fields}, "question": "this_run"}}')
    (ledger / "long.toml").write_text(f"version = {'9' * 5000}")
    (ledger / "deep.toml").write_text("a = " + "[" * 100_000)
    os.mkfifo(ledger / "pipe.toml")
    done = command("credit", *arguments, "-l", "credit.db")
    assert done.code == 1 and "Traceback" not in done.err and done.err.strip(), done.err


def test_the_ledger_may_be_named_by_the_environment(
    ledger: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IMPRINT_LEDGER", "credit.db")
    assert "0.5 EUR per query" in run(command, "credit", "show")


def test_a_store_is_signed_scored_credited_and_disputed(empty: Path, command: Command) -> None:
    (empty / "model.py").write_text(MODEL)
    (empty / "policy.toml").write_text('name = "p"\nquestion = "expected"\nfallback = "by_size"\n')
    run(command, "simulate", "model.py:task", "--out", "store")
    run(command, "keys", "credit.key")
    signed = ("--signed-by", "credit.key.pub")
    done = command("attribute", "store", *TASK, *signed)
    assert done.code == 1 and "is not signed. It must be signed with key" in done.err
    run(command, "sign", "store", "--key", "credit.key")
    assert "match their checksums" in run(command, "verify", "store", *signed)
    run(command, "attribute", "store", *TASK, *signed, "--out", "scores.safetensors")
    run(command, "credit", "create", "-l", "credit.db", "--currency", "EUR", "--per-query", "1", *signed)
    policy = ("-l", "credit.db", "--policy", "policy.toml")
    done = command("credit", "add", "scores.safetensors", *policy)  # anybody could have written this file
    assert done.code == 1 and "credits only stores that the key" in done.err
    done = command("credit", "add", "store", *policy, *TASK)
    assert done.code == 1 and "credits only stores that the key" in done.err
    assert "2 queries recorded: entries 3 to 4" in run(
        command, "credit", "add", "store", *policy, *TASK, *signed, "--retention-days", "30"
    )
    assert "entry 3 agrees" in run(command, "credit", "dispute", "-l", "credit.db", "3", "store", *TASK, "--note")
    assert "1 query erased" in run(command, "credit", "erase", "-l", "credit.db", "--entry", "3")
    assert "0 queries erased" in run(command, "credit", "erase", "-l", "credit.db", "--expired")
    assert command("credit", "erase", "-l", "credit.db").code == 1
    done = command("credit", "dispute", "-l", "credit.db", "3", "store", *TASK)
    assert done.code == 1 and "was erased" in done.err
    run(command, "credit", "verify", "-l", "credit.db")
