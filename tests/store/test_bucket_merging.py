"""Stores in buckets are merged into a folder, with what was described there."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("obstore")

import imprint
from imprint.about import About
from imprint.errors import StoreError
from imprint.store.addresses import parse_address
from imprint.store.bucket import Bucket
from tests.store.bucketed import Cache, simulate

ANN, BOB = About("Ann"), About("Bob")
ONE = imprint.Sources.groups({"ann": [0, 1, 2], "bob": [3, 23]})
TWO = imprint.Sources.groups({"cid": [5, 6, 23]})


def test_stores_in_a_bucket_are_merged_as_folders_are(url: str, tmp_path: Path, cache: Cache) -> None:
    """A plain copy of the folder would lose the descriptions: the second ones are in an object of another name."""
    folders = [simulate(tmp_path / name, sources).path for name, sources in (("one", ONE), ("two", TWO))]
    simulate(f"{url}/one", ONE).describe({"ann": BOB})
    imprint.Store(f"{url}/one").describe({"ann": ANN})
    simulate(f"{url}/two", TWO)
    cache.move("two")
    merged = imprint.merge([f"{url}/one", Path(f"{url}/two")], tmp_path / "merged", progress=False)
    local = imprint.merge(folders, tmp_path / "local", progress=False)
    merged.verify()
    assert merged.source_ids == ("ann", "bob", "cid") and merged.about == (ANN, About(), About())
    assert [file.sha256 for file in merged.manifest.files()] == [file.sha256 for file in local.manifest.files()]
    mixed = imprint.merge([f"{url}/one", folders[1]], tmp_path / "mixed", progress=False)
    assert mixed.about == merged.about


def test_a_merge_goes_to_a_folder(url: str, tmp_path: Path, cache: Cache) -> None:
    simulate(f"{url}/one", ONE)
    with pytest.raises(StoreError, match=f"{url}/new is in a bucket, and merging writes to a folder: give one as out="):
        imprint.merge([f"{url}/one", tmp_path], f"{url}/new", progress=False)
    with pytest.raises(StoreError, match=f"{url}/one is in a bucket, and merging writes to a folder"):
        imprint.merge(f"{url}/one", progress=False)


def test_what_is_no_store_is_refused_before_it_is_downloaded(
    url: str, tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(f"{url}/one", ONE)
    place = Path(parse_address(url).path)
    shutil.rmtree(place / "one")
    monkeypatch.delattr(Bucket, "download")
    for name in ("one", "nothing"):
        with pytest.raises(StoreError, match=f"{url}/{name} holds no store, and nothing else is merged from a bucket"):
            imprint.merge([f"{url}/{name}"], tmp_path / "new", progress=False)
    with pytest.raises(
        StoreError, match=f"{url}/one is in a bucket, and merged with finished stores alone: .* is none"
    ):
        imprint.merge([f"{url}/one", tmp_path], tmp_path / "new", progress=False)
