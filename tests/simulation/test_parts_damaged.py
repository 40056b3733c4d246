"""What the parts of a store rely on may be lost or damaged: the error says what to delete, and that mends it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from imprint import Store, StoreError, merge
from imprint.export import Export
from imprint.simulation.sharing import open_folder
from imprint.store.files import Lock
from imprint.store.part_writing import PartRecord
from tests.simulation.killing import PLANS, Made, contents, run_part

PLAN = PLANS["tangent"]


def both_parts(out: Path) -> Path:
    for text in ("1/2", "2/2"):
        run_part(out, text, PLAN)
    return out / "parts"


def garble(place: Path) -> None:
    content = place.read_text()
    place.write_text(content[: len(content) // 2])


def refuse(call: Callable[[], object]) -> str:
    with pytest.raises(StoreError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("harm", [garble, Path.unlink], ids=["garbled", "lost"])
@pytest.mark.parametrize("name", ["part.json", "sources.json"])
def test_a_damaged_part_is_to_be_deleted_and_made_again(
    name: str, harm: Callable[[Path], None], made: Made, tmp_path: Path
) -> None:
    parts = both_parts(tmp_path / "store")
    harm(parts / "1-of-2" / name)
    said = refuse(lambda: merge(tmp_path / "store", progress=False))
    if (name, harm) == ("part.json", Path.unlink):
        assert "these are missing: 1/2 (unfinished)" in said
        said = refuse(lambda: run_part(tmp_path / "store", "1/2", PLAN))
    assert f"elete {parts / '1-of-2'}, and make the part again" in said
    shutil.rmtree(parts / "1-of-2")
    run_part(tmp_path / "store", "1/2", PLAN)
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(PLAN))


@pytest.mark.parametrize("harm", ["garbled", "lost", "folder lost"])
def test_a_damaged_request_is_written_anew_by_any_part(harm: str, made: Made, tmp_path: Path) -> None:
    shared = both_parts(tmp_path / "store") / "shared" / "request"
    if harm == "folder lost":
        shutil.rmtree(shared)
        assert "request is missing: make any part again" in refuse(lambda: merge(tmp_path / "store"))
    else:
        (garble if harm == "garbled" else Path.unlink)(shared / "request.json")
        for call in (lambda: merge(tmp_path / "store"), lambda: run_part(tmp_path / "store", "2/2", PLAN)):
            assert f"Delete {shared}, make any part again, which writes it anew" in refuse(call)
        shutil.rmtree(shared)
    run_part(tmp_path / "store", "2/2", PLAN)
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(PLAN))


def test_damaged_choices_are_to_be_deleted_with_all_parts(made: Made, tmp_path: Path) -> None:
    parts = both_parts(tmp_path / "store")
    garble(parts / "shared" / "checkpoint-000" / "settled.json")
    assert f"Delete {parts}, and make all parts again." in refuse(lambda: merge(tmp_path / "store"))
    shutil.rmtree(parts)
    both_parts(tmp_path / "store")
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(PLAN))


def test_a_file_of_another_version_is_not_to_be_deleted(tmp_path: Path) -> None:
    place = both_parts(tmp_path / "store") / "shared" / "request" / "request.json"
    place.write_text(place.read_text().replace('"schema": ', '"schema": 9'))
    assert refuse(lambda: merge(tmp_path / "store")).endswith("use that one for all parts.")


# --- several processes merge


def test_nothing_is_read_while_another_process_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = both_parts(tmp_path / "store")
    monkeypatch.setattr(PartRecord, "read", lambda path: pytest.fail("it may be gone by now"))
    lock = Lock(tmp_path / "store")
    shutil.rmtree(parts / "shared" / "checkpoint-000")
    assert "is writing to" in refuse(lambda: merge(tmp_path / "store"))
    lock.release()


def test_a_merge_that_comes_too_late_returns_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process has come to the end between two looks at the folder."""
    both_parts(tmp_path / "store")
    shutil.copytree(tmp_path / "store", tmp_path / "other")
    merge(tmp_path / "other", progress=False)
    find, raced = Path.is_dir, list[Path]()

    def race(path: Path) -> bool:
        if path == tmp_path / "store" / "parts" and not raced:
            raced.append(path)
            merge(path.parent, progress=False)
        return find(path)

    monkeypatch.setattr(Path, "is_dir", race)
    assert merge(tmp_path / "store", progress=False).sha256 and raced
    Store(tmp_path / "store").verify()


# --- stores, and parts of something else


def test_stores_and_parts_are_told_apart(tmp_path: Path, made: Made) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for place in (one, two):
        shutil.copytree(made(PLAN), place)
    assert "one is one of the stores to be merged" in refuse(lambda: merge([one, two], one))
    assert "nothing is no store, as " in refuse(lambda: merge([one, tmp_path / "nothing"], tmp_path / "new"))
    assert "merging writes to a folder" in refuse(lambda: merge([one, two], "s3://bucket/new"))


def test_an_address_is_named_as_it_was_given(tmp_path: Path) -> None:
    """Though a path that is made of it has one slash less, as the command line makes it."""
    given = Path("s3://bucket/news")
    for call in (
        lambda: merge([given, tmp_path], tmp_path / "new"),
        lambda: open_folder(given),
        lambda: open_folder("s3://bucket/news"),
        lambda: Export.open(given),
    ):
        assert refuse(call).startswith("s3://bucket/news ")
