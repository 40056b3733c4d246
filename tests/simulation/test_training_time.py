"""How far a recorded training went, in the units of a path, and that a plan reaches no further than a part of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from imprint import Plan, Recording, RunRecorder, Sources, Task
from imprint.simulation.recorded import list_checkpoints
from imprint.simulation.training_time import find_training_time, measure_training_time

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2


def record(folder: Path, kind: Any, epochs: int = 2, **settings: Any) -> tuple[Task, Recording]:
    """Train on 24 examples in batches of 8, and record it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        run = RunRecorder(folder, model, kind(model.parameters(), **settings))
        for indices in run.batches(24, 8, epochs=epochs):
            with run.step(indices) as step:
                step.backward(F.cross_entropy(model(X[indices]), Y[indices]))
                run.optimiser.step()
    return Task.classifier(model), run.finish()


def test_the_time_of_sgd_is_the_sum_of_its_rates_and_longer_with_momentum(tmp_path: Path) -> None:
    _, plain = record(tmp_path / "plain", torch.optim.SGD, lr=0.1)
    _, heavy = record(tmp_path / "heavy", torch.optim.SGD, lr=0.1, momentum=0.9)
    _, slowed = record(tmp_path / "slowed", torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.9)
    assert measure_training_time(plain, None) == pytest.approx(0.6)
    assert measure_training_time(heavy, None) == pytest.approx(6.0)
    assert measure_training_time(slowed, None) == pytest.approx(0.6 * (1 + 0.9 * 0.1 / 0.1))
    assert measure_training_time(plain, "adam") is None


def test_the_time_of_adam_is_known_in_its_own_metric_only(tmp_path: Path) -> None:
    _, run = record(tmp_path, torch.optim.AdamW, lr=0.01)
    assert measure_training_time(run, "adam") == pytest.approx(0.06)
    assert measure_training_time(run, None) is None
    assert find_training_time(run.paths, "adam") == pytest.approx(0.06)


def test_checkpoints_of_no_recording_have_no_time(tmp_path: Path) -> None:
    task, run = record(tmp_path / "one", torch.optim.SGD, lr=0.1)
    given: list[Any] = [None, [task.state()], [*run.paths, task.state()], [tmp_path / "else" / "a.safetensors"]]
    for checkpoints in given:
        assert find_training_time(checkpoints, None) is None


def test_checkpoints_of_several_runs_have_the_time_of_the_shortest(tmp_path: Path) -> None:
    _, run = record(tmp_path / "one", torch.optim.SGD, lr=0.1)
    _, other = record(tmp_path / "other", torch.optim.SGD, lr=0.1, epochs=1)
    _, adam = record(tmp_path / "adam", torch.optim.Adam, lr=0.1)
    assert find_training_time([run.paths, other.paths], None) == pytest.approx(0.3)
    assert find_training_time([run.paths, adam.paths], None) is None


def test_a_short_training_shortens_the_path(tmp_path: Path) -> None:
    task, run = record(tmp_path, torch.optim.SGD, lr=1.0)
    sources = Sources.by_label([index % 3 for index in range(24)])
    followed = Plan.auto(task, (X, Y), sources, run.paths, progress=False)
    free = Plan.auto(task, (X, Y), sources, [task.state()], progress=False)
    last = followed.at(len(run.paths) - 1, len(run.paths)), free.at(0, 1)
    horizon, unbound = (settings.path * float(settings.lr) for settings in last)
    assert horizon == pytest.approx(6.0 / 4, rel=0.3) and unbound > 2 * horizon


def test_batch_norm_halves_the_path() -> None:
    """An identity in evaluation mode: only the rule for batch norm can tell the two models apart."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Linear(3, 2)
    norm = nn.BatchNorm1d(3, affine=False, eps=0.0).eval()
    sources = Sources.by_label([index % 3 for index in range(24)])
    plain, normed = (
        Plan.auto(Task.classifier(model), (X, Y), sources, progress=False).at(0, 1)
        for model in (nn.Sequential(nn.Identity(), head), nn.Sequential(norm, head))
    )
    assert normed.lr == plain.lr and normed.path == pytest.approx(plain.path / 2, abs=0.51)


def test_a_run_with_frozen_parameters_hands_on_its_second_moments(tmp_path: Path) -> None:
    """As a LoRA fine-tune, whose checkpoints lack what was not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    run = RunRecorder(tmp_path, model, torch.optim.Adam(model[1].parameters(), lr=0.01))
    for indices in run.batches(24, 8, epochs=1):
        with run.step(indices) as step:
            step.backward(F.cross_entropy(model(X[indices]), Y[indices]))
            run.optimiser.step()
    recording, task = run.finish(), Task.classifier(model)
    states = list_checkpoints(recording, task)
    assert all(isinstance(state, tuple) for state in states)
    plan = Plan.auto(task, (X, Y), Sources.by_label([index % 3 for index in range(24)]), states, progress=False)
    assert plan.preconditioner == "adam" and find_training_time(states, "adam") == pytest.approx(0.03)
    model[0].requires_grad_(True)
    every = Task.classifier(model)  # which selects more than was trained
    assert not any(isinstance(state, tuple) for state in list_checkpoints(recording, every))
