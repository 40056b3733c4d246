"""What an update says on its way."""

from pathlib import Path

import pytest

from imprint import Plan, PlanError
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
