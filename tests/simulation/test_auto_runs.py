"""An automatic plan repeats a recorded run where that is affordable and the run is calm."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from imprint import Plan, PlanError, check, simulate
from tests.simulation.removals import SOURCES, HandMadeRun, make_data, make_model, make_task, removing_engine


@pytest.fixture(autouse=True)
def _removing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("imprint.simulation.auto.engine_for", lambda question: "removing")
    monkeypatch.setattr("imprint.simulation.recorded.engine_for", lambda question: "removing")
    with removing_engine():
        yield


def choose(run: HandMadeRun, **options: Any) -> Plan:
    return Plan.auto(make_task(), make_data(), SOURCES, run=run, progress=False, **options)


def test_a_calm_run_is_repeated() -> None:
    run = HandMadeRun.of(make_model())
    assert choose(run).engine == "removing"
    assert simulate(make_task(), make_data(), SOURCES, "auto", run=run, progress=False).question == "this_run"


def test_a_chaotic_run_is_simulated_at_its_checkpoints(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("imprint.simulation.repeatable.CHAOTIC", 0.0)
    run = HandMadeRun.of(make_model())
    with caplog.at_level(logging.WARNING, "imprint"):
        store = simulate(make_task(), make_data(), SOURCES, "auto", run=run, progress=False)
    assert store.question == "expected" and len(store.checkpoints) == len(run.checkpoints) - 1
    assert "the recorded run is not repeated, which is chaotic: a start perturbed by 1/1000" in caplog.text
    assert check(make_task(), make_data(), SOURCES, "auto", run=run).plan.rules.question == "expected"


def test_a_run_that_took_too_long_is_not_repeated(caplog: pytest.LogCaptureFixture) -> None:
    run = HandMadeRun.of(make_model())
    object.__setattr__(run, "seconds", 8 * 3600 / len(SOURCES) + 1)
    with caplog.at_level(logging.WARNING, "imprint"):
        assert choose(run).rules.question == "expected"
    assert "not repeated, which took 2:00:01: for 4 sources that would be about 8:00:04" in caplog.text


def test_a_run_and_checkpoints_are_not_given_together() -> None:
    with pytest.raises(PlanError, match="give run= or checkpoints=, not both"):
        choose(HandMadeRun.of(make_model()), checkpoints=[make_model().state_dict()])
