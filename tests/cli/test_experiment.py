"""Settings named by strings: put over each other, and moved beside a file."""

import contextlib
import json
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
    ImprintError,
    Plan,
    PlanError,
    Sources,
    Store,
    Task,
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
        ("xyz = 1", "has an unknown setting 'xyz'; known names: about, batch_size, checkpoints"),
        ("task = 3", "task must be a string, got 3"),
        ("batch_size = true", "batch_size must be a whole number, got True"),
        ("batch_size = 1.5", "batch_size must be a whole number, got 1.5"),
        ("plan = 3", "plan must be a table, got 3"),
        ("memory = 1.5", "memory must be a number of bytes or a string"),
        ("checkpoints = 3", "checkpoints must be a list of strings, got 3"),
        ("checkpoints = [3]", "checkpoints must be strings, or a list of strings for each run, got [3]"),
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


@given(WORDS)
def test_no_import_string_ends_in_another_error_than_ours(string: str) -> None:
    with pytest.raises(ImprintError):
        _ = Objects(Experiment(task=string)).task
