"""What keeps two writers of one address from spoiling each other's work, by way of buckets in memory."""

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("obstore")
from obstore.store import MemoryStore

from imprint.errors import StoreError
from imprint.store import bucket as buckets
from imprint.store import uploading
from imprint.store.addresses import parse_address
from imprint.store.bucket import Bucket
from imprint.store.manifest import MANIFEST
from imprint.store.remote import Mirror
from imprint.store.uploading import Upload
from tests.store.bucketed import stop_threads

ADDRESS = "s3://bucket/news"


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One bucket in memory, whatever the address."""
    store = MemoryStore()
    monkeypatch.setattr(buckets, "_connect", lambda address: store)
    return store


def _begin(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Upload:
    monkeypatch.setenv("IMPRINT_CACHE", str(cache))
    return Upload(Mirror(ADDRESS))


def test_a_writer_that_wakes_up_after_it_was_taken_over_from_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_threads(monkeypatch)
    stopped = _begin(monkeypatch, tmp_path / "one")
    monkeypatch.setattr(uploading, "SILENCE", 0.0)
    other = _begin(monkeypatch, tmp_path / "two")
    (other.folder / "a.json").write_text("the other's")
    other.finish(["a.json"])
    (stopped.folder / "a.json").write_text("of the one that was stopped")
    with pytest.raises(StoreError, match="has taken over"):
        stopped.finish(["a.json"])
    stopped.close()
    monkeypatch.setenv("IMPRINT_CACHE", str(tmp_path / "three"))
    assert (Mirror(ADDRESS).open().folder / "a.json").read_text() == "the other's"


def test_whoever_is_too_late_is_told_so_whatever_length_the_first_one_wrote() -> None:
    bucket = Bucket(parse_address(ADDRESS))
    assert bucket.swap("list", b"a list that is longer", None) is not None
    assert bucket.swap("list", b"short", None) is None


def test_an_interrupt_while_an_address_is_left_leaves_nobody_claiming_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = _begin(monkeypatch, tmp_path / "one")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "swap", interrupt)
        with pytest.raises(KeyboardInterrupt):
            upload.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "imprint-upload"]
    _begin(monkeypatch, tmp_path / "one").close()


def test_a_machine_whose_clock_is_wrong_takes_over_from_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _begin(monkeypatch, tmp_path / "one")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    with pytest.raises(StoreError, match="is being written to"):
        _begin(monkeypatch, tmp_path / "two")
    first.close()


SLOW = 2.0  # seconds that one upload, download or checksum takes below, of writers that are dead after …
SILENCE = 0.8


def _slow_down(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    of: Any,
    function: str,
    name: str,
    meanwhile: Callable[[], None] = lambda: None,
) -> list[str]:
    """Have a function take long for one file; return what somebody else who wants to write is told as it ends."""
    real, told = getattr(of, function), list[str]()

    def slow(*given: Any) -> Any:
        found = real(*given)
        if any(str(each).endswith(name) for each in given) and not told:
            told.append("")
            time.sleep(SLOW)
            meanwhile()
            with pytest.raises(StoreError) as error:
                _begin(monkeypatch, tmp_path / "other")
            told[0] = str(error.value)
        return found

    monkeypatch.setattr(of, function, slow)
    monkeypatch.setattr(uploading, "SILENCE", SILENCE)
    return told


def _read(monkeypatch: pytest.MonkeyPatch, cache: Path) -> dict[str, str]:
    monkeypatch.setenv("IMPRINT_CACHE", str(cache))
    mirror = Mirror(ADDRESS).open(whole=True)
    assert mirror.contents is not None
    return {entry.path: (mirror.folder / entry.path).read_text() for entry in mirror.contents.files}


def _push(upload: Upload, paths: Sequence[str], content: str) -> None:
    for path in paths:
        (upload.folder / path).write_text(content)
    upload.push(*paths, now=True)


@pytest.mark.parametrize("slow", ["b.safetensors", "c.json"])
def test_a_writer_keeps_its_claim_while_it_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    """And what it has uploaded is kept until the list names it, and what the list names until it no longer does."""
    paths, seen = ("a.safetensors", "b.safetensors", "c.json"), dict[str, str]()
    upload = _begin(monkeypatch, tmp_path / "one")
    _push(upload, paths, "old")
    new = f"{slow}.{hashlib.sha256(b'new').hexdigest()[:12]}"
    told = _slow_down(
        monkeypatch, tmp_path, Bucket, "upload", new, lambda: seen.update(_read(monkeypatch, tmp_path / "reader"))
    )
    _push(upload, paths, "new")
    assert "is being written to by process" in told[0]
    assert seen == dict.fromkeys(paths, "old")
    assert _read(monkeypatch, tmp_path / "three") == dict.fromkeys(paths, "new")
    upload.finish(paths)
    assert _read(monkeypatch, tmp_path / "four") == dict.fromkeys(paths, "new")


def test_a_writer_keeps_its_claim_while_it_computes_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = _begin(monkeypatch, tmp_path / "one")
    (upload.folder / "a.safetensors").write_text("a")
    upload.push("a.safetensors", now=True)
    told = _slow_down(monkeypatch, tmp_path, uploading, "sha256", "a.safetensors")
    upload.finish(["a.safetensors"])
    assert "is being written to by process" in told[0]
    assert _read(monkeypatch, tmp_path / "two") == {"a.safetensors": "a"}


def test_a_writer_keeps_its_claim_while_it_brings_what_was_finished_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _begin(monkeypatch, tmp_path / "one")
    (first.folder / "a.safetensors").write_text("a")
    first.push("a.safetensors")
    first.close()
    told = _slow_down(monkeypatch, tmp_path, Bucket, "download", "a.safetensors")
    second = _begin(monkeypatch, tmp_path / "two")
    assert "is being written to by process" in told[0]
    second.finish(["a.safetensors"])


def test_an_edit_keeps_its_claim_while_it_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = _begin(monkeypatch, tmp_path / "one")
    (upload.folder / MANIFEST).write_text("a store")
    upload.finish([MANIFEST])
    mirror = Mirror(ADDRESS).open()
    told = _slow_down(monkeypatch, tmp_path, Bucket, "upload", "w/a.safetensors")
    with uploading.editing(mirror, replaced="w"):
        (mirror.folder / "w").mkdir()
        (mirror.folder / "w" / "a.safetensors").write_text("a")
    assert "is being written to by process" in told[0]
    assert _read(monkeypatch, tmp_path / "two") == {MANIFEST: "a store", "w/a.safetensors": "a"}


def test_small_files_that_wait_go_with_a_later_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploading, "_PATIENCE", 1e9)
    upload = _begin(monkeypatch, tmp_path / "one")
    (upload.folder / "a.json").write_text("a")
    upload.push("a.json")
    monkeypatch.setattr(uploading, "_PATIENCE", 0.0)
    end = time.monotonic() + 20
    while _list_files() != ["a.json"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    upload.close()


def test_nothing_is_claimed_again_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was left for later, and is due between the last list and the end."""
    monkeypatch.setattr(uploading, "_PATIENCE", 1e9)
    upload = _begin(monkeypatch, tmp_path / "one")
    (upload.folder / "a.json").write_text("a")
    upload.push("a.json")
    monkeypatch.setattr(uploading, "_PATIENCE", 0.0)
    real = upload._end

    def end() -> None:
        time.sleep(2.5)
        real()

    monkeypatch.setattr(upload, "_end", end)
    upload.finish(["a.json"])
    contents = Mirror(ADDRESS).look()
    assert contents is not None and not contents.held


def _list_files() -> list[str]:
    contents = Mirror(ADDRESS).look()
    return [] if contents is None else [entry.path for entry in contents.files]
