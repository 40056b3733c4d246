"""`check` says beforehand what the store takes."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from imprint import Plan, Sources
from tests.checking.members import PLANS, checked, classifier, row_bytes, simulated
from tests.zoo import Member

SIZES: dict[str, Callable[[], tuple[Member, Plan, dict[str, Any]]]] = {
    "many sources": lambda: (classifier(1000, 9, Sources.per_example(1000)), Plan(steps=1, lr=0.001), {}),
    "many parameters": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001), {}),
    "half precision": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001), {"dtype": torch.bfloat16}),
    "a pair": lambda: (classifier(12, 9000), replace(PLANS["trajectories"], lr=0.001), {}),
    "large examples": lambda: (classifier(12, 9000, parameters="bias"), Plan(steps=1, lr=0.001), {}),
    "factored": lambda: (classifier(12, 9000, Sources.per_example(12)), PLANS["spectral"], {}),
    "factored, half precision": lambda: (
        classifier(12, 9000, Sources.per_example(12)),
        PLANS["spectral"],
        {"dtype": torch.bfloat16},
    ),
    "many factored sources": lambda: (classifier(1000, 9, Sources.per_example(1000)), PLANS["spectral"], {}),
    "spectral in groups": lambda: (classifier(12, 9000), PLANS["spectral"], {}),
    "two of three checkpoints": lambda: (classifier(12, 9000), Plan(steps=1, lr=0.001, weight=(1.0, 0.0, 2.0)), {}),
}


@pytest.mark.parametrize("case", SIZES)
def test_the_size_of_the_store_is_known_beforehand(case: str) -> None:
    member, plan, options = SIZES[case]()
    if isinstance(plan.weight, tuple):
        options = {**options, "checkpoints": [member.task.state() for _ in plan.weight]}
    expected = checked(member, plan, **options).estimate
    store = simulated(member, plan, **options)
    assert expected is not None
    assert abs(expected.store_bytes - store.bytes) <= 0.05 * store.bytes
    assert expected.bytes_per_source * len(store) == row_bytes(store)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(steps=3),
        Plan(steps=3, lr=0.1, batch_size=5, source_sample=2),
        Plan(engine="trajectories", steps=3, epsilon="auto"),
        Plan(engine="trajectories", variant="one_sided", steps=1, lr=0.1),
        Plan(steps=(2, 3), lr=("auto", 0.1), weight=(1.0, 0.0)),
    ],
)
def test_every_estimate_is_a_positive_number(plan: Plan) -> None:
    member = classifier()
    states = [member.task.state()] * (2 if isinstance(plan.steps, tuple) else 1)
    found = checked(member, plan, checkpoints=states, memory="20kB")
    expected = found.estimate
    assert found.ok and expected is not None
    assert 0 < expected.seconds < math.inf
    assert expected.peak_bytes is None or expected.peak_bytes > 0
    assert 1 <= expected.rows_at_once <= len(member.sources)


def test_memory_decides_how_many_sources_are_simulated_at_once() -> None:
    member = classifier(sources=Sources.per_example(12))
    rows = []
    for budget in ("1GB", "20kB", "1kB"):
        expected = checked(member, PLANS["tangent"], memory=budget).estimate
        store = simulated(member, PLANS["tangent"], memory=budget)
        assert expected is not None and expected.rows_at_once == store.checkpoints[0].choices.rows_at_once
        rows.append(expected.rows_at_once)
    assert rows[0] == 12 and 12 > rows[1] > rows[2] == 1


def test_what_is_checked_is_counted() -> None:
    member = classifier(parameters="bias")
    found = checked(member, Plan(steps=2, lr=0.1, weight=(1.0, 0.0)), checkpoints=[member.task.state()] * 2)
    assert found.parameters == {"bias": (3,)}
    assert (found.values, found.values_in_all) == (3, 15)
    assert (found.examples, found.sources, found.checkpoints) == (12, 3, 1)
    assert found.to_json()["ok"] and found.to_json()["plan"] == found.plan.to_json()
