"""Two versions of a model are compared from the command line, from saved attributions or from stores."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import About, Attribution, Changes, attribute, compare
from imprint.attribution.labels import Labels
from tests.attribution.test_changes import later, version
from tests.cli.commands import MODEL, TASK, Command, loaded
from tests.cli.forging import HOSTILE, harmless


@pytest.fixture
def saved(empty: None) -> tuple[Path, Path]:
    files = Path("june.safetensors"), Path("july.safetensors")
    for file, result in zip(files, (version(0), later(0, moved=5.0)), strict=True):
        result.save(file)
    return files


def test_saved_attributions_are_compared(saved: tuple[Path, Path], command: Command) -> None:
    shown = command("compare", *saved, "-o", "all.csv")
    assert shown.code == 0
    for words in (
        "beyond noise: 1 gained, 0 lost",
        "rank correlation of sources",
        "ranks differ most in query",
        "5 runs",
    ):
        assert words in " ".join(shown.out.split())
    assert "ranks differ" not in command("compare", saved[0], saved[0]).out
    with Path("all.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows[0]["source"] == "s0" and rows[0]["verdict"] == "gained" and len(rows) == 6
    assert "s0" in command("compare", *saved, "--top", "1").out
    values = command("compare", *saved, "--json", "--top", "2").values
    expected = compare(*map(Attribution.load, saved), k=2)
    assert isinstance(expected, Changes) and values == json.loads(json.dumps(expected.to_json()))
    assert values["k"] == 2 and [each["verdict"] for each in values["sources"]].count("gained") == 1


def test_stores_are_attributed_with_a_task_each(empty: None, command: Command) -> None:
    assert MODEL.count("nn.Linear(3, 3)") == 1
    Path("june.py").write_text(MODEL)
    Path("july.py").write_text(MODEL.replace("nn.Linear(3, 3)", "nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))"))
    for month in ("june", "july"):
        assert command("simulate", f"{month}.py:task", "--no-check", "-o", month).code == 0
    asked = ("compare", "june", "july", "--task", "june.py:task")
    found = command(*asked, "--second-task", "july.py:task", "--json").values
    refused = command(*asked)  # with the task of the earlier store for both
    assert refused.code == 1 and refused.err.startswith("error: ")
    results: list[Any] = []
    for month in ("june", "july"):
        at = loaded(Path(f"{month}.py"))
        results.append(attribute(at.task, month, at.queries, progress=False))
    assert found["sources"] == json.loads(json.dumps(compare(*results).to_json()["sources"]))
    assert "The noise of both versions must be known" in found["noise"]
    results[1].save("july.safetensors")
    mixed = command("compare", "june", "july.safetensors", "--task", "june.py:task", "--json").values
    assert mixed["sources"] == found["sources"]


def test_a_task_is_asked_for_and_never_taken_from_a_store(here: Path, command: Command) -> None:
    refused = command("compare", "runs/news", "runs/news")
    assert refused.code == 1 and "was made with --task model.py:task" in refused.err
    same = command("compare", "runs/news", "runs/news", *TASK)
    assert same.code == 0 and "both results are of the same store" in " ".join(same.out.split())


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("june.safetensors", "other.safetensors"), "different measurements, 'loss' (lower is better) and 'margin'"),
    (("june.safetensors", "nothing.safetensors"), "nothing.safetensors is not a saved attribution"),
    (("june.safetensors", "nothing"), "there is no folder nothing"),
    (("june.safetensors", "july.safetensors", "--signed-by", "key"), "--signed-by is for stores"),
    *(
        (("june.safetensors", "july.safetensors", f"--{option}", value), f"--{option} is for stores, and june.saf")
        for option, value in (
            *(("task", "a.py:task"), ("queries", "a.py:queries"), ("collate", "a.py:collate")),
            *(("readout", "jvp"), ("memory", "1GB"), ("device", "cpu")),
        )
    ),
    (("june", "july.safetensors", "--second-task", "a.py:t"), "--second-task is for stores, and july.safetensors is a"),
    (("june.safetensors", "july.safetensors", "-o", "all.txt"), "--out must end in .csv"),
]


@pytest.mark.parametrize(("given", "words"), WRONG)
def test_what_cannot_be_compared_is_named(
    given: tuple[str, ...], words: str, saved: tuple[Path, Path], command: Command
) -> None:
    labels = Labels(10, ("s0", "s1"), ("A", "B"), (1, 1), "margin", "higher")
    Attribution(labels, torch.ones(24, 2)).save("other.safetensors")
    refused = command("compare", *given)
    assert refused.code == 1 and words in refused.err


def test_names_of_others_are_shown_and_obeyed_by_nobody(empty: None, command: Command) -> None:
    about = (About(HOSTILE), About("[red]x"))
    for place, store in enumerate("ab"):
        labels = Labels(
            10,
            ("s0", "s1"),
            (HOSTILE, "=1+1"),
            (1, 1),
            "loss",
            "lower",
            fingerprints={"store": store},
            source_about=about,
        )
        Attribution(labels, torch.tensor([[1.0 + place, 2.0]])).save(f"{store}.safetensors")
    shown = command("compare", "a.safetensors", "b.safetensors", "-o", "all.csv")
    assert shown.code == 0 and harmless(shown.out) and "[red]x" in shown.out and "owned" in shown.out
    with Path("all.csv").open(newline="") as file:
        assert {row["name"] for row in csv.DictReader(file)} >= {"'=1+1"}
