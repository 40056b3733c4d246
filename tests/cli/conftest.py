"""Commands that run as in a process of their own, and the folders that they run in."""

import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from imprint.cli.app import app, main
from tests.benches import little_digits
from tests.cli.commands import MODEL, Command, Finished


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line as a process of its own would: with nothing loaded yet, and all it changes put back."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)  # the program is imprint, not python -m pytest
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments: object) -> Finished:
        for name in [name for name in sys.modules if name.startswith("imprint_experiment_")]:
            del sys.modules[name]
        monkeypatch.setattr(sys, "argv", ["imprint", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        assert code is None or isinstance(code, int)
        return Finished(code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.py and the store runs/news, which a command has made there."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "model.py").write_text(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        result = CliRunner().invoke(app, ["simulate", "model.py:task", "--out", "runs/news"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def here(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of digits in a form that takes seconds."""
    monkeypatch.setattr("imprint.cli.commands.bench.load_protocol", lambda name, device: little_digits())
