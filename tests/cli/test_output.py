"""Results stand on standard output alone, and all else on standard error."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from imprint import Plan
from imprint.benchmarking.settings import digits
from imprint.cli.terminal import show_progress
from imprint.runtime.progress import Announcing
from tests.cli.commands import MODEL, Command


@pytest.mark.parametrize("name", ["check", "simulate", "attribute", "inspect", "verify"])
def test_json_stands_on_standard_output_alone(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    """Though the user's file prints something, and warns."""
    chatty = tmp_path / "chatty.py"
    chatty.write_text(f"import warnings\nprint('hello')\nwarnings.warn('a\\nb')\n{MODEL}")
    arguments: dict[str, tuple[object, ...]] = {
        "check": (f"{chatty}:task",),
        "simulate": (f"{chatty}:task", "-o", tmp_path / "store"),
        "attribute": ("runs/news", "--task", f"{chatty}:task"),
        "inspect": ("runs/news",),
        "verify": ("runs/news",),
    }
    found = command(name, *arguments[name], "--json")
    expected: dict[str, dict[str, object]] = {
        "check": {"ok": True, "sources": 3, "values": 12},
        "simulate": {"sources": 3, "n": 12, "path": str(tmp_path / "store")},
        "attribute": {"n": 12, "measure": "loss", "better": "lower", "question": "expected"},
        "inspect": {"sources": 3, "n": 12, "path": "runs/news"},
        "verify": {"sound": True, "path": "runs/news"},
    }
    assert expected[name].items() <= found.values.items()
    if name in ("check", "simulate", "attribute"):
        assert "hello\n" in found.err and "warning: a b\n" in found.err
    if name == "simulate":
        assert "Nothing stands in the way" in found.err


def test_the_demo_has_json_too(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "CHECKPOINTS", (1,))
    monkeypatch.setattr(digits, "PLAN", Plan(steps=1, lr=0.1))
    monkeypatch.setattr("imprint.benchmarking.demo.report.draw", lambda outcome, folder: {})
    monkeypatch.setattr("imprint.benchmarking.demo.report.write", lambda outcome, folder: folder / "report.html")
    values = command("demo", "--retrainings", 2, "--out", tmp_path / "demo", "--json").values
    assert values["report"] == str(tmp_path / "demo" / "report.html")
    assert {row["name"] for row in values["contributors"]} == set(digits.CONTRIBUTORS)
    assert len(values["statistics"]) == 4
    assert (values["question"], values["meaning"]) == ("expected", "expected: mean over trainings like this one")


@pytest.mark.parametrize("name", ["check", "simulate", "attribute"])
def test_whatever_the_users_code_prints_is_no_result(name: str, command: Command, here: Path, tmp_path: Path) -> None:
    """When it is loaded, when it makes something, and when it computes."""
    chatty = (
        "print('loading')\nsilent = task\n"
        "def loss(model, batch):\n    print('computing')\n    return silent.loss(model, batch)\n"
        "def task():\n    print('making')\n    return imprint.Task(silent.model, loss)\n"
    )
    (tmp_path / "chatty.py").write_text(MODEL + chatty)
    given = ("runs/news", "--task") if name == "attribute" else ("--out", tmp_path / "store")
    found = command(name, *given, f"{tmp_path}/chatty.py:task", "--json")
    assert isinstance(found.values, dict)
    assert all(f"{word}\n" in found.err for word in ("loading", "making", "computing"))


def test_a_terminal_is_shown_a_bar_and_a_log_gets_lines() -> None:
    shown = StringIO()
    with show_progress(Console(file=shown, force_terminal=True, width=100), "simulating") as advance:
        assert callable(advance)
        advance(3, 12)
    assert "simulating" in shown.getvalue() and "3/12" in shown.getvalue()
    with show_progress(Console(file=StringIO()), "simulating") as advance:
        assert advance is True


def test_a_bar_names_what_is_done_until_something_counts() -> None:
    for counted, named in ((0, True), (3, False)):
        shown = StringIO()
        with show_progress(Console(file=shown, force_terminal=True, width=100), "simulating") as advance:
            assert isinstance(advance, Announcing) and callable(advance)
            advance.announce("measuring, step 2 of [5]")
            advance(counted, 12)
        assert ("simulating: measuring, step 2 of [5]" in shown.getvalue().rsplit("\r", 2)[-2]) == named
