"""The page about the command line: its commands run as they stand, and it names every option."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from imprint import Plan
from imprint.benchmarking.settings import digits
from tests.cli.commands import COMMANDS, Command, loaded

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")


def test_every_command_of_the_page_works(
    command: Command, empty: Path, small_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one folder, in order; a block is the file that its first line names, if it does."""
    monkeypatch.setattr(digits, "CHECKPOINTS", (1,))
    monkeypatch.setattr(digits, "PLAN", Plan(steps=300, lr=0.1))
    shutil.copytree(ROOT / "examples", empty / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    example, plan = empty / "examples" / "command_line.py", "Plan(steps=100)"
    assert plan in example.read_text()  # the numbers are not the subject, and tests of the examples look at them
    example.write_text(example.read_text().replace(plan, "Plan(steps=10, lr=0.1)"))
    for name, content in re.findall(r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE, re.DOTALL):
        (empty / name).write_text(content)
    for name in set(re.findall(r"-c (\S+\.safetensors)", PAGE)):  # what the reader's training has kept
        save_file(loaded(empty / "my_model.py").task().model.state_dict(), empty / name)
    lines = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    commands = [
        shlex.split(line.removeprefix("$ imprint "), comments=True) for line in lines if line.startswith("$ imprint ")
    ]
    assert {words[0] for words in commands} >= set(COMMANDS) - {"demo", "serve"}
    commands = [words for words in commands if "language" not in " ".join(words)]  # tests/test_examples.py runs those
    for words in commands:
        done = command(*words)
        assert done.code == 0, f"imprint {' '.join(words)}\n{done.err}"


def test_the_page_names_every_option_and_every_setting(command: Command) -> None:
    from imprint.cli.experiment import Experiment

    options = {
        option for name in COMMANDS if name not in ("demo", "serve") for p in COMMANDS[name].params for option in p.opts
    }
    for option in options:
        if option.startswith("--") and option != "--help":
            assert f"`{option}" in PAGE, option
    for setting in vars(Experiment()):
        assert f"`{setting}`" in PAGE, setting
