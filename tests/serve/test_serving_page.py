"""The page about the service names every setting, route and figure, and its examples work."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from typer.main import get_command

from imprint.cli.app import app as commands
from imprint.serve.access import Access
from imprint.serve.app import create_app
from imprint.serve.metrics import Metrics
from imprint.serve.settings import Settings
from tests.cli.commands import COMMANDS
from tests.serve.fake_service import Reply, serving
from tests.serve.news import News, make_ledger

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def find_rows(heading: str) -> list[str]:
    """The first cells of the table with a heading."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0].splitlines()[2:]
    return [line.split(" | ")[0] for line in table]


def test_every_setting_is_listed() -> None:
    listed = [name for row in find_rows("setting") for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(Settings))


def test_every_option_is_named() -> None:
    options = {option for parameter in COMMANDS["serve"].params for option in parameter.opts if option[:2] == "--"}
    assert len(options) > 8
    assert [option for option in options if not re.search(rf"{option}\b", PAGE)] == []


def test_every_address_of_the_api_is_listed(news: News, tmp_path: Path) -> None:
    with make_ledger(tmp_path / "credit.db") as ledger:
        service, access = news.serve(ledger), Access(tmp_path / "access.db")
        app = create_app(Settings(metrics=""), service, access)
        known = set(app.openapi()["paths"])
        service.close()
        access.close()
    listed = {path for row in find_rows("address") for path in re.findall(r"`(?:GET )?(/[^`]+)`", row)}
    assert listed | {"/v1/attributions"} == known


def test_every_figure_that_is_named_exists() -> None:
    known = {name for family in Metrics().registry.collect() for name in (family.name, f"{family.name}_total")}
    named = set(re.findall(r"`(imprint_[a-z_]+)", PAGE))
    assert len(named) > 4 and named <= known


def test_the_example_of_the_client_prints_effects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.key").write_text("imprint_" + "k" * 43 + "\n")
    (code,) = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
    with serving() as service:
        exec(compile(code.replace("http://127.0.0.1:8080", service.url), "docs/serving.md", "exec"), dict[str, Any]())
    assert capsys.readouterr().out == "Elm -0.25 0.125 0.5\n"
    assert service.asked[0].headers["idempotency-key"]


@pytest.mark.parametrize("line", re.findall(r"^(?:\$ |ExecStart=\S+/)imprint (.*?)(?: >.*)?$", PAGE, re.MULTILINE))
def test_every_command_is_one(line: str) -> None:
    command: Any = get_command(commands)
    words, context = line.split(), click.Context(command)
    while hasattr(command, "get_command"):
        command = command.get_command(context, words.pop(0))
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= options


def test_the_container_runs_as_a_user_of_its_own_and_writes_to_one_folder() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert re.search(r"^USER imprint$", text, re.MULTILINE) and re.search(r"^VOLUME /state$", text, re.MULTILINE)
    variables = re.findall(r"IMPRINT_SERVE_(\w+)=", text)
    assert {name.lower() for name in variables} <= {field.name for field in dataclasses.fields(Settings)}


def test_the_health_check_of_the_container_asks_the_port_that_it_listens_on() -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    default = re.search(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert default is not None and default[1] == "serve,language" and "/src[$EXTRAS]" in text
    command = re.search(r"HEALTHCHECK .*\\\n +CMD (\[.*\])$", text, re.MULTILINE)
    assert command is not None
    _, _, program = json.loads(command[1])
    with serving(Reply()) as server:
        environment = {**os.environ, "IMPRINT_SERVE_PORT": server.url.rpartition(":")[2]}
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert [asked.path for asked in server.asked] == ["/readyz"]
