"""Stores, recordings and ground truth at addresses, by way of file: addresses and of buckets in memory."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("obstore")
from obstore.store import MemoryStore

import imprint
from imprint.errors import StoreError
from imprint.evaluation import Subsets, Truth, retrain
from imprint.store import bucket as buckets
from imprint.store import uploading
from imprint.store.addresses import parse_address
from imprint.store.bucket import Bucket, Known, describe_failure
from imprint.store.contents import CONTENTS, Contents, Entry
from imprint.store.describing import ABOUT
from imprint.store.files import sha256
from imprint.store.manifest import MANIFEST
from imprint.store.remote import Mirror
from imprint.store.uploading import SILENCE, Upload
from tests.store.bucketed import (
    PLAN,
    SOURCES,
    Cache,
    Killed,
    X,
    Y,
    kill_after,
    new_task,
    scores,
    simulate,
    stop_threads,
)

SHARD = "checkpoint-000/imprints-00000.safetensors"
pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One bucket in memory, whatever the address."""
    store = MemoryStore()
    monkeypatch.setattr(buckets, "_connect", lambda address: store)
    return store


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources in a file, and a list after every file."""
    from imprint.store.workspace import Workspace

    monkeypatch.setattr(uploading, "_PATIENCE", 0.0)
    real = Workspace.bound
    from dataclasses import replace

    monkeypatch.setattr(
        Workspace, "bound", lambda self, d, n: replace(real(self, d, n), rows_per_file=2, rows_at_once=2)
    )


def test_a_store_in_a_bucket_has_the_bytes_and_scores_of_a_local_one(url: str, tmp_path: Path, cache: Cache) -> None:
    local, remote = simulate(tmp_path / "local"), simulate(url)
    assert torch.equal(scores(local), scores(remote))
    there = Path(parse_address(url).path)
    for file in local.manifest.files():
        assert sha256(local.path / file.path) == sha256(there / file.path)
    assert {path.name for path in there.iterdir()} - {path.name for path in local.path.iterdir()} == {CONTENTS}
    cache.move("two")
    assert torch.equal(scores(url), scores(local)) and url in repr(imprint.Store(url))


def test_what_was_uploaded_is_an_ordinary_store_without_the_list(url: str) -> None:
    simulate(url)
    imprint.Store(parse_address(url).path).verify()


def test_shards_are_downloaded_when_they_are_needed_and_once(
    url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(url)
    cache.move("two")
    loaded: list[str] = []
    real = Bucket.download

    def download(self: Bucket, name: str, known: Known, place: Path) -> None:
        loaded.append(name)
        real(self, name, known, place)

    monkeypatch.setattr(Bucket, "download", download)
    store = imprint.Store(url)
    assert set(loaded) == {MANIFEST, "sources.json"}
    scores(store)
    assert SHARD in loaded
    loaded.clear()
    scores(imprint.Store(url))
    assert loaded == []


def test_nothing_is_listed(memory: Any, monkeypatch: pytest.MonkeyPatch, cache: Cache) -> None:
    import obstore

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("listed")

    for name in ("list", "list_with_delimiter"):
        monkeypatch.setattr(obstore, name, refuse)
    simulate("s3://bucket/news")
    cache.move("two")
    imprint.Store("s3://bucket/news").verify()


def test_no_reader_sees_half_a_store_whenever_the_writer_is_killed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Cache, small_shards: None
) -> None:
    whole = simulate(tmp_path / "local")
    expected = scores(whole)
    monkeypatch.setattr(uploading, "SILENCE", 0.0)  # nobody waits for a writer that was killed
    stop_threads(monkeypatch)
    puts, finished = 0, False
    refused: set[str] = set()
    while not finished:
        shutil.rmtree(parse_address(url).path, ignore_errors=True)
        cache.move(f"writer-{puts}")
        with monkeypatch.context() as patched:
            patched.setattr(Upload, "close", lambda self: self._local.release())
            kill_after(patched, puts)
            try:
                simulate(url)
                finished = True
            except Killed:
                pass
        cache.move(f"reader-{puts}")
        try:
            store = imprint.Store(url)
        except StoreError as error:
            refused.add(str(error).replace(url, "").split(":")[0])
            store = simulate(url)  # on another machine
        store.verify()
        assert torch.equal(scores(store), expected)
        assert [file.sha256 for file in store.manifest.files()] == [file.sha256 for file in whole.manifest.files()]
        puts += 1
    assert puts > 8
    assert refused == {"there is nothing at ", " holds an unfinished simulation"}


def die_while_simulating(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be killed in the midst of a simulation, some of whose shards are in the bucket."""
    with monkeypatch.context() as patched:
        kill_after(patched, 10)
        patched.setattr(Upload, "close", lambda self: (self._ended.set(), self._local.release()))
        with pytest.raises(Killed):
            simulate(url)


def test_another_machine_takes_over_the_shards_that_were_finished(
    url: str, monkeypatch: pytest.MonkeyPatch, cache: Cache, small_shards: None
) -> None:
    die_while_simulating(url, monkeypatch)
    with pytest.raises(StoreError, match="unfinished simulation"):
        imprint.Store(url)
    cache.move("two")
    with pytest.raises(StoreError, match="is being written to by process"):
        simulate(url)
    monkeypatch.setattr(uploading, "SILENCE", 0.0)
    stop_threads(monkeypatch)
    done = kill_after(monkeypatch, 1000)
    simulate(url).verify()
    assert "checkpoint-000/base.safetensors" not in done and SHARD not in done


def test_an_unfinished_simulation_is_named_by_its_address(
    url: str, monkeypatch: pytest.MonkeyPatch, small_shards: None
) -> None:
    die_while_simulating(url, monkeypatch)
    with pytest.raises(
        StoreError, match=rf"^{re.escape(url)} holds an unfinished simulation of something else: the so"
    ):
        simulate(url, SOURCES.select([0, 1]))


def test_whoever_was_taken_over_from_cannot_go_on(memory: Any, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Upload(Mirror("s3://bucket/news"))
    cache.move("two")
    with pytest.raises(StoreError, match="is being written to"):
        Upload(Mirror("s3://bucket/news"))
    monkeypatch.setattr(uploading, "SILENCE", 0.0)
    second = Upload(Mirror("s3://bucket/news"))
    monkeypatch.setattr(uploading, "SILENCE", SILENCE)
    (first.folder / "a.json").write_text("{}")
    with pytest.raises(StoreError, match="has taken over"):
        first.push("a.json", now=True)
    first.close()
    second.close()


def test_verify_names_an_object_that_was_changed(url: str) -> None:
    store = simulate(url)
    place = Path(parse_address(url).path) / SHARD
    content = bytearray(place.read_bytes())
    content[-1] ^= 1
    place.write_bytes(content)
    with pytest.raises(StoreError, match=f"{url}/{SHARD} is damaged: it differs from its checksum"):
        store.verify()
    place.write_bytes(content[:-1])
    with pytest.raises(StoreError, match=f"{url}/{SHARD} is damaged: it has"):
        store.verify()
    place.unlink()
    with pytest.raises(StoreError, match=f"{url}/{SHARD} is missing"):
        store.verify()


def test_verify_refuses_a_bucket_without_the_store_though_all_of_it_is_cached(url: str) -> None:
    store = simulate(url)
    shutil.rmtree(parse_address(url).path)
    with pytest.raises(StoreError, match=f"there is nothing at {url}: no list"):
        store.verify()


@pytest.mark.parametrize("path", [MANIFEST, "sources.json", SHARD])
def test_verify_refuses_a_list_without_a_file_of_the_store_or_with_another(url: str, path: str) -> None:
    store = simulate(url)
    place = Path(parse_address(url).path) / CONTENTS
    contents = Contents.parse(place.read_bytes(), "")
    entry = contents.find(path)
    assert entry is not None
    place.write_bytes(contents.having([each for each in contents.files if each is not entry], only=True).to_bytes())
    with pytest.raises(StoreError, match=f"{url}/{path} is missing: contents.json has no such file"):
        store.verify()
    (place.parent / path).write_bytes(b"another")
    other = Entry(path, hashlib.sha256(b"another").hexdigest(), 7, path)
    place.write_bytes(contents.having([other]).to_bytes())
    with pytest.raises(StoreError, match=f"{url}/{path} is not the file that was opened"):
        store.verify()


def test_verify_reads_what_the_bucket_says_of_sources_now(url: str, cache: Cache) -> None:
    store = simulate(url)
    place = Path(parse_address(url).path)
    cache.move("two")
    imprint.Store(url).describe({"press-1": {"owner": "Ann"}})
    text = (place / ABOUT).read_bytes().replace(b"Ann", b"Bob")  # whose own checksum does not fit
    (place / ABOUT).write_bytes(text)
    contents = Contents.parse((place / CONTENTS).read_bytes(), "")
    forged = Entry(ABOUT, hashlib.sha256(text).hexdigest(), len(text), ABOUT)
    (place / CONTENTS).write_bytes(contents.having([forged]).to_bytes())
    with pytest.raises(StoreError, match=r"about\.json.*checksum differs"):
        store.verify()


def test_other_bytes_than_were_uploaded_never_reach_the_cache(url: str, cache: Cache) -> None:
    simulate(url)
    place = Path(parse_address(url).path) / SHARD
    good = place.read_bytes()
    place.write_bytes(bytes(len(good)))
    cache.move("two")
    store = imprint.Store(url)
    with pytest.raises(StoreError, match="differs from its checksum"):
        scores(store)
    assert not (store.path / SHARD).exists() and not list(store.path.rglob("*.tmp"))
    place.write_bytes(good)
    scores(store)
    (store.path / SHARD).write_bytes(bytes(len(good)))  # a damaged cache is downloaded again
    scores(imprint.Store(url))


@pytest.mark.parametrize("path", ["../up.json", "/etc/passwd", "a/../b.json", ".hidden", CONTENTS, "a\\b", ""])
def test_a_list_that_leads_elsewhere_is_refused(url: str, cache: Cache, path: str) -> None:
    from imprint.store.values import sealed

    simulate(url)
    place = Path(parse_address(url).path) / CONTENTS
    for field in ("path", "object"):
        values = json.loads(place.read_text())
        del values["sha256"]
        values["files"][0][field] = path
        place.write_text(json.dumps(sealed(values)))
        cache.move("two")
        with pytest.raises(StoreError, match="a path inside the folder"):
            imprint.Store(url)


def test_a_damaged_or_huge_list_is_refused(url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(url)
    place = Path(parse_address(url).path) / CONTENTS
    text = place.read_text()
    place.write_text(text.replace('"bytes": ', '"bytes": 1', 1))
    with pytest.raises(StoreError, match=CONTENTS):
        imprint.Store(url)
    monkeypatch.setattr("imprint.store.remote.LONGEST", 10)
    with pytest.raises(StoreError, match="at most 10"):
        imprint.Store(url)


def test_a_size_that_does_not_fit_is_refused_before_anything_is_downloaded(url: str, tmp_path: Path) -> None:
    bucket = Bucket(parse_address(url))
    bucket.upload("a", b"abc")
    with pytest.raises(StoreError, match="are free at"):
        bucket.download("a", Known("0" * 64, 1 << 62), tmp_path / "a")
    with pytest.raises(StoreError, match="3 bytes, 4 were written"):
        bucket.download("a", Known("0" * 64, 4), tmp_path / "a")


@pytest.mark.parametrize(
    "address", ["s3://user:SECRET@bucket/a", "s3://bucket/a?X-Signature=SECRET", "az://c/a#SECRET", "gs://SECRET@b/c"]
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(address: str) -> None:
    with pytest.raises(StoreError, match="come from the environment") as error:
        imprint.Store(address)
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize(
    "address", ["s3://bucket", "s3://bucket/../a", "s3:///a", "s3://b/a b", "http://b/a", "file://host/a", "file:///"]
)
def test_an_address_that_names_no_folder_is_refused(address: str) -> None:
    with pytest.raises(StoreError):
        imprint.Store(address)


def test_reasons_hold_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    text = describe_failure(OSError("GET https://x/y?sig=abc failed with hush-hush\nmore"))
    assert text == "GET https://x/y?… failed with …"


def test_another_folder_is_left_alone(url: str) -> None:
    simulate(url)
    with pytest.raises(StoreError, match="holds something else"):
        _record(url, 1)
    with pytest.raises(StoreError, match="made otherwise"):
        imprint.simulate(new_task(), (X, Y), imprint.Sources.by_label(["a", "b"] * 12), PLAN, out=url, progress=False)
    with pytest.raises(StoreError, match="parts meet in a folder"):
        imprint.simulate_part("1/2", new_task(), (X, Y), imprint.Sources.per_example(24), PLAN, out=url)


def test_descriptions_take_effect_in_the_bucket(url: str, cache: Cache) -> None:
    simulate(url).describe({"press-1": {"owner": "Ann"}})
    cache.move("two")
    store = imprint.Store(url)
    assert store.about[1].owner == "Ann"
    store.describe({"press-1": {"owner": "Bob"}})
    store.verify()
    cache.move("one")
    assert imprint.Store(url).about[1].owner == "Bob"
    scores(url)


def _record(folder: Any, steps: int, model: nn.Module | None = None) -> imprint.RunRecorder:
    model = new_task().model if model is None else model
    run = imprint.RunRecorder(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    run.resume()
    for indices in list(run.batches(24, 6, epochs=2))[:steps]:
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            step.backward(nn.functional.cross_entropy(run.model(X[indices]), Y[indices]))
            run.optimiser.step()
    return run


def test_a_recorded_run_resumes_on_another_machine_and_is_replayed(url: str, tmp_path: Path, cache: Cache) -> None:
    whole = _record(tmp_path / "run", 8).finish()
    _record(url, 5).close()
    cache.move("two")
    assert _record(url, 8).finish().sha256 == whole.sha256
    cache.move("three")
    recording = imprint.Recording(url)
    assert recording.sha256 == whole.sha256 and recording.checkpoints == whole.checkpoints


def test_ground_truth_resumes_on_another_machine(url: str, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[int] = []

    def train(subset: torch.Tensor, seed: int) -> nn.Module:
        if len(trained) == 4:
            raise Killed
        trained.append(seed)
        torch.manual_seed(seed + 100 * len(subset) + int(subset[0]))
        return nn.Linear(3, 3)

    subsets = Subsets.without_each(imprint.Sources.by_label([f"press-{i % 3}" for i in range(24)]))
    given: Any = (new_task(), (X[:4], Y[:4]), subsets)
    with pytest.raises(Killed):
        retrain(train, *given, out=url, progress=False)
    cache.move("two")
    trained.clear()
    truth = retrain(train, *given, out=url, progress=False)
    assert len(trained) < len(subsets)
    cache.move("three")
    assert torch.equal(Truth.load(url).values, truth.values)


def test_a_store_in_a_bucket_is_not_changed_and_says_so(url: str) -> None:
    simulate(url)
    with pytest.raises(imprint.StoreError, match=r"is in a bucket, where stores are not changed"):
        imprint.drop(url, "press-1")
    with pytest.raises(imprint.StoreError, match=r"is in a bucket, where stores are not changed"):
        imprint.update(url, new_task(), (X, Y), imprint.Sources.by_label(["all"] * 24), drop=True)
    assert len(imprint.Store(url)) == 6
