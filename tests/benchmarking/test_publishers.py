"""The benchmark on presidents' addresses runs from end to end on a tiny model, and its tables say what they compare."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import require

pytest.importorskip("peft")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.wide


def test_every_method_is_compared_with_removals_that_no_rival_was_tuned_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Path(os.environ.get("IMPRINT_DATA") or "nowhere", "sotu")
    require("data", place.is_dir(), "the addresses are not in the folder that IMPRINT_DATA names")
    stages = ["tune", "removals", "sets", "rivals", "expected", "derivative"]
    counts = ["--sets", "4", "--tuning-sets", "2", "--drops", "2", "3", "--seeds", "2"]
    arguments = ["publishers.py", "run", "--small", "--out", str(tmp_path), "--stages", *stages, *counts]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(BENCHMARKS / "publishers.py"), run_name="__main__")
    found = json.loads((tmp_path / "results.json").read_text())
    ours, derivative = (found["this_run"][name] for name in ("replayed removals", "derivative of the run"))
    for row in (ours, derivative):
        for column in ("2 dropped", "3 dropped", "answers, all sets"):
            assert row[column]["low"] <= row[column]["value"] <= row[column]["high"]
    assert {"BM25", "TF-IDF", "TRAK", "gradient product", "size"} < set(found["this_run"])
    assert found["this_run"]["TRAK"]["variant"].startswith(("step", "all checkpoints"))
    assert "replayed removals, mean of 2 runs" in found["expected"]
    scores = load_file(tmp_path / "scores.safetensors")
    removed, slope = (scores[name].flatten() for name in ("replayed removals", "derivative of the run"))
    assert torch.corrcoef(torch.stack([removed, slope]))[0, 1] > 0.8  # two ways to weigh the same sources less
