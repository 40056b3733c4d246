"""What several machines change beside a store in a bucket: none loses what another one did."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("obstore")

import imprint
from imprint.about import About
from imprint.errors import StoreError
from imprint.keys import make_keys
from imprint.store import uploading
from imprint.store.addresses import parse_address
from imprint.store.bucket import Bucket
from imprint.store.contents import CONTENTS, Contents
from imprint.store.signing import SIGNATURE, VALIDATION, sign_store
from imprint.store.uploading import Upload
from tests.store.bucketed import Cache, Killed, kill_after, simulate, stop_threads

TIMES, POST = About("Times Ltd"), About("Post Ltd")


def _open_two(url: str, cache: Cache) -> tuple[imprint.Store, imprint.Store]:
    """Open a store on two machines, before either changes anything."""
    simulate(url)
    first = imprint.Store(url)
    cache.move("two")
    return first, imprint.Store(url)


def _read_new(url: str, cache: Cache) -> imprint.Store:
    """Open the store on a machine that has never seen it."""
    cache.move("three")
    return imprint.Store(url)


def _list(url: str) -> Contents:
    return Contents.parse((Path(parse_address(url).path) / CONTENTS).read_bytes(), "")


def test_what_another_machine_described_stays_and_so_does_its_history(url: str, cache: Cache) -> None:
    first, second = _open_two(url, cache)
    second.describe({"press-1": TIMES})
    first.describe({"press-2": POST})
    found = _read_new(url, cache)
    assert found.about[1:3] == first.about[1:3] == (TIMES, POST)
    assert [change.before for change in found.description.changes] == [{"press-1": About()}, {"press-2": About()}]
    found.verify()


def test_an_owner_that_another_machine_changed_is_in_the_history(url: str, cache: Cache) -> None:
    first, second = _open_two(url, cache)
    second.describe({"press-1": TIMES})
    first.describe({"press-1": POST})
    found = _read_new(url, cache)
    assert found.about[1] == POST and found.description.changes[-1].before == {"press-1": TIMES}


def test_what_another_machine_put_beside_or_removed_stays_so(url: str, cache: Cache) -> None:
    """As a validation is put there, and a signature removed; the first machine has the signature in its cache."""
    simulate(url)
    with (store := imprint.Store(url)).editing():
        (store.path / SIGNATURE).write_text("{}")
    first = imprint.Store(url)
    cache.move("two")
    with (second := imprint.Store(url)).editing():
        (second.path / SIGNATURE).unlink()
        (second.path / VALIDATION).write_text('{"of": "two"}')
    first.describe({"press-2": POST})
    found = _read_new(url, cache)
    assert (found.path / VALIDATION).read_text() == (first.path / VALIDATION).read_text() == '{"of": "two"}'
    assert not (found.path / SIGNATURE).exists() and found.about[2] == POST


def test_a_folder_that_is_replaced_is_first_what_the_bucket_has(url: str, cache: Cache) -> None:
    """With its tensors: a witness that is there already is taken again, and has to be there as a whole."""
    simulate(url)
    names = [f"witnesses/000/{name}" for name in ("manifest.json", "base.safetensors", "old.safetensors")]
    with (first := imprint.Store(url)).editing(replaced="witnesses"):
        (first.path / "witnesses" / "000").mkdir(parents=True)
        for name in names:
            (first.path / name).write_text("first")
    cache.move("two")
    with (second := imprint.Store(url)).editing(replaced="witnesses"):
        assert [(second.path / name).read_text() for name in names] == ["first"] * 3
        (second.path / names[1]).write_text("second")
        (second.path / names[2]).unlink()
    with first.editing(replaced="witnesses"):
        assert [(first.path / name).read_text() for name in names[:2]] == ["first", "second"]
        assert not (first.path / names[2]).exists()


def test_nobody_signs_what_another_machine_has_described(url: str, cache: Cache, tmp_path: Path) -> None:
    first, second = _open_two(url, cache)
    second.describe({"press-1": TIMES})
    with pytest.raises(StoreError, match="was changed since it was opened"):
        sign_store(first, make_keys(tmp_path / "key")[0])
    assert _list(url).find(SIGNATURE) is None


def _empty(url: str) -> str:
    place = Path(parse_address(url).path)
    for path in [each for each in place.rglob("*") if each.is_file()]:
        path.unlink()
    return "there is nothing at"


def _exchange(url: str) -> str:
    _empty(url)
    simulate(url, imprint.Sources.by_label([f"press-{i % 4}" for i in range(24)]))
    return "holds another store than was opened"


@pytest.mark.parametrize("change", [_empty, _exchange])
def test_nothing_is_put_beside_another_store_or_none(url: str, cache: Cache, change: Callable[[str], str]) -> None:
    first, _ = _open_two(url, cache)
    words, place = change(url), Path(parse_address(url).path)
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    with pytest.raises(StoreError, match=words):
        first.describe({"press-1": TIMES})
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before


def test_an_edit_that_is_killed_leaves_what_was_known_or_what_is(
    url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(url).describe({"press-1": TIMES})
    monkeypatch.setattr(uploading, "SILENCE", 0.0)
    stop_threads(monkeypatch)
    requests, finished, found = 0, False, set()
    while not finished:
        cache.move(f"writer-{requests}")
        imprint.Store(url).describe({"press-1": TIMES})
        with monkeypatch.context() as patched:
            patched.setattr(Upload, "close", lambda self: self._local.release())
            store = imprint.Store(url)
            kill_after(patched, requests)
            try:
                store.describe({"press-1": POST})
                finished = True
            except Killed:
                pass
        cache.move(f"reader-{requests}")
        store = imprint.Store(url)
        store.verify()
        found.add(store.about[1])
        requests += 1
    assert found == {TIMES, POST} and store.about[1] == POST and requests > 5


def test_objects_are_deleted_before_others_may_use_their_names(
    url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held = simulate(url), dict[str, bool]()
    store.describe({"press-1": TIMES})
    real = Bucket.delete

    def delete(self: Bucket, name: str) -> None:
        held[name] = json.loads((Path(parse_address(url).path) / CONTENTS).read_text())["held"]
        real(self, name)

    monkeypatch.setattr(Bucket, "delete", delete)
    store.describe({"press-1": POST})
    assert held == {"about.json": True} and not _list(url).held


def _write(store: imprint.Store, *names: str) -> None:
    for name in names:
        (store.path / name).write_text("{}")


def test_an_edit_that_fails_changes_nothing_in_the_bucket(
    url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = simulate(url)
    before = _list(url).files
    real = Bucket.upload

    def upload(self: Bucket, name: str, content: Path | bytes) -> None:
        if name == SIGNATURE:
            raise StoreError("no.")
        real(self, name, content)

    monkeypatch.setattr(Bucket, "upload", upload)
    with pytest.raises(StoreError, match=r"no\."), store.editing():
        _write(store, "about.json", SIGNATURE)
    assert _list(url).files == before and not _list(url).held
    assert not (Path(parse_address(url).path) / "about.json").exists()
