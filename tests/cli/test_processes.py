"""Commands that fail or are stopped, some in a process of their own."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from imprint import Store
from imprint.simulation.engines.tangent import Tangent
from tests.cli.commands import MODEL, Command, imprints

PROCESS = (sys.executable, "-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
           "from imprint.cli.app import main; main()")  # fmt: skip


def test_no_traceback_reaches_the_terminal(here: Path) -> None:
    found = subprocess.run([*PROCESS, "verify", "nowhere"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, "")
    assert re.fullmatch(r"error: there is no folder nowhere\.\n", found.stderr)


@pytest.mark.system
def test_ctrl_c_says_how_to_go_on_and_the_same_command_ends_in_the_same_imprints(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    given = ("simulate", "model.py:task", "-p", "steps=60", "--memory", "2kB", "--no-check", "--out")
    assert command(*given, "whole").code == 0
    assert len(imprints("whole")) == 3  # one source at a time, so that there is something between which to stop

    with subprocess.Popen(
        [*PROCESS, *given, "broken"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        while not Path("broken/checkpoint-000/imprints-00000.safetensors").exists() and run.poll() is None:
            time.sleep(0.01)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate()
    assert run.returncode == 130
    assert not out and "the same call again resumes the simulation in broken" in err
    assert "Traceback" not in err and "broken holds an unfinished simulation" in command("inspect", "broken").err

    assert command(*given, "broken").code == 0
    assert imprints("broken") == imprints("whole")
    assert Store("broken").manifest.cost.resumed
    assert "since it was resumed" in command("inspect", "broken").out


def test_ctrl_c_before_anything_is_finished_leaves_nothing(
    command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "model.py").write_text(MODEL)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Tangent, "settle", interrupted)
    stopped = command("simulate", "model.py:task", "-o", "runs/news", "--no-check")
    assert stopped == (130, "", "stopped before the first sources were finished: the same command will start over\n")
    assert not (empty / "runs/news").exists()


def test_ctrl_c_keeps_the_steps_that_were_chosen(
    command: Command, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (empty / "model.py").write_text(MODEL)

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    given = ("simulate", "model.py:task", "-o", "runs/news", "-p", "lr=auto", "--no-check")
    with monkeypatch.context() as patch:
        patch.setattr("imprint.simulation.work.Simulation._simulate", interrupted)
        stopped = command(*given)
    assert stopped.code == 130 and "starts over" not in stopped.err
    assert (empty / "runs/news/unfinished.json").is_file()
    monkeypatch.setattr(Tangent, "settle", interrupted)  # not to be chosen again
    assert command(*given).code == 0
