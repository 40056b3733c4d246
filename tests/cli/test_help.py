"""Help, version and completion."""

import re

import pytest

import imprint
from tests.cli.commands import COMMANDS, Command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_every_option_and_an_example(name: str, command: Command) -> None:
    shown = command(name, "--help")
    assert shown.code == 0
    for parameter in COMMANDS[name].params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert option in shown.out
    assert f"imprint {name} " in shown.out.split("For example")[1]


def test_help_lists_the_commands(command: Command) -> None:
    assert set(COMMANDS) == {
        *("demo", "check", "simulate", "update", "drop", "merge", "attribute", "inside", "compare", "suspects"),
        *("inspect", "describe", "verify", "validate"),
        *("export", "retrain", "evaluate", "bench", "sweep", "keys", "sign", "access", "credit", "serve"),
    }
    for arguments in ((), ("--help",)):
        assert all(re.search(rf"^│ {name} ", command(*arguments).out, re.MULTILINE) for name in COMMANDS)


def test_the_version_is_that_of_the_library(command: Command) -> None:
    assert command("--version") == (0, f"imprint {imprint.__version__}\n", "")


@pytest.mark.parametrize(
    ("shell", "words"), [("bash", "complete -o"), ("zsh", "#compdef imprint"), ("fish", "complete")]
)
def test_shells_are_told_how_to_complete(
    shell: str, words: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # so that the shell is ours to name
    script = command("--show-completion", shell)
    assert script.code == 0
    assert words in script.out and "_IMPRINT_COMPLETE" in script.out


def test_commands_are_completed(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_IMPRINT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "imprint sim")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert command() == (0, "simulate\n", "")
