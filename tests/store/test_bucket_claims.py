"""What keeps two writers of one address from spoiling each other's work, by way of buckets in memory."""

import threading
import time
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
from imprint.store.remote import Mirror
from imprint.store.uploading import Upload

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
    monkeypatch.setattr(Upload, "_renew", lambda self: None)  # as of a process that is stopped
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
