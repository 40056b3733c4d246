"""A sweep's scores are those of the simulation with the same settings, and it goes where the engine does not."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from imprint import Plan, SimulationError, attribute, simulate
from imprint.benchmarking import sweep as module
from imprint.benchmarking.bench import Bench
from imprint.benchmarking.sweep import GRID, RELATIVE, STEPS, ScoreParts, SweepResult, plot_sweep, sweep
from imprint.evaluation.metrics import lds
from imprint.plan import Settings, Steps
from imprint.sources import Sources
from tests.benches import toy

FEW = 6  # of fifteen directions: something lies outside


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench(toy(), tmp_path_factory.mktemp("toy"), progress=False)
    bench.states([0])
    return bench


@pytest.fixture(scope="module")
def points(made: Bench) -> list[SweepResult]:
    return sweep(made, 1, directions=FEW, progress=False)


def copied(bench: Bench, out: Path) -> Bench:
    """The same benchmark elsewhere, with what was made of it."""
    other = Bench(bench.protocol, out, progress=False)
    other.__dict__["truths"] = bench.truths
    (out / "runs").mkdir()
    for file in (bench.out / "runs").iterdir():
        (out / "runs" / file.name).write_bytes(file.read_bytes())
    return other


@pytest.mark.parametrize("directions", [FEW, 100])
@pytest.mark.parametrize("measure", ["margin", None])
@pytest.mark.parametrize(("steps", "damping"), [(1, 0.0), (50, 0.0), (50, 0.1), ("infinite", 0.03)])
def test_scores_are_those_of_a_simulation(
    made: Bench, steps: Steps, damping: float, measure: str | None, directions: int
) -> None:
    state, task = made.states([0])[0][1], made.protocol.build_task(measure)
    plan = Plan(engine="spectral", steps=steps, lr=0.4, damping=damping, directions=directions)
    data, queries = made.protocol.train.data, made.protocol.queries
    store = simulate(task, data, Sources.per_example(40), plan, checkpoints=[state], progress=False)
    expected = attribute(task, store, queries, readout="gradient", progress=False).scores
    filterable = ScoreParts.at(made, state, measure, directions)
    found = filterable.scores(Settings(steps, 0.4, damping, 1.0), 0.4)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8 * float(expected.abs().max()))


def test_swept_scores_are_the_same_up_to_a_factor(made: Bench) -> None:
    filterable = ScoreParts.at(made, made.states([0])[0][0], "margin", FEW)
    largest = filterable.frozen.largest
    for steps, relative, damping in ((10, 0.5, 0.0), (None, 0.0, 0.1)):
        lr = relative / largest if steps else 1.0
        plain = filterable.scores(Settings(steps or "infinite", lr, damping * largest, 1.0), lr)
        torch.testing.assert_close(filterable.normalised_scores(steps, relative, damping), plain / plain.abs().max())


def test_every_setting_is_swept_also_those_that_diverge(made: Bench, points: list[SweepResult]) -> None:
    assert [(p.steps, p.relative, p.damping) for p in points] == list(GRID)
    assert max(RELATIVE) > 2 and max(STEPS) >= 1000
    assert all(np.isfinite(p.lds) and p.loo is None for p in points)
    slow, good, wild = (
        next(p.lds for p in points if p.relative == r and p.steps == 3000) for r in (0.01, 1.0, max(RELATIVE))
    )
    assert min(slow, good) > wild + 0.1
    state, lr = (
        made.states([0])[0][1],
        max(RELATIVE) / ScoreParts.at(made, made.states([0])[0][1], None, FEW).frozen.largest,
    )
    refused = Plan(engine="spectral", steps=3000, lr=lr)
    with pytest.raises(SimulationError, match="too long"):
        simulate(
            made.protocol.build_task(),
            made.protocol.train.data,
            Sources.per_example(40),
            refused,
            checkpoints=[state],
            progress=False,
        )


def test_fidelity_is_against_one_retraining_as_in_the_benchmark(made: Bench, points: list[SweepResult]) -> None:
    filterable = ScoreParts.at(made, made.states([0])[0][1], "margin", FEW)
    scores = filterable.normalised_scores(*GRID[0])
    expected = np.mean([lds(scores, replace(truth, values=truth.values[:1])).estimate.value for truth in made.truths])
    assert points[0].lds == pytest.approx(expected)


def test_leave_one_out_is_swept_too(made: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRID", ((30, 1.0, 0.0), (3000, 2.2, 0.0), (None, 0.0, 0.1)))
    converged, wild, damped = sweep(made, 1, directions=FEW, leave_one_out=True, progress=False)
    assert converged.loo is not None and damped.loo is not None and wild.loo is not None
    assert min(converged.loo, damped.loo) > 0.5
    assert np.isfinite(wild.loo) and wild.loo != 0  # its scores are near 10²³⁰
    assert sweep(made, 1, directions=FEW, progress=False)[0].loo is None  # kept apart


def test_an_interrupted_sweep_goes_on(
    made: Bench, points: list[SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, count = copied(made, tmp_path), 0

    def interrupted(*given: Any) -> Any:
        nonlocal count
        count += 1
        if count > 2 * 5:  # two truths for each setting
            raise KeyboardInterrupt
        return lds(*given)

    with monkeypatch.context() as patch:
        patch.setattr(module, "lds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sweep(bench, 1, directions=FEW, progress=False)
    kept = json.loads((tmp_path / f"sweep-1-{FEW}.json").read_text())
    assert [SweepResult(**each) for each in kept] == points[:5]
    told: list[int] = []
    assert sweep(bench, 1, directions=FEW, progress=lambda done, total: told.append(done)) == points
    assert told == list(range(5, len(GRID) + 1))

    def refused(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(ScoreParts, "at", refused)
    assert sweep(bench, 1, directions=FEW, progress=False) == points  # all is there
    with pytest.raises(AssertionError, match="measured again"):
        sweep(bench, 0, directions=FEW, progress=False)  # another checkpoint


def test_points_of_another_grid_are_not_taken(made: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = copied(made, tmp_path)
    monkeypatch.setattr(module, "GRID", ((1, 1.0, 0.0), (30, 1.0, 0.0)))
    one, thirty = sweep(bench, 1, directions=FEW, progress=False)
    monkeypatch.setattr(module, "GRID", ((30, 1.0, 0.0), (None, 0.0, 0.1)))
    first, last = sweep(bench, 1, directions=FEW, progress=False)
    assert first == thirty != one and (last.steps, last.damping) == (None, 0.1)
    monkeypatch.setattr(module, "GRID", ((30, 1.0, 0.0),))
    assert sweep(bench, 1, directions=FEW, progress=False) == [first]


def test_a_picture_is_drawn(points: list[SweepResult], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_sweep(points, tmp_path / "lds.png", "toy")
    plot_sweep([replace(point, loo=0.1) for point in points], tmp_path / "both.png", "toy")
    assert (tmp_path / "both.png").stat().st_size > (tmp_path / "lds.png").stat().st_size > 5000
