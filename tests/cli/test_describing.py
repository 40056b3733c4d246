"""Owners, licences and addresses from the command line, and what a terminal and a page make of them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from imprint import About, Attribution, Store
from imprint.cli.experiment import Experiment
from tests.cli.commands import MODEL, TASK, Command
from tests.cli.forging import HOSTILE, harmless

OWNERS = "source,owner,licence,url\ntimes,The Times,CC0,https://times.example\n[blog],Bob [red],,\n"
CROISSANT = {"@type": "sc:Dataset", "name": "the post", "creator": {"name": "Post Inc."}, "license": "MIT"}


@pytest.fixture
def files(empty: None, tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "owners.csv").write_text(OWNERS)
    (tmp_path / "post.json").write_text(json.dumps(CROISSANT))
    return tmp_path


def simulate(command: Command, *more: str) -> Any:
    return command("simulate", "model.py:task", "--no-check", "-o", "news", *more)


def test_owners_come_with_a_simulation_and_are_shown_everywhere(files: Path, command: Command) -> None:
    made = simulate(command, "--about", "owners.csv", "--about", "post=post.json", "--json").values
    assert made["described"] == 3 and made["owners"] == {"Bob [red]": 1, "Post Inc.": 1, "The Times": 1}
    shown = command("inspect", "news").out
    assert "3 of 3; owners: " in shown and "Bob [red] (1)" in shown and "licences: MIT (1), CC0 (1)" in shown
    values = command("inspect", "news", "--json").values
    assert values["about"]["times"] == {"owner": "The Times", "licence": "CC0", "url": "https://times.example"}
    assert {"owner", "licence", "url"} <= values["largest_sources"][0].keys()
    shown = command("attribute", "news", *TASK, "-o", "scores.csv").out
    assert "owner" in shown and "Bob [red]" in shown and "Post Inc." in shown
    with Path("scores.csv").open(newline="") as file:
        rows = {row["source"]: row["owner"] for row in csv.DictReader(file)}
    assert rows == {"times": "The Times", "post": "Post Inc.", "[blog]": "Bob [red]"}
    listed = command("attribute", "news", *TASK, "--json", "-o", "scores.safetensors").values
    assert {"owner", "licence", "url"} <= listed["queries"][0][0].keys()
    assert About("Post Inc.", "MIT") in Attribution.load("scores.safetensors").labels.source_about


def test_a_store_is_described_later(files: Path, command: Command) -> None:
    assert simulate(command).code == 0
    assert "owner" not in command("attribute", "news", *TASK).out + command("inspect", "news").out
    done = command("describe", "news", "owners.csv", "post=post.json")
    assert done.code == 0 and done.out.startswith("news: 3 of 3; owners: ")
    assert command("describe", "news", "owners.csv", "--json").values["about"]["post"]["licence"] == "MIT"
    assert len(Store("news").description.changes) == 1


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("post.json",), "there is no source 'the post'; did you mean post"),
    (("owners.csv", "times=post.json"), "source 'times' is described twice, in owners.csv and in post.json"),
    (("nothing.csv",), "nothing.csv cannot be read: No such file"),
    (("post=owners.csv",), "is a table, which names its sources itself"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_mistakes_are_named_before_anything_is_written(
    given: tuple[str, ...], words: str, files: Path, command: Command
) -> None:
    refused = simulate(command, *(word for file in given for word in ("--about", file)))
    assert refused.code == 1 and words in refused.err and not Path("news").exists()


def test_a_signature_asks_to_be_renewed(files: Path, command: Command) -> None:
    for words in (("keys", "key"), ("simulate", "model.py:task", "--no-check", "-o", "news")):
        assert command(*words).code == 0
    assert command("sign", "news", "--key", "key").code == 0
    described = command("describe", "news", "owners.csv")
    assert described.code == 0
    for line in ("inspect news", "describe news owners.csv"):
        refused = command(*line.split(), "--signed-by", "key.pub")
        assert refused.code == 1 and "If you changed it, sign it again." in refused.err
    assert command("sign", "news", "--key", "key").code == 0
    assert command("verify", "news", "--signed-by", "key.pub").code == 0


def test_a_configuration_file_names_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('about = ["owners.csv", "post=data/post.json"]\n')
    assert Experiment.from_toml(tmp_path / "a.toml").about == (
        str(tmp_path / "owners.csv"),
        f"post={tmp_path / 'data/post.json'}",
    )


def test_a_terminal_is_shown_hostile_owners_and_obeys_none(files: Path, command: Command) -> None:
    with Path("owners.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["source", "owner", "licence"], ["times", HOSTILE, "=1+1"], ["post", "[red]x", HOSTILE]]
        )
    assert simulate(command, "--about", "owners.csv").code == 0
    shown = [command("inspect", "news").out, command("attribute", "news", *TASK, "-o", "scores.csv").out]
    shown.append(command("describe", "news", "owners.csv").out)
    assert all(harmless(text) and "owned" in text for text in shown) and "[red]x" in shown[1]
    with Path("scores.csv").open(newline="") as file:
        assert {row["licence"] for row in csv.DictReader(file)} >= {"'=1+1", ""}
