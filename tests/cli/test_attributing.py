"""What `attribute` shows and writes is what the library finds."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Attribution, attribute
from tests.cli.commands import MODEL, TASK, Command, loaded


def test_attributions_as_csv_safetensors_and_json_are_those_of_the_library(
    command: Command, here: Path, tmp_path: Path
) -> None:
    model = loaded(here / "model.py")
    expected = attribute(model.task, "runs/news", model.queries, progress=False)
    values = command("attribute", "runs/news", *TASK, "--out", tmp_path / "scores.csv", "--json").values
    assert command("attribute", "runs/news", *TASK, "--out", tmp_path / "scores.safetensors").code == 0

    saved = Attribution.load(tmp_path / "scores.safetensors")
    assert torch.equal(saved.scores, expected.scores) and saved.labels == expected.labels

    rows = list(csv.DictReader((tmp_path / "scores.csv").open(newline="")))
    assert len(rows) == expected.scores.numel()
    for row in rows:
        column = expected.labels.source_ids.index(row["source"])
        assert float(row["score"]) == float(expected.scores[int(row["query"]), column])
        assert float(row["removal_effect"]) == float(expected.removal_effect[int(row["query"]), column])
        assert (row["question"], row["distinguishable"], row["estimate"]) == ("expected", "", "False")
        assert row["standard_error"] == ""  # of one checkpoint nothing is known

    assert values == json.loads(json.dumps(expected.top(5).to_json()))


def test_the_first_sources_are_shown_in_the_order_that_is_asked_for(command: Command, here: Path) -> None:
    model = loaded(here / "model.py")
    for order in ("magnitude", "raises", "lowers"):
        expected = attribute(model.task, "runs/news", model.queries, top=2, by=order, progress=False)
        shown = command("attribute", "runs/news", *TASK, "--top", 2, "--by", order)
        assert shown.code == 0, shown.err
        assert (
            "Change of loss if the source were removed: + means the source helps\n"
            "expected: mean over trainings like this one\n"
        ) in shown.out
        unknown = "standard errors unknown: one checkpoint of one run says nothing about what another seed would change"
        assert f"\n{unknown}\n" in shown.out
        mean, each = shown.out.split("Change of loss")
        assert _names(each) == [credit.name for credits in expected for credit in credits]
        effects = attribute(model.task, "runs/news", model.queries, progress=False).mean()
        assert _names(mean) == [credit.name for credit in effects.top(2, order)[0]]


def _names(table: str) -> list[str]:
    return re.findall(r"│ (times|post|\[blog\]) +│", table)


def test_a_measurement_keeps_its_name(command: Command, here: Path, tmp_path: Path) -> None:
    measured = "def logP(model, batch):\n    return model(batch[0])[:, 0]\n"
    task = "task = imprint.Task(task.model, task.loss, measure=logP)\n"
    (tmp_path / "model.py").write_text(MODEL + measured + task)
    shown = command("attribute", "runs/news", "--task", f"{tmp_path}/model.py:task")
    assert "\nChange of logP if the source were removed\n" in shown.out


@pytest.mark.parametrize("readout", ["jvp", "central", "gradient"])
def test_readouts_are_chosen_by_name(readout: str, command: Command, here: Path) -> None:
    found = command("attribute", "runs/news", *TASK, "--readout", readout, "--batch-size", 1, "--json").values
    assert found["details"]["readout"] == readout


def test_names_of_sources_are_shown_as_they_are(command: Command, empty: Path) -> None:
    named = MODEL.replace('"times"', '":fire:"').replace('"post"', '"[bold]b[/bold]"')
    (empty / "model.py").write_text(named)
    made = command("simulate", "model.py:task", "-o", "store")
    assert made.code == 0 and ":fire:" in made.out
    shown = command("attribute", "store", *TASK).out
    assert ":fire:" in shown and "[bold]b[/bold]" in shown


def test_scores_are_written_whole_or_not_at_all(
    command: Command, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scores.csv").write_text("of yesterday")
    calls: list[object] = []

    def sudden(self: Attribution, *arguments: Any) -> Any:
        calls.append(arguments)
        if arguments == (3,):  # all sources, for the file
            raise KeyboardInterrupt
        return original(self, *arguments)

    original = Attribution.top
    monkeypatch.setattr(Attribution, "top", sudden)
    assert command("attribute", "runs/news", *TASK, "--top", 2, "--out", tmp_path / "scores.csv").code == 130
    assert (3,) in calls
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("scores.csv", "of yesterday")]


def test_queries_may_be_named_in_a_configuration_file(command: Command, here: Path, tmp_path: Path) -> None:
    (tmp_path / "ask.py").write_text("import torch\nasked = (torch.ones(15, 3), torch.zeros(15).long())\n")
    (tmp_path / "ask.toml").write_text('queries = "ask.py:asked"\n')
    given = ("attribute", "runs/news", *TASK, "--config", tmp_path / "ask.toml")
    assert len(command(*given, "--json").values["queries"]) == 15
    assert command(*given).out.endswith("… and 3 more queries: write all of them with --out.\n")
