"""What an update says on its way, and what it notices in data that was not hashed."""

from pathlib import Path

import pytest
import torch

from imprint import Plan, PlanError, Sources, StoreError, simulate, update
from tests.simulation.killing import task
from tests.simulation.test_updating import STATES, bring, make


def test_fewer_new_sources_than_fit_are_no_matter_of_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make(tmp_path / "store", 0, 1, 2, 3, memory=None)
    assert store.checkpoints[0].choices.rows_at_once == 4
    bring(store, 0, 1, 2, 3, 4)
    assert "at once instead" not in caplog.text


def test_a_plan_without_settings_for_further_checkpoints_says_that_another_may_be_given(tmp_path: Path) -> None:
    store = make(tmp_path / "store", 0, 1, plan=Plan(steps=6, lr=0.2, weight=(1, 2)))
    with pytest.raises(PlanError, match=r"weight has 2 values, but there are 3 checkpoints: give plan= \(--plan\)"):
        bring(store, 0, 1, checkpoints=STATES)
    more = bring(store, 0, 1, checkpoints=STATES, plan=Plan(steps=6, lr=0.2, weight=(1, 2, 1)))
    assert [checkpoint.weight for checkpoint in more.checkpoints] == [1, 2, 1]


@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_other_data_that_no_probe_shows_is_noticed_by_where_the_path_ends(engine: str, tmp_path: Path) -> None:
    x, y = torch.randn(200, 4), torch.arange(200) % 3
    plan = Plan(engine=engine, steps=3, lr=0.2)
    few = Sources.groups({"a": [0, 1], "b": [2]})
    out = tmp_path / "store"
    store = simulate(task(), (x, y), few, plan, out=out, hash_data="none", progress=False)
    other = x.clone()
    other[sorted({*range(200)} - {*store.manifest.request.probes.examples})] += 1
    more = Sources.groups({"a": [0, 1], "b": [2], "c": [3]})
    with pytest.raises(StoreError, match=r"checkpoint 0 the path ends elsewhere .* other training data, which was not"):
        update(out, task(), (other, y), more, progress=False)
    assert update(out, task(), (x, y), more, progress=False).source_ids == ("a", "b", "c")
