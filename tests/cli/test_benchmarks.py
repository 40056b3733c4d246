"""What `bench` and `sweep` leave, and what they refuse."""

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from imprint.benchmarking.sweep import GRID
from tests.cli.commands import Command


def test_a_benchmark_leaves_a_table_a_picture_and_json(command: Command, empty: Path, small_digits: None) -> None:
    found = command("bench", "digits", "--runs", 1, "--out", "bench/digits", "--json").values
    assert found == json.loads(Path("bench/digits/results.json").read_text())
    assert found["benchmark"] == "digits" and list(found["methods"]) == ["Imprint"]
    assert found["methods"]["Imprint"]["lds"]["low"] < found["methods"]["Imprint"]["lds"]["value"] < 1
    assert "| Imprint |" in Path("bench/digits/results.md").read_text()
    assert Path("bench/digits/results.png").read_bytes().startswith(b"\x89PNG")

    shown = command("bench", "digits", "--runs", 1, "-o", "bench/digits")  # all is there
    assert shown.code == 0 and "Imprint" in shown.out and "A perfect predictor would reach" in shown.out
    assert "Written to bench/digits: results.md, results.png, results.json." in shown.err

    swept = command("sweep", "digits", "--checkpoint", 1, "--directions", 5, "-o", "bench/digits", "--json").values
    assert len(swept) == len(GRID) and {point["steps"] for point in swept} >= {1, 3000, None}
    assert Path("bench/digits/sweep-1-5.png").read_bytes().startswith(b"\x89PNG")
    best = command("sweep", "digits", "--checkpoint", 1, "--directions", 5, "-o", "bench/digits")
    assert re.match(rf"The best of {len(GRID)} settings has an LDS of [\d.]+: ", best.out)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("bench cifar -o new", "setting 'cifar' is unknown: use one of digits, mnist-mlp, mnist-lr."),
        ("sweep cifar -o new", "setting 'cifar' is unknown: use one of digits, mnist-mlp, mnist-lr."),
        ("sweep digits --checkpoint 9 -o new", "digits has checkpoints 0 to 4, not 9."),
        ("bench digits --path -o new", "digits has no plan for a path: omit --path."),
        ("bench digits -o other", "other holds another benchmark: its bench.json describes none. Give a new folder."),
        ("bench digits -o file", "file is a file: give a folder for the benchmark."),
    ],
)
def test_a_benchmark_that_cannot_be_made_is_refused_at_once(
    line: str, says: str, command: Command, empty: Path
) -> None:
    Path("other").mkdir()
    Path("other/bench.json").write_text("{}")
    Path("file").touch()
    failed = command(*shlex.split(line))
    assert (failed.code, failed.out, failed.err) == (1, "", f"error: {says}\n")


@pytest.mark.skipif(not find_spec("dattri"), reason="dattri is not installed")
def test_peers_are_asked_for(
    command: Command, empty: Path, small_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imprint.benchmarking import early, peers

    cheap, cheap_early = ("TracIn", "Grad-Dot"), ("Grad-Dot, early",)
    every, every_early = peers.peers, early.early_peers
    monkeypatch.setattr(peers, "peers", lambda bench: {name: every(bench)[name] for name in cheap})
    monkeypatch.setattr(early, "early_peers", lambda bench: {name: every_early(bench)[name] for name in cheap_early})
    monkeypatch.setattr("imprint.cli.commands.bench.find_spec", lambda name: None)
    run = command("bench", "digits", "--runs", 1, "--peers", "-o", "bench/digits", "--json")
    assert set(run.values["methods"]) == {"Imprint", *cheap, *cheap_early}
    assert "kronfluence is not installed, so its EK-FAC is left out" in run.err


@pytest.mark.skipif(not (find_spec("dattri") and find_spec("kronfluence")), reason="a package is not installed")
def test_peers_have_kronfluence_where_it_is_installed(
    command: Command, empty: Path, small_digits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from imprint.benchmarking import early, kronfluence, peers

    monkeypatch.setattr(peers, "peers", lambda bench: {})
    monkeypatch.setattr(early, "early_peers", lambda bench: {})
    monkeypatch.setattr(kronfluence, "DAMPINGS", (None,))
    found = command("bench", "digits", "--runs", 1, "--peers", "-o", "bench/digits", "--json").values
    assert set(found["methods"]) == {"Imprint", "EK-FAC (kronfluence)", "EK-FAC (kronfluence), early"}


METHOD = """
import torch
def scores(task, data, queries, checkpoints):
    assert len(checkpoints) > 1 and not task.model.training
    same = queries[1][:, None] == data[1][None, :]
    return same.float() - 0.5
def short(task, data, queries, checkpoints):
    return torch.zeros(2, 3)
def nan(task, data, queries, checkpoints):
    return torch.full((len(queries[1]), len(data[1])), float("nan"))
"""


def test_a_method_of_ones_own_is_compared_on_the_same_ground_truth(
    command: Command, empty: Path, small_digits: None
) -> None:
    Path("mine.py").write_text(METHOD)
    line = ("bench", "digits", "--runs", 1, "--out", "bench/digits", "--json", "--method", "mine.py:scores")
    found = command(*line).values["methods"]
    assert list(found) == ["Imprint", "mine.py:scores"]
    assert 0 < found["mine.py:scores"]["lds"]["value"] < 1  # examples of one's own label help
    Path("mine.py").write_text(METHOD.replace("same.float() - 0.5", "0.5 - same.float()"))
    again = command(*line).values["methods"]["mine.py:scores"]["lds"]["value"]
    assert again == pytest.approx(-found["mine.py:scores"]["lds"]["value"])  # another file is another method
    for name, says in (
        ("short", "mine.py:short returned scores of shape (2, 3), expected ("),
        ("nan", "mine.py:nan returned scores that are not finite."),
        ("score", "mine.py:score is not a function; did you mean scores"),
    ):
        failed = command("bench", "digits", "--runs", 1, "--out", "bench/digits", "--method", f"mine.py:{name}")
        assert failed.code == 1 and says in failed.err, failed.err
