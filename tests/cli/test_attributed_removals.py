"""What `attribute` shows and writes of a store of finite removals."""

import csv
import re
from pathlib import Path

import pytest

from imprint import attribute, simulate
from tests.cli.commands import Command
from tests.simulation.removals import SOURCES, HandMadeRun, make_data, make_model, make_plan, make_task, removing_engine

MODEL = """
from tests.simulation.removals import make_data, make_task
task, queries = make_task(), tuple(tensor[12:] for tensor in make_data())
"""


def test_the_command_shows_and_writes_which_effects_stand_out(command: Command, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    with removing_engine():
        run = HandMadeRun.of(make_model())
        given = {"run": run, "out": tmp_path / "store", "progress": False}
        store = simulate(make_task(), make_data(), SOURCES, make_plan(), **given)  # type: ignore[arg-type]
        result = attribute(make_task(), store, tuple(tensor[12:] for tensor in make_data()), progress=False)
        arguments = ("attribute", store.path, "--task", f"{tmp_path}/model.py:task")
        shown = command(*arguments, "--out", tmp_path / "scores.csv")
        values = command(*arguments, "--json").values
    assert shown.code == 0, shown.err
    assert "\nthis run: if this source had had weight 0 in the training run that produced this model\n" in shown.out
    marks = result.distinguishable
    assert result.standard_error is not None
    assert marks is not None and marks.unique().tolist() == [False, True]
    assert re.search(r"\d~ +│", shown.out) and "\n~ not distinguishable from 0: less than twice" in shown.out
    for row in csv.DictReader((tmp_path / "scores.csv").open(newline="")):
        column = result.labels.source_ids.index(row["source"])
        assert row["distinguishable"] == str(bool(marks[int(row["query"]), column]))
        assert (row["question"], row["estimate"]) == ("this_run", "False")
        assert float(row["standard_error"]) == pytest.approx(float(result.standard_error[int(row["query"]), column]))
    errors = "standard errors from 2 repetitions of the run with a tiny change of its start"
    assert f"\n{errors}; they say nothing about another seed\n" in shown.out and result.details["error"] == errors
    assert "│ effect of removal │ ± standard error │" in shown.out.replace("┃", "│")
    assert values["question"] == "this_run" and len(values["noise"]) == len(result)
