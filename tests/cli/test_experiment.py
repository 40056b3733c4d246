"""Settings named by strings: put over each other, moved beside a file, and loaded from the user's own modules."""

import contextlib
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from imprint import (
    ConfigurationError,
    DataError,
    ImprintError,
    Plan,
    PlanError,
    Sources,
    Store,
    Task,
    TaskError,
    simulate,
)
from imprint.cli.experiment import NOTE, Experiment, parse_plan
from imprint.cli.loading import Objects

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = [field.name for field in fields(Experiment)]
WORDS = st.text("abc/.:", min_size=1, max_size=8)
EXPERIMENTS = st.builds(
    Experiment,
    **{
        name: st.none() | WORDS
        for name in ("task", "data", "sources", "queries", "collate_fn", "dtype", "device", "out")
    },
    checkpoints=st.lists(WORDS, max_size=2).map(tuple),
    plan=st.dictionaries(st.sampled_from(["steps", "lr", "seed"]), st.integers(1, 9)),
    batch_size=st.none() | st.integers(1, 9),
    memory=st.none() | st.integers(1, 9) | st.just("1MB"),
)


# --- settings


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), JSON, max_size=4))
def test_any_mapping_is_an_experiment_or_a_configuration_error(values: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigurationError):
        experiment = Experiment.from_values(values, "news.toml")
        one = isinstance(values.get("checkpoints"), str)
        kept = {**vars(experiment), "checkpoints": experiment.checkpoints[0] if one else list(experiment.checkpoints)}
        assert values.items() <= kept.items()


@given(EXPERIMENTS)
def test_nothing_put_over_settings_changes_nothing(experiment: Experiment) -> None:
    assert experiment.override(Experiment()) == experiment == Experiment().override(experiment)


@given(EXPERIMENTS, EXPERIMENTS)
@example(Experiment(plan={"steps": 1}), Experiment(plan={"steps": 2, "lr": 3}))
def test_what_is_given_goes_over_what_is_there(above: Experiment, below: Experiment) -> None:
    both = above.override(below)
    for name in set(NAMES) - {"plan"}:
        assert getattr(both, name) == (getattr(above, name) or getattr(below, name))
    assert both.plan == {**below.plan, **above.plan}  # each field for itself


@given(EXPERIMENTS, EXPERIMENTS, EXPERIMENTS)
def test_the_order_of_layers_is_all_that_counts(a: Experiment, b: Experiment, c: Experiment) -> None:
    assert a.override(b).override(c) == a.override(b.override(c))


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        ({"task": "model.py:task"}, {"task": "conf/model.py:task"}),
        ({"data": "../data.py:make.rows"}, {"data": "data.py:make.rows"}),
        ({"queries": "/abs/data.py:queries"}, {"queries": "/abs/data.py:queries"}),
        ({"collate_fn": "package.module:collate"}, {"collate_fn": "package.module:collate"}),
        ({"sources": "per-example"}, {"sources": "per-example"}),
        ({"sources": "publishers"}, {"sources": "publishers"}),
        ({"out": "runs/news"}, {"out": "conf/runs/news"}),
        (
            {"checkpoints": ("a.safetensors", "/b.safetensors")},
            {"checkpoints": ("conf/a.safetensors", "/b.safetensors")},
        ),
        ({"checkpoints": ("model.py:early",)}, {"checkpoints": ("conf/model.py:early",)}),
        ({"checkpoints": ("early",)}, {"checkpoints": ("early",)}),
        ({"plan": {"steps": 3}, "memory": "1GB"}, {"plan": {"steps": 3}, "memory": "1GB"}),
    ],
)
def test_paths_are_moved_beside_their_file_and_names_are_not(given: dict[str, Any], moved: dict[str, Any]) -> None:
    assert Experiment(**given).relative_to(Path("conf")) == Experiment(**moved)


def test_a_file_is_read_with_its_paths_relative_to_it(tmp_path: Path) -> None:
    file = tmp_path / "news.toml"
    file.write_text(
        'task = "model.py:task"\ncheckpoints = "é.safetensors"\nmemory = 1000\n[plan]\nsteps = [1, 2]\n', "utf-8"
    )
    assert Experiment.from_toml(file) == Experiment(
        task=f"{tmp_path}/model.py:task",
        checkpoints=(f"{tmp_path}/é.safetensors",),
        memory=1000,
        plan={"steps": [1, 2]},
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('tasks = "model.py:task"', "has an unknown setting 'tasks'; did you mean task?"),
        ("xyz = 1", "has an unknown setting 'xyz'; known names: batch_size, checkpoints"),
        ("task = 3", "task must be a string, got 3"),
        ("batch_size = true", "batch_size must be a whole number, got True"),
        ("batch_size = 1.5", "batch_size must be a whole number, got 1.5"),
        ("plan = 3", "plan must be a table, got 3"),
        ("memory = 1.5", "memory must be a number of bytes or a string"),
        ("checkpoints = 3", "checkpoints must be a list of strings, got 3"),
        ("checkpoints = [3]", "checkpoints must be strings, got [3]"),
        ("task = ", "cannot be read: Invalid value"),
        ("\xff", "cannot be read: "),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "news.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationError) as refused:
        Experiment.from_toml(tmp_path / "news.toml")
    assert str(refused.value).startswith(str(tmp_path / "news.toml")) and words in str(refused.value)


SMALL = Plan(steps=2, lr=0.1)


def noting(out: Path | None, note: Any) -> Store:
    """A small store with a note."""
    data = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
    sources, task = Sources.per_example(4), Task.classifier(nn.Linear(2, 2))
    return simulate(task, data, sources, SMALL, out=out, batch_size=3, note=note, progress=False)


def named(**names: Any) -> Any:
    """A note such as a command leaves it."""
    return json.loads(json.dumps({NOTE: {"command": names}, "mine": 1}))


def test_a_store_gives_its_plan_and_none_of_its_names(tmp_path: Path) -> None:
    given = Experiment(task="model.py:task", data="rows", checkpoints=("a.safetensors",), memory="1GB")
    store = noting(None, named(**given.to_json()))
    assert Experiment().override_store(store) == Experiment(plan=SMALL.to_json(), dtype="float32", batch_size=3)
    wanted = {"task": ("model.py:task",), "data": ("rows",), "checkpoints": ("a.safetensors",)}
    assert Experiment().find_unrepeated(store, ("task", "data", "sources", "checkpoints")) == wanted
    assert Experiment(task="model.py:task").find_unrepeated(store, ("task", "data")) == {"data": ("rows",)}
    assert given.find_unrepeated(store, vars(given)) == {}


def test_what_is_the_librarys_own_need_not_be_repeated() -> None:
    store = noting(None, named(task="digits", sources="per-example", queries="http.server:test"))
    found = Experiment().override_store(store, library=("digits",))
    assert (found.task, found.sources, found.queries) == ("digits", "per-example", None)
    assert Experiment().override_store(store).task is None
    assert found.find_unrepeated(store, ("task", "sources", "queries")) == {"queries": ("http.server:test",)}


@pytest.mark.parametrize("name", ["task", "data", "sources", "queries", "collate_fn", "checkpoints"])
def test_a_name_that_would_be_an_option_is_none(name: str) -> None:
    """Repeated on a command line it would say something else."""
    value = ["--out=elsewhere"] if name == "checkpoints" else "--out=elsewhere"
    assert Experiment().find_unrepeated(noting(None, named(**{name: value})), (name,)) == {}


FOREIGN = [
    "mine",
    3,
    None,
    [],
    {"command": {"task": "a.py:b"}},
    {NOTE: 3},
    {NOTE: {}},
    {NOTE: {"command": {"x": 1}}},
    {NOTE: {"command": "x"}},
]


@pytest.mark.parametrize("note", FOREIGN, ids=str)
def test_notes_of_others_name_nothing(note: Any) -> None:
    found = Experiment().override_store(noting(None, note))
    assert found == Experiment(plan=SMALL.to_json(), dtype="float32", batch_size=3)


@pytest.mark.parametrize(
    ("pairs", "values"),
    [
        (["steps=100", "lr=0.1"], {"steps": 100, "lr": 0.1}),
        (["steps=100,200", "lr=auto,1e-3"], {"steps": [100, 200], "lr": ["auto", 1e-3]}),
        (
            ["batch_size=none", "keep_pair=True", "accept_drift=false"],
            {"batch_size": None, "keep_pair": True, "accept_drift": False},
        ),
        ([" engine = trajectories "], {"engine": "trajectories"}),
        (["steps=1", "steps=2"], {"steps": 2}),
    ],
)
def test_fields_of_a_plan_are_read_from_texts(pairs: list[str], values: dict[str, Any]) -> None:
    assert parse_plan(pairs) == values


@given(
    st.builds(Plan, steps=st.integers(1, 99), lr=st.floats(1e-9, 9), damping=st.floats(0, 9), seed=st.integers(0, 9))
)
def test_a_plan_written_as_texts_is_the_same_plan(plan: Plan) -> None:
    assert Plan.from_json(parse_plan([f"{name}={value}" for name, value in plan.to_json().items()])) == plan


PLAN_FIELDS = st.sampled_from(list(Plan().to_json()))
VALUES = (
    st.sampled_from(["auto", "none", "true", "nan", "inf", "", "tangent"])
    | st.integers().map(str)
    | st.text(max_size=6)
)


@given(st.lists(st.builds("{}={}".format, PLAN_FIELDS, VALUES) | st.text(max_size=6), max_size=3))
def test_any_texts_are_a_plan_or_an_error_of_ours(pairs: list[str]) -> None:
    with contextlib.suppress(ConfigurationError, PlanError):
        Plan.from_json(parse_plan(pairs))


# --- loading

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
def test_files_of_torch_save_are_left_to_the_simulation_which_says_what_it_wants(suffix: str, folder: Path) -> None:
    torch.save({}, folder / f"model{suffix}")
    found = objects(folder, checkpoints=(f"model{suffix}",))
    assert found.checkpoints == [f"model{suffix}"]
    with pytest.raises(TaskError, match=r"Files of torch\.save are not read"):
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


@given(WORDS)
def test_no_import_string_ends_in_another_error_than_ours(string: str) -> None:
    with pytest.raises(ImprintError):
        _ = Objects(Experiment(task=string)).task
