"""Parts whose plan is chosen automatically agree on one before they simulate anything."""

from pathlib import Path
from typing import Any

import pytest

from imprint import Plan, Sources, StoreError, merge, simulate_part
from imprint.store.parts import PartsFolder, Share
from imprint.store.shared_plan import agree_on_plan
from tests.simulation.killing import PLANS, STEPS, N, data, task

TANGENT, SOURCES = PLANS["tangent"], Sources.by_label([i % 6 for i in range(N)])


def test_of_plans_that_are_chosen_at_the_same_time_the_first_to_be_shared_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"sources": SOURCES, "progress": False}
    given |= {"plan": "auto", "out": tmp_path / "store"}
    plans = [Plan(steps=STEPS, lr=0.2), Plan(steps=STEPS + 1, lr=0.2)]

    def choose(*_: Any, **__: Any) -> Plan:
        plan = plans.pop()
        if plans:  # while the first part is choosing, the second begins
            simulate_part("2/2", task(), data(), **given)
        return plan

    monkeypatch.setattr(Plan, "auto", choose)
    simulate_part("1/2", task(), data(), **given)
    assert not plans and merge(tmp_path / "store", progress=False).manifest.plan.steps == STEPS


def test_an_automatic_plan_is_not_taken_over_for_another_model(tmp_path: Path) -> None:
    folder = PartsFolder(tmp_path)
    agree_on_plan(folder, Share(1, 2), task(), SOURCES, lambda: TANGENT)
    with pytest.raises(StoreError, match=r"a plan that was chosen for another model or other sources"):
        agree_on_plan(folder, Share(2, 2), task(), Sources.per_example(N), lambda: TANGENT)


def test_a_part_that_fails_takes_its_automatic_plan_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "auto", lambda *_, **__: TANGENT)
    monkeypatch.setattr("imprint.simulation.work.Simulation.checkpoint", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        simulate_part("1/2", task(), data(), SOURCES, "auto", out=tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()
