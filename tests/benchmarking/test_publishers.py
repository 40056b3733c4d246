"""The benchmark on presidents' addresses runs from end to end on a tiny model, and its tables say what they compare."""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from imprint import Store
from tests.conftest import require

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.wide


def _run(out: Path, monkeypatch: pytest.MonkeyPatch, *stages: str) -> dict[str, Any]:
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "sotu")
    require("data", place.is_dir(), "the addresses are not in the folder that IMPRINT_DATA names")
    counts = ["--sets", "4", "--tuning-sets", "2", "--drops", "2", "3", "--seeds", "2"]
    arguments = ["publishers.py", "run", "--small", "--out", str(out), "--stages", *stages, *counts]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "publishers.py"), run_name="__main__")
    return json.loads((out / "results.json").read_text())  # type: ignore[no-any-return]


def test_every_method_is_compared_with_removals_that_no_rival_was_tuned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _run(tmp_path, monkeypatch, "tune", "removals", "sets", "retrained", "rivals", "expected", "derivative")
    ours, derivative = (found["this_run"][name] for name in ("replayed removals", "derivative of the run"))
    size = found["this_run"]["size"]
    for row in (ours, derivative):
        for column in ("2 dropped", "3 dropped", "all sets", "answers"):
            assert row[column]["low"] <= row[column]["value"] <= row[column]["high"]
    assert found["this_run"]["size"]["behind"]["value"] == ours["all sets"]["value"] - size["all sets"]["value"]
    assert {"BM25", "TF-IDF", "TRAK", "gradient product", "size"} < set(found["this_run"])
    assert found["this_run"]["TRAK"]["variant"].startswith(("step", "all checkpoints"))
    assert "replayed removals, mean of 2 runs" in found["expected"]
    scores = load_file(tmp_path / "scores.safetensors")
    removed, slope = (scores[name].flatten() for name in ("replayed removals", "derivative of the run"))
    assert torch.corrcoef(torch.stack([removed, slope]))[0, 1] > 0.8  # two ways to weigh the same sources less
    assert sorted(name.count(" + ") for name in found["retrained"]) == [0, 0, 0, 2]
    assert all(off < 0.02 for off in found["retrained"].values())
    tables = (tmp_path / "report.md").read_text()
    assert "| BM25 |" in tables
    assert "## expected" in tables
    assert (tmp_path / "methods.png").stat().st_size > 1000


def test_answers_are_told_word_by_word_and_removals_hold_in_plain_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _run(tmp_path, monkeypatch, "tune", "removals", "story", "retrained")
    assert len(found["retrained"]) == 3
    assert all(off < 0.02 for off in found["retrained"].values())  # replays are what plain training does
    for told in found["story"]:
        contributed = sum(contribution for _, contribution in told["every word"])
        assert contributed == pytest.approx(-told["effects"][told["most helpful"]], rel=0.1, abs=1e-4)
        assert told["without"] != ""
    _check_models_without(tmp_path, found["settings"])
    assert (tmp_path / "who.png").stat().st_size > 1000
    assert (tmp_path / "words.png").stat().st_size > 1000


def _check_models_without(folder: Path, settings: dict[str, Any]) -> None:
    """The model that answers without a president is the one that plain training gives."""
    from publishers_case import Case, Settings
    from publishers_story import _without

    case = Case(folder, Settings(**{**settings, "drops": tuple(settings["drops"])}), "cpu", True, folder / "smollm2")
    (tuned, _), store = case.recorded(), Store(folder / "store")
    deployed = {name: p.detach().clone() for name, p in tuned.model.named_parameters() if p.requires_grad}
    expected = case.train_again(dict.fromkeys(case.sources.members[1].tolist(), 0.0))
    with _without(tuned, store, 1):
        for name, parameter in expected.items():
            moved = float((parameter - deployed[name]).abs().max())
            torch.testing.assert_close(tuned.model.get_parameter(name), parameter, rtol=0, atol=0.02 * moved + 1e-7)
    assert all(torch.equal(tuned.model.get_parameter(name), p) for name, p in deployed.items())
