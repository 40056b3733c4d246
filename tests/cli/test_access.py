"""`imprint access`: keys that are made, listed and revoked from a terminal, and then work in a service."""

import re
from pathlib import Path

import pytest
from sqlalchemy import inspect

from imprint.cli.commands.access import parse_span
from imprint.errors import ConfigurationError
from imprint.serve.access import Access
from tests.cli.commands import COMMANDS, Command
from tests.serve.news import make_ledger

PLACE = ("--access", "keys.db")


@pytest.mark.parametrize("name", COMMANDS["access"].commands)
def test_every_subcommand_teaches_by_an_example(name: str, command: Command) -> None:
    shown = command("access", name, "--help")
    assert shown.code == 0
    for parameter in COMMANDS["access"].commands[name].params:
        assert all(option in shown.out for option in parameter.opts if option.startswith("-"))
    assert f"imprint access {name}" in shown.out.split("For example")[1]


def test_standard_output_is_the_key_alone_and_the_key_works(command: Command, empty: Path) -> None:
    made = command("access", "create", "times", "--role", "publisher", "--source", "times", "--source", "post", *PLACE)
    assert made.code == 0 and re.fullmatch(r"imprint_[A-Za-z0-9_-]{43}\n", made.out)
    assert "shown this once" in made.err and made.out.strip() not in made.err
    with_key = Access(empty / "keys.db")
    identity = with_key.identify_key(made.out.strip())
    with_key.close()
    assert identity is not None and identity.sources == ("times", "post")


def test_keys_are_listed_with_their_states(command: Command, empty: Path) -> None:
    command("access", "create", "app", "--role", "query", "--expires", "90d", *PLACE)
    command("access", "create", "old", "--role", "auditor", *PLACE)
    assert command("access", "revoke", "old", *PLACE) == (0, f"old is revoked in {empty / 'keys.db'}.\n", "")
    lines = command("access", "list", *PLACE).out.splitlines()
    rows = {
        words[0]: words for line in lines if (words := re.findall(r"[^\s│┃]+", line)) and words[0] in ("app", "old")
    }
    assert rows["app"][-1] == "valid" and rows["old"][-1] == "revoked" and lines[0] == f"keys in {empty / 'keys.db'}"


def test_a_key_is_made_listed_and_revoked_in_a_database_that_is_named(command: Command, empty: Path) -> None:
    place = empty / "imprint-access.db"
    assert f"in {place}. It is shown" in command("access", "create", "app", "--role", "query").err
    assert command("access", "list").out.startswith(f"keys in {place}\n")
    assert command("access", "revoke", "app").out == f"app is revoked in {place}.\n"


@pytest.mark.parametrize("words", [("list",), ("revoke", "app")])
def test_a_database_without_keys_is_refused_and_left_as_it_is(
    command: Command, empty: Path, words: tuple[str, ...]
) -> None:
    with make_ledger(empty / "credit.db") as ledger:
        for name in ("typo.db", "credit.db"):
            done = command("access", *words, "--access", name)
            assert done.code == 1 and f"there are no keys in {empty / name}: `imprint serve` prints where" in done.err
        assert not any(name.startswith("access") for name in inspect(ledger.engine).get_table_names())
    assert not (empty / "typo.db").exists()


def test_the_environment_names_the_database(command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IMPRINT_SERVE_ACCESS", str(empty / "elsewhere.db"))
    assert command("access", "create", "app", "--role", "query").code == 0
    assert [file.name for file in empty.glob("*.db")] == ["elsewhere.db"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("create", "app", "--role", "boss"), "a role is one of"),
        (("create", "app", "--role", "publisher"), "a publisher needs the ids of its sources"),
        (("create", "a b", "--role", "query"), "the name of a key"),
        (("create", "app", "--role", "query", "--expires", "soon"), "such as 12h, 90d or 52w"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    command: Command, empty: Path, words: tuple[str, ...], reason: str
) -> None:
    done = command("access", *words, *PLACE)
    assert done.code == 1 and done.err.startswith("error: ") and reason in done.err and not done.out


def test_a_name_that_no_key_has_is_not_revoked(command: Command, empty: Path) -> None:
    command("access", "create", "app", "--role", "query", *PLACE)
    done = command("access", "revoke", "ap", *PLACE)
    assert done.code == 1 and "there is no key" in done.err and not done.out


@pytest.mark.parametrize("text", ["", "90", "d", "0d", "-1d", "1.5d", "90 d", "90D", "99999w", "٣d"])
def test_a_span_is_a_number_of_hours_days_or_weeks(text: str) -> None:
    with pytest.raises(ConfigurationError, match="12h, 90d or 52w"):
        parse_span(text)
