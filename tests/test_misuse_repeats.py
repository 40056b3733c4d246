"""A repeat makes what its store was made by, and goes into no other folder."""

from pathlib import Path

import pytest

from imprint import Plan, StoreError
from tests.mistakes import store_of


def test_a_repeat_takes_the_batch_size_and_the_plan_of_its_store(tmp_path: Path) -> None:
    first = store_of(tmp_path / "first", batch_size=5)
    for repeat in (first, tmp_path / "first", str(tmp_path / "first")):
        again = store_of(plan=None, repeat=repeat)
        assert again.manifest.execution == first.manifest.execution
        assert again.manifest.plan == first.manifest.plan
        shards = (again.checkpoints[0].imprints, first.checkpoints[0].imprints)
        assert shards[0] == shards[1]


def test_a_folder_with_other_choices_is_not_repeated_into(tmp_path: Path) -> None:
    plan = Plan(steps=3)
    first = store_of(tmp_path / "first", plan=plan, memory="1kB")

    def stop(done: int, total: int) -> None:
        if done:  # the step is chosen
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # all sources at once here, one at a time there
        store_of(tmp_path / "second", plan=plan, progress=stop)
    with pytest.raises(StoreError, match=r"second holds an unfinished simulation that chose other steps than .*first"):
        store_of(tmp_path / "second", plan=plan, repeat=first)
    assert len(store_of(tmp_path / "second", plan=plan)) == 4  # what was there is as it was
