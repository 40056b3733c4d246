"""Stores of one base, merged, are the store of all their sources."""

from pathlib import Path

import pytest

from imprint import Plan, Sources, SourcesError, Store, StoreError, drop, merge
from tests.simulation.killing import PLANS, N
from tests.simulation.test_updating import STATES, assert_same, bring, every_plan, make


@every_plan("tangent", "spectral, projected")
def test_merged_stores_are_that_of_a_fresh_simulation(plan: Plan, tmp_path: Path) -> None:
    """A source that both have is taken once; further sources can be simulated into the result."""
    if plan.epsilon == "auto":
        pytest.skip("ε is chosen from the sources, and stores with another one are not of one base")
    first, second = make(tmp_path / "a", 1, 2, 3, plan=plan), make(tmp_path / "b", 0, 3, 5, plan=plan)
    first.describe({"1": {"owner": "Ann"}})
    second.describe({"5": {"owner": "Eve"}})
    merged = merge([first.path, second.path], tmp_path / "merged", progress=False)
    assert_same(merged, make(tmp_path / "fresh", 1, 2, 3, 0, 5, plan=plan))
    assert [about.owner for about in merged.about] == ["Ann", "", "", "", "Eve"]
    (change,) = merged.manifest.history
    assert (change.kind, change.before, change.added) == ("merged", (first.sha256, second.sha256), 5)
    assert merge([first.path, second.path], tmp_path / "merged", progress=False).sha256 == merged.sha256
    for store in (first, second):
        assert Store(store.path).sha256 == store.sha256
    more = bring(merged, 1, 2, 3, 0, 5, 7, like=plan)
    assert_same(more, make(tmp_path / "more", 1, 2, 3, 0, 5, 7, plan=plan))


def test_stores_of_different_bases_are_not_merged(tmp_path: Path) -> None:
    first = make(tmp_path / "a", 1, 2).path
    other = make(tmp_path / "b", 3, checkpoints=[STATES[0], STATES[2]]).path
    with pytest.raises(StoreError, match=r"b is not of the base of .*a: the weights of checkpoint 1 changed"):
        merge([first, other], tmp_path / "merged")
    longer = make(tmp_path / "c", 3, plan=Plan(steps=3, lr=0.2)).path
    with pytest.raises(StoreError, match="the plan's steps was"):
        merge([first, longer], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    grown = make(tmp_path / "d", sources=Sources.groups({"1": [0], "9": [N - 1]})).path
    with pytest.raises(SourcesError, match=r"source '1' has other members in .*d than in .*a: drop it"):
        merge([first, grown], tmp_path / "merged")
    merge([first, drop(grown, "1", progress=False).path], tmp_path / "merged", progress=False)
    with pytest.raises(StoreError, match="already holds a store, made otherwise"):
        merge([first, make(tmp_path / "e", 4).path], tmp_path / "merged")


def test_coefficients_on_different_bases_do_not_mix(tmp_path: Path) -> None:
    """As on machines that round otherwise."""
    plan = PLANS["spectral"]
    first, second = make(tmp_path / "a", 1, plan=plan), make(tmp_path / "b", 2, plan=plan, batch_size=5)
    with pytest.raises(StoreError, match=r"the basis of the curvature differs.*imprint\.update"):
        merge([first.path, second.path], tmp_path / "merged")


def test_the_first_store_says_whose_a_source_is_and_a_difference_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(tmp_path / "a", 1, 2), make(tmp_path / "b", 2, 3)
    first.describe({"2": {"owner": "Ann"}})
    second.describe({"2": {"owner": "Bob", "licence": "MIT"}, "3": {"owner": "Eve"}})
    merged = merge([first.path, second.path], tmp_path / "merged", progress=False)
    assert [about.owner for about in merged.about] == ["", "Ann", "Eve"] and merged.about[1].licence == ""
    assert "owner of source '2' stays 'Ann', not 'Bob'; licence of source '2' stays '', not 'MIT'" in caplog.text
    assert f"what {second.path} says differs" in caplog.text and "`imprint describe`" in caplog.text
    merged.describe({"2": {"owner": "Bob"}})
    again = merge([first.path, second.path], tmp_path / "merged", progress=False)
    assert again.about[1].owner == "Bob", "what was said since stays"
    (merged.path / "about.json").unlink()  # as if killed before
    assert merge([first.path, second.path], tmp_path / "merged", progress=False).about[1].owner == "Ann"
