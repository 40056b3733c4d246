"""Bringing stores up to date from a terminal."""

from pathlib import Path

import pytest

from imprint import Store
from tests.cli.commands import MODEL, Command

TWO = MODEL.replace('by_label(["times", "post", "[blog]"] * 4)', 'groups({"times": [0, 3], "post": [1, 4]})')


def test_a_store_gains_loses_and_merges_sources(
    command: Command, empty: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (empty / "model.py").write_text(MODEL)
    (empty / "two.py").write_text(TWO)
    assert command("simulate", "two.py:task", "--out", "store", "--no-check").code == 0
    unnamed = command("update", "store")
    assert unnamed.code == 1 and "imprint update store two.py:task" in unnamed.err
    refused = command("update", "store", "model.py:task")
    assert refused.code == 1 and "times, post had other members" in refused.err and "(--drop)" in refused.err
    updated = command("update", "store", "model.py:task", "--drop")
    assert updated.code == 0, updated.err
    assert "2 sources dropped (times, post), 3 sources added ([blog], post, times)" in " ".join(updated.out.split())
    assert command("update", "store", "model.py:task", "--json").values["history"][0]["added"] == 3
    left = command("drop", "store", "[blog]", "times", "--erase", "--json").values
    assert left["sources"] == 1 and [each["kind"] for each in left["history"]] == ["updated", "dropped"]
    again = command("drop", "store", "[blog]", "times", "--erase")
    assert again.code == 0 and "[blog], times were dropped before" in caplog.text
    shown = command("inspect", "store")
    assert shown.code == 0 and "2 sources dropped ([blog], times)" in " ".join(shown.out.split())
    command("simulate", "two.py:task", "--out", "other", "--no-check")
    assert command("drop", "other", "post").code == 0
    merged = command("merge", "store", "other", "--out", "both")
    assert merged.code == 0, merged.err
    assert Store("both").source_ids == ("post", "times") and "2 stores merged" in merged.out
    missing = command("drop", "store", "tmies")
    assert missing.code == 1 and "there is no source 'tmies'" in missing.err


def test_an_update_that_adds_nothing_refuses_other_data(command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    command("simulate", "model.py:task", "--out", "store", "--no-check")
    assert command("update", "store", "model.py:task").code == 0
    (empty / "other.py").write_text(f"{MODEL}\ndata = (data[0] + 1, data[1])\n")
    refused = command("update", "store", "other.py:task")
    assert refused.code == 1 and "made from other training data" in refused.err
    longer = command("update", "store", "model.py:task", "--plan", "steps=77")
    assert longer.code == 1 and "the plan's" in longer.err
