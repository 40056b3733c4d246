"""Checkpoints of several training runs: one list for each run, and a store remembers which is of which."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, PlanError, Recorder, Sources, Store, StoreError, Task, TaskError, check, simulate
from imprint.store.values import sealed

DATA = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2
SOURCES, PLAN = Sources.by_label("ababab"), Plan(steps=2, lr=0.1)


def make_task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(2, 2))


def state(scale: float) -> dict[str, Tensor]:
    return {name: scale * tensor for name, tensor in make_task().state().items()}


def run(checkpoints: Any, plan: Plan = PLAN, **options: Any) -> Store:
    return simulate(make_task(), DATA, SOURCES, plan, checkpoints=checkpoints, progress=False, **options)


def test_a_store_remembers_which_run_each_checkpoint_is_of(tmp_path: Path) -> None:
    nested = run([[state(0.5), state(1.0)], [state(0.7)]], out=tmp_path / "store")
    assert nested.manifest.request.runs == Store(tmp_path / "store").manifest.request.runs == (0, 0, 1)
    assert len(nested.checkpoints) == 3
    assert run([state(0.5), state(1.0)]).manifest.request.runs == (0, 0)
    assert run(None).manifest.request.runs == (0,)


def test_runs_change_no_imprint() -> None:
    flat, nested = run([state(0.5), state(1.0)]), run([[state(0.5)], [state(1.0)]])
    sums = [[file.sha256 for each in store.checkpoints for file in each.imprints] for store in (flat, nested)]
    assert sums[0] == sums[1]


def test_settings_are_given_run_after_run() -> None:
    store = run([[state(0.5), state(1.0)], [state(0.7)]], Plan(steps=(1, 2, 3), lr=0.1, weight=(1.0, 0.0, 2.0)))
    assert [(each.steps, each.weight) for each in store.checkpoints] == [(1, 1.0), (2, 0.0), (3, 2.0)]


def test_the_paths_of_several_recorders_fit(tmp_path: Path) -> None:
    recorders = [Recorder(tmp_path / name) for name in "ab"]
    for number, recorder in enumerate(recorders):
        for epoch in (1, 2):
            model = make_task().model
            model.load_state_dict(state(1 + number + 0.1 * epoch))
            recorder(model, epoch)
    given = [recorder.paths for recorder in recorders]
    assert run(given).manifest.request.runs == (0, 0, 1, 1)
    assert check(make_task(), DATA, SOURCES, PLAN, checkpoints=given).checkpoints == 4
    auto = Plan.auto(make_task(), DATA, SOURCES, given, progress=False)
    assert isinstance(auto.weight, tuple) and len(auto.weight) == 4


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([[state(0.5)], state(1.0)], PlanError, "number 1 of the checkpoints is no list, and others are: give the check"),
    ([[state(0.5)], []], PlanError, "training run 1 has no checkpoints: leave it out"),
    ([(state(0.5), state(0.6), state(0.7))], PlanError, "checkpoints of one of several runs are a list"),
    ([[[state(0.5)]]], TaskError, "checkpoint 0 has type list"),
    ([Recorder("nowhere")], TaskError, r"checkpoint 0 has type Recorder.*: give its \.paths"),
]


@pytest.mark.parametrize(("given", "error", "words"), WRONG)
def test_lists_that_cannot_be_are_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        run(given)


def test_a_folder_of_other_runs_is_refused(tmp_path: Path) -> None:
    run([state(0.5), state(1.0)], out=tmp_path / "store")
    with pytest.raises(StoreError, match="made otherwise: checkpoint 1 was of training run 0, is of run 1"):
        run([[state(0.5)], [state(1.0)]], out=tmp_path / "store")
    with pytest.raises(StoreError, match="cannot be repeated: checkpoint 1 was of training run 0, is of run 1"):
        run([[state(0.5)], [state(1.0)]], repeat=tmp_path / "store")


@pytest.mark.parametrize(
    ("runs", "words"),
    [([0], "one for each checkpoint"), ([0, -1], "at least 0"), ([0, "1"], "whole number"), (None, "a list")],
)
def test_runs_that_cannot_be_are_not_read(runs: Any, words: str, tmp_path: Path) -> None:
    run([state(0.5), state(1.0)], out=tmp_path / "store")
    file = tmp_path / "store" / "manifest.json"
    values = json.loads(file.read_text())
    del values["sha256"]
    values["request"]["runs"] = runs
    file.write_text(json.dumps(sealed(values)))
    with pytest.raises(StoreError, match=rf"request\.runs.*{words}"):
        Store(tmp_path / "store")


def test_two_runs_of_the_same_weights_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="checkpoints 0 and 1 have the same weights"):
        run([[state(0.5)], [state(0.5)]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([[state(0.5)], [state(0.6)]])
