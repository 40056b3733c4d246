"""What settings name is loaded from the user's own modules."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import (
    ConfigurationError,
    DataError,
    Plan,
    Sources,
    Task,
    TaskError,
    simulate,
)
from imprint.cli.experiment import Experiment
from imprint.cli.loading import Objects

MODEL = """
import torch
from torch import nn
import imprint

made = []
data = (torch.zeros(6, 2), torch.tensor([0, 1] * 3))
task = imprint.Task.classifier(nn.Linear(2, 2))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to write modules into and to be in; what they add to the path of Python goes with it."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def objects(folder: Path, text: str = "", **settings: Any) -> Objects:
    """What a model's file and settings give; the text comes at line 9 of the file."""
    (folder / "model.py").write_text(MODEL + text)
    return Objects(Experiment(**{"task": "model.py:task", **settings}))


def test_what_is_not_named_is_found_beside_the_task(folder: Path) -> None:
    found = objects(folder, "sources = imprint.Sources.per_example(6)\nqueries = data\nplan = imprint.Plan(steps=7)")
    assert isinstance(found.task, Task)
    assert len(found.data[0]) == len(found.sources) == len(found.queries[0]) == 6
    assert found.plan == Plan(steps=7)
    assert found.checkpoints is None and found.collate_fn is None


def test_a_name_without_a_colon_is_one_of_the_tasks_module(folder: Path) -> None:
    (folder / "rows.py").write_text("import torch\nclass held:\n    out = torch.ones(3, 2), torch.zeros(3)\n")
    found = objects(
        folder, "class other:\n    rows = (torch.ones(4, 2),)", data="other.rows", queries="rows.py:held.out"
    )
    assert len(found.data[0]) == 4 and len(found.queries[0]) == 3


def test_modules_are_named_as_python_imports_them(folder: Path) -> None:
    (folder / "newspaper").mkdir()
    (folder / "newspaper" / "model.py").write_text(MODEL)
    found = Objects(Experiment(task="newspaper.model:task"))
    assert isinstance(found.task, Task) and len(found.data[0]) == 6


def test_functions_are_called_once(folder: Path) -> None:
    values = {
        "task": "imprint.Task.classifier(nn.Linear(2, 2))",
        "data": "(torch.zeros(4, 2), torch.zeros(4).long())",
        "sources": "imprint.Sources.per_example(4)",
        "queries": "(torch.zeros(1, 2), torch.zeros(1).long())",
        "checkpoints": "[{}]",
        "plan": "imprint.Plan(steps=2)",
    }
    text = "\n".join(f"def {name}():\n    made.append('{name}')\n    return {value}" for name, value in values.items())
    found = objects(folder, text, queries="queries")
    for _ in range(2):
        for name in (*values, "options"):
            getattr(found, name)
    assert sorted(found._module.made) == sorted(values)


def test_a_collate_function_is_what_it_is(folder: Path) -> None:
    found = objects(folder, "def collate_fn(samples):\n    return made")
    assert found.collate_fn([1]) == []


def test_the_function_of_a_task_may_fill_the_list_of_checkpoints(folder: Path) -> None:
    text = "checkpoints = []\nready = task\ndef task():\n    checkpoints.append(ready.state())\n    return ready"
    assert len(objects(folder, text).options["checkpoints"]) == 1


def test_a_module_of_a_usual_name_is_not_meant(folder: Path) -> None:
    found = objects(folder, "import json as plan, csv as queries")
    assert found.plan == Plan()
    assert not found.has("queries")


def test_fields_go_over_the_plan_beside_the_task(folder: Path) -> None:
    found = objects(folder, "plan = imprint.Plan(steps=7, lr=0.5)", plan={"steps": [1, 2]})
    assert found.plan == Plan(steps=(1, 2), lr=0.5)


def test_files_of_one_name_in_two_folders_are_two_modules(folder: Path) -> None:
    for name, rows in (("a", 1), ("b", 2)):
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(f"{MODEL}data = (torch.zeros({rows}, 2),)\nqueries = [object()]\n")
    found = Objects(Experiment(task="a/model.py:task", data="b/model.py:data", queries="a/model.py:queries"))
    assert len(found.data[0]) == 2
    assert found.queries is found._module.queries  # and neither is loaded twice


def test_every_example_is_a_source_of_columns_and_datasets(folder: Path) -> None:
    assert len(objects(folder, sources="per-example").sources) == 6
    (folder / "rows.py").write_text(
        "import torch\ndata = torch.utils.data.TensorDataset(torch.zeros(5, 2))\nendless = iter(int, 1)\n"
    )
    assert len(objects(folder, sources="per-example", data="rows.py:data").sources) == 5
    with pytest.raises(DataError, match="expected a map-style dataset"):
        _ = objects(folder, sources="per-example", data="rows.py:endless").sources


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
def test_files_of_torch_save_are_left_to_the_simulation_which_says_what_is_missing(suffix: str, folder: Path) -> None:
    torch.save({"other": torch.zeros(1)}, folder / f"model{suffix}")
    found = objects(folder, checkpoints=(f"model{suffix}",))
    assert found.checkpoints == [f"model{suffix}"]
    with pytest.raises(TaskError, match="a checkpoint does not fit the model"):
        simulate(found.task, found.data, Sources.per_example(6), progress=False, checkpoints=found.checkpoints)


def test_queries_in_columns_are_not_collated(folder: Path) -> None:
    found = objects(folder, "def collate_fn(samples):\n    return made\nqueries = data\nlisted = [1]")
    assert found.query_collate_fn is None
    assert objects(folder, queries="listed").query_collate_fn is not None


FAILURES = {
    "in the file": ("1 / 0", "model.py could not be loaded: model.py, line 9: ZeroDivisionError: division by zero"),
    "in a library": (
        "nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(3).long())",
        "model.py could not be loaded: model.py, line 9: ValueError: Expected",
    ),
    "in another file": ("import part", "model.py could not be loaded: part.py, line 2: KeyError: 'x'"),
    "of grammar": ("x = = 1", "SyntaxError: invalid syntax (model.py, line 9)"),
    "by leaving": ("raise SystemExit(2)", "model.py could not be loaded: model.py, line 9: SystemExit: 2"),
    "of an import": (
        "import nothing_like_it",
        "model.py, line 9: ModuleNotFoundError: No module named 'nothing_like_it'",
    ),
    "of a function": (
        "def task():\n    made.clear()\n    made[1]",
        "model.py:task() failed: model.py, line 11: Ind",
    ),
    "of a function in a library": ("def task():\n    torch.stack([])", "failed: model.py, line 10: RuntimeError"),
    "of weights that do not fit": (
        "def task():\n    nn.Linear(2, 2).load_state_dict({})",
        'line 10: RuntimeError: Error(s) in loading state_dict for Linear: Missing key(s) in state_dict: "weight",',
    ),
    "of a function that wants more": (
        "def task(x): pass",
        "model.py:task is a function that needs x, but it is called without arguments: give an imprint.Task",
    ),
    "of the plan": ("plan = {'steps': 3}", "plan in model.py is a dict, not an imprint.Plan"),
    "of the task": ("task = nn.Linear(2, 2)", "model.py:task is a Linear, not an imprint.Task"),
    "of the data": (
        "del data",
        "model.py:task has no 'data' beside it: give the training data with --data FILE.py:NAME",
    ),
    "of the sources": ("", "give the sources (or per-example) with --sources FILE.py:NAME"),
}


@pytest.mark.parametrize(("text", "words"), FAILURES.values(), ids=FAILURES)
def test_failures_of_the_users_code_name_their_place_in_it(text: str, words: str, folder: Path) -> None:
    (folder / "part.py").write_text("\n{}['x']\n")

    def load() -> None:
        found = objects(folder, text)
        _ = found.task, found.data, found.plan, found.sources

    with pytest.raises(ConfigurationError) as failed:
        load()
    assert words in str(failed.value)


def test_errors_of_the_library_pass_through_as_they_are(folder: Path) -> None:
    with pytest.raises(TaskError, match="matches no trainable parameter"):
        objects(folder, "imprint.Task.classifier(nn.Linear(2, 2), parameters='head.*')")


def test_a_module_that_failed_is_loaded_anew(folder: Path) -> None:
    with pytest.raises(ConfigurationError):
        objects(folder, "1 / 0")
    assert isinstance(objects(folder).task, Task)
