"""The order in which a source's members are given changes nothing: a store does not keep it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, Task, simulate, update
from imprint.store.fingerprint import of_sources
from tests.simulation.killing import N, data

GIVEN: dict[str, list[int]] = {"ann": list(range(9)), "bob": list(range(9, N))}
TURNED = {**GIVEN, "bob": GIVEN["bob"][::-1]}
PLANS = {
    "dropout": Plan(steps=4, lr=0.2, dropout=True, batch_size=7),
    "samples": Plan(steps=4, lr=0.2, batch_size=7, source_sample=4),
}
under_plans_that_draw = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def run(groups: dict[str, list[int]], plan: Plan, **given: Any) -> Store:
    return simulate(task(), data(), Sources.groups(groups), plan, progress=False, **given)


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)))


def imprints(store: Store) -> Tensor:
    found = store.imprints(0, 0, len(store), torch.device("cpu"))
    return torch.cat([rows.flatten(1) for rows in found.values()], dim=1)


@under_plans_that_draw
def test_members_in_another_order_draw_the_same(plan: Plan, tmp_path: Path) -> None:
    expected = imprints(run(GIVEN, plan))
    turned = run(TURNED, plan, out=tmp_path / "store")
    assert torch.equal(imprints(turned), expected)
    assert torch.equal(imprints(run(GIVEN, plan, repeat=turned)), expected)
    new = Sources.groups({**GIVEN, "cid": [3, 1, 2]})
    assert torch.equal(imprints(update(turned, task(), data(), new, progress=False))[:2], expected)


@under_plans_that_draw
def test_a_repetition_of_draws_that_depended_on_the_order_says_so(plan: Plan) -> None:
    for groups, says in ((GIVEN, False), (TURNED, True)):
        store = run(groups, plan)
        request = replace(store.manifest.request, members=None, sources=of_sources(Sources.groups(groups)))
        store.manifest = replace(store.manifest, request=request)  # as version 0.1 kept it
        again = run(groups, plan, repeat=store)
        assert any("depended on the order" in warning for warning in again.warnings) == says
