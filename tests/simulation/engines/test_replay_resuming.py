"""Replays that are interrupted, shared or brought up to date: with a warm-up, and in the ways that memory leaves."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Plan, Sources, Store, merge, simulate, simulate_part, update
from imprint.simulation.engines.replay.training import Repetition
from tests.simulation.engines.trainings import MemoryRun, Training, classification, mlp
from tests.simulation.killing import Killed, contents, dies_after, dies_at

SOURCES = Sources.groups({"ann": [0, 1, 2, 3, 4, 5, 6], "bob": [7, 11, 30], "cid": [39], "dan": [3, 30, 31]})
STEPS = 6
WARMING = Training(
    mlp(), classification(), torch.optim.Adam, {"lr": 0.02}, steps=STEPS, schedule=lambda step: min(step, 4) / 4
)
RESTING = replace(WARMING, schedule=lambda step: 0.0)
STEADY = replace(WARMING, schedule=lambda step: 1.0)
each_way = pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])


def arguments(training: Training, stacked: bool, sources: Sources = SOURCES) -> tuple[tuple[Any, ...], MemoryRun]:
    """Return task, data, sources and plan of a replay, and the run."""
    _, run = training.run()
    trained = replace(training, model=copy.deepcopy(training.model))
    trained.model.load_state_dict(run.state(STEPS))
    return (trained.task(), training.data, sources, Plan(engine="replay", stacked=stacked)), run


def replay(training: Training, out: Path, *, stacked: bool = True, sources: Sources = SOURCES, **options: Any) -> Store:
    given, run = arguments(training, stacked, sources)
    return simulate(*given, run=run, out=out, **{"progress": False, **options})


@each_way
@pytest.mark.parametrize(("training", "rate"), [(WARMING, 0.02), (RESTING, 0.0)], ids=["warm-up", "always 0"])
def test_a_replay_that_begins_at_rate_0_resumes(training: Training, rate: float, stacked: bool, tmp_path: Path) -> None:
    whole = replay(training, tmp_path / "whole", stacked=stacked)
    assert whole.checkpoints[0].choices.lr == rate
    with pytest.raises(Killed):
        replay(training, tmp_path / "killed", stacked=stacked, progress=dies_at(0.5))
    resumed = replay(training, tmp_path / "killed", stacked=stacked)
    assert contents(resumed.path) == contents(whole.path)


@each_way
def test_a_replay_that_begins_at_rate_0_is_made_in_parts(stacked: bool, tmp_path: Path) -> None:
    given, run = arguments(WARMING, stacked)
    for number in (2, 1):
        simulate_part(f"{number}/2", *given, run=run, out=tmp_path / "parts", progress=False)
    store = merge(tmp_path / "parts", progress=False)
    assert contents(store.path) == contents(replay(WARMING, tmp_path / "whole", stacked=stacked, repeat=store).path)


def test_a_replay_that_begins_at_rate_0_is_brought_up_to_date(tmp_path: Path) -> None:
    replay(WARMING, tmp_path / "store", sources=SOURCES.select([0, 1, 2]))
    (task, data, sources, _), run = arguments(WARMING, True)
    with pytest.raises(Killed):
        update(tmp_path / "store", task, data, sources, run=run, progress=dies_at(0.5))
    updated = update(tmp_path / "store", task, data, sources, run=run, progress=False)
    assert_same_rows(updated, replay(WARMING, tmp_path / "fresh"))


def test_replays_that_tell_another_rate_of_the_same_run_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of versions that told the first rate."""
    with monkeypatch.context() as patch:
        patch.setattr(Repetition, "find_highest_rate", lambda repetition: 0.0)
        replay(WARMING, tmp_path / "earlier", sources=SOURCES.select([0, 1]))
    replay(WARMING, tmp_path / "later", sources=SOURCES.select([2, 3]))
    merged = merge([tmp_path / "earlier", tmp_path / "later"], tmp_path / "merged", progress=False)
    assert_same_rows(merged, replay(WARMING, tmp_path / "fresh"))


def assert_same_rows(store: Store, expected: Store) -> None:
    """Assert that two stores have the same imprints within rounding."""
    theirs = expected.imprints(0, 0, len(expected), torch.device("cpu"))
    for name, rows in store.imprints(0, 0, len(store), torch.device("cpu")).items():
        torch.testing.assert_close(rows, theirs[name], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("files", [1, 2, 4])
def test_runs_that_go_one_by_one_for_want_of_memory_resume(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the base, after the noise and between two sources."""
    whole = replay(STEADY, tmp_path / "whole", memory="1kB")
    assert "the memory budget is 1 kB" in (whole.checkpoints[0].measured.one_by_one or "")
    with monkeypatch.context() as patch:
        patch.setattr("imprint.store.finished.append", dies_after(files))
        with pytest.raises(Killed):
            replay(STEADY, tmp_path / "killed", memory="1kB")
    assert contents(replay(STEADY, tmp_path / "killed", memory="1kB").path) == contents(whole.path)


def test_runs_that_go_one_by_one_for_want_of_memory_are_made_in_parts(tmp_path: Path) -> None:
    given, run = arguments(STEADY, True)
    for number in (2, 1):
        simulate_part(f"{number}/2", *given, run=run, out=tmp_path / "parts", memory="1kB", progress=False)
    store = merge(tmp_path / "parts", progress=False)
    assert contents(store.path) == contents(replay(STEADY, tmp_path / "whole", memory="1kB", repeat=store).path)


def test_a_stack_that_is_resumed_with_too_little_memory_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        replay(STEADY, tmp_path / "store", progress=dies_at(0.5))
    assert not re.search("runs need about", caplog.text)
    store = replay(STEADY, tmp_path / "store", memory="1kB")
    assert store.checkpoints[0].measured.one_by_one is None
    told = r"runs are replayed together, as was decided before, although together 5 runs need about [\d.]+ kB"
    assert re.search(told, caplog.text)
