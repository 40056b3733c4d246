"""`imprint export` makes the exports that the library makes."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

from imprint.cli.commands.export import export as command
from imprint.errors import ConfigurationError
from imprint.export import Export
from tests.export import models


def test_the_command_exports_and_tells_of_the_self_test(tmp_path: Path) -> None:
    app, arguments = _command(tmp_path)
    arguments += ["-s", "site/1", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    told = json.loads(result.stdout)
    assert told["sources"] == ["site/1"] and told["self_test"]["central"] < 1e-4
    assert told["gains"] == Export.open(tmp_path / "x").gains.tolist()
    again = CliRunner().invoke(app, [*arguments[:2], str(tmp_path / "y"), *arguments[3:-1]], catch_exceptions=False)
    assert "self-test on 4 queries" in again.stdout
    assert Export.open(tmp_path / "y").ids == ["site/1"]


@pytest.mark.parametrize("option", [["--dtype", "bfloat16"], ["--base", "gpt2"]])
def test_the_command_refuses_what_a_graph_cannot_follow(option: list[str], tmp_path: Path) -> None:
    app, arguments = _command(tmp_path)
    with pytest.raises(ConfigurationError, match="apply to --format peft"):
        CliRunner().invoke(app, [*arguments, "--format", "onnx", *option], catch_exceptions=False)


def test_the_command_takes_the_name_of_the_plain_model(tmp_path: Path) -> None:
    models.gpt2().save_pretrained(tmp_path / "plain")
    app, arguments = _command(tmp_path)
    CliRunner().invoke(app, [*arguments, "--base", str(tmp_path / "plain")], catch_exceptions=False)
    assert Export.open(tmp_path / "x").model == str(tmp_path / "plain")


def _command(folder: Path) -> tuple[Typer, list[str]]:
    """`imprint export` alone, and its arguments for an export to `folder/x`."""
    place = folder / "objects.py"
    place.write_text(
        'from tests.export import models\n\ntask = models.prepared("gpt2")[0]\nqueries = models.queries()\n'
    )
    app = Typer()
    app.command()(command)
    _, store = models.prepared("gpt2")
    return app, [str(store.path), "--out", str(folder / "x"), "--task", f"{place}:task"]
