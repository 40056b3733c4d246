"""Drops that are repeated, of sources with unusual ids, and of stores with damaged files."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from imprint import Sources, SourcesError, StoreError, drop, merge
from tests.simulation.test_updating import bring, make


def test_a_repeated_drop_says_that_its_sources_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a kill between the new manifest and the erasure."""
    caplog.set_level(logging.WARNING)
    store = make(tmp_path / "store", 0, 1, 2, 3)
    left = drop(store, ["1", "2"], progress=False)
    assert list(left.path.rglob("imprints-*")) != [
        left.path / file.path for c in left.checkpoints for file in c.imprints
    ]
    again = drop(store.path, ["1", "2"], erase=True, progress=False)
    assert again.sha256 == left.sha256
    assert "1, 2 were dropped before; " in caplog.text and "of earlier versions erased now" in caplog.text
    used = {file.path for file in left.manifest.files()}
    assert {str(p.relative_to(left.path)) for p in left.path.rglob("*") if p.is_file()} == {*used, "manifest.json"}
    caplog.clear()
    assert drop(again, ["1", "3"], progress=False).source_ids == ("0",)
    assert "1 was dropped before: nothing of it is in this version" in caplog.text
    with pytest.raises(SourcesError, match="there is no source '7'"):
        drop(store.path, ["1", "7"], progress=False)


def test_ids_that_were_given_as_numbers_are_dropped_as_numbers(tmp_path: Path) -> None:
    store = make(tmp_path / "store", sources=Sources.groups({1: [0], 2: [1, 2]}))
    with pytest.raises(SourcesError, match=r"must be ids of sources, such as \['times'\], got 1"):
        drop(store, 1)  # type: ignore[arg-type]
    assert drop(store, [1], progress=False).source_ids == ("2",)  # type: ignore[list-item]


def test_a_damaged_file_is_named_with_its_sources_and_what_to_do(tmp_path: Path) -> None:
    store, other = make(tmp_path / "store", 0, 1, 2), make(tmp_path / "other", 5)
    place = store.path / store.checkpoints[0].imprints[0].path
    content = bytearray(place.read_bytes())
    content[-3] ^= 1
    place.write_bytes(content)
    changes: list[Callable[[], object]] = [
        lambda: drop(store.path, "1", progress=False),
        lambda: bring(store.path, 0, 2, drop=True),
        lambda: bring(store.path, 1, 0, 2, 3),
        lambda: merge([store.path, other.path], tmp_path / "merged", progress=False),
        lambda: merge([other.path, store.path], tmp_path / "merged too", progress=False),
    ]
    for change in changes:
        with pytest.raises(
            StoreError, match=r"imprints-00000\S* is damaged: .*sources? '0'.*Restore it from a copy, or"
        ):
            change()
