"""What a store says of its sources: kept beside the imprints, changed without them, and signed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import About, Attribution, Plan, Sources, SourcesError, Store, StoreError, attribute, simulate
from imprint.keys import make_keys
from imprint.store.describing import ABOUT
from imprint.store.signing import sign_store
from imprint.store.values import sealed
from tests.cli.forging import DATA, task

TIMES = About("The Times", "CC-BY-4.0", "https://times.example")
SOURCES = Sources.by_label(["a", "b", "c"] * 3)


def make(out: Path, sources: Sources = SOURCES, **options: Any) -> Store:
    return simulate(task(), DATA, sources, Plan(steps=2, lr=0.1), out=out, progress=False, **options)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make(tmp_path / "store")


def test_a_simulation_keeps_what_is_known_of_its_sources(tmp_path: Path) -> None:
    store = make(tmp_path / "store", SOURCES.describe({"b": TIMES}))
    assert store.about == Store(store.path).about == (About(), TIMES, About())
    assert make(tmp_path / "plain").about == ()


def test_it_is_no_part_of_the_store_that_anything_depends_on(store: Store) -> None:
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    store.describe({"b": TIMES})
    after = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {store.path / ABOUT} and before.items() <= after.items()
    assert Store(store.path).sha256 == store.sha256
    Store(store.path).verify()


def test_another_owner_neither_refuses_nor_repeats_a_simulation(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    again = make(store.path, SOURCES.describe({"b": TIMES}))  # a store without descriptions gets them
    assert again.sha256 == store.sha256 and again.about[1] == TIMES
    kept = make(store.path, SOURCES.describe({"b": About("Somebody")}))
    assert kept.about[1] == TIMES and "describes its sources otherwise than given here" in caplog.text
    assert "owner of source 'b' stays 'The Times', not 'Somebody'" in caplog.text
    assert make(store.path).about[1] == TIMES


def test_a_simulation_that_was_interrupted_resumes_with_other_owners(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(
            task(), DATA, SOURCES.describe({"a": About("Old")}), Plan(steps=2, lr=0.1), out=tmp_path / "store",
            progress=stop,
        )  # fmt: skip
    assert make(tmp_path / "store", SOURCES.describe({"a": About("New")})).about[0] == About("New")


def test_descriptions_change_one_by_one_and_the_store_keeps_what_was_known(store: Store) -> None:
    store.describe({"b": TIMES})
    store.describe({"a": {"owner": "Ann"}, "b": {}})
    store.describe({"a": {"owner": "Ann"}})  # changes nothing, and is no change
    assert store.about == (About("Ann"), About(), About())
    changes = Store(store.path).description.changes
    assert [change.before for change in changes] == [{"b": About()}, {"b": TIMES, "a": About()}]
    assert all(change.time.endswith("+00:00") for change in changes)


def test_two_processes_do_not_lose_what_each_other_wrote(store: Store) -> None:
    other = Store(store.path)
    store.describe({"a": TIMES})
    other.describe({"b": About("Bob")})
    assert other.about == Store(store.path).about == (TIMES, About("Bob"), About())


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_lose_a_simulation(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*given: Any) -> bool:
        raise StoreError("read-only.")

    monkeypatch.setattr("imprint.store.reading.write_description", refuse)
    assert make(store.path, SOURCES.describe({"a": TIMES})).about == ()
    assert "are not described: read-only." in caplog.text


def test_only_so_many_changes_are_kept_and_the_others_are_counted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.store.describing._KEPT", 2)
    for owner in "wxyz":
        store.describe({"a": {"owner": owner}})
    found = store.description
    assert [change.before["a"].owner for change in found.changes] == ["x", "y"] and found.forgotten == 2


def test_a_file_that_would_become_too_long_forgets_changes_first(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("imprint.store.describing._LONGEST", 1500)
    for owner in "vwxyz":
        store.describe({"a": {"owner": owner * 100}})
    assert store.about[0].owner == "z" * 100 and store.description.forgotten > 0
    assert (store.path / ABOUT).stat().st_size <= 1500
    with pytest.raises(StoreError, match=r"would have .* bytes, and at most 1,500 are allowed"):
        store.describe({name: {"url": "https://x.example/" + "x" * 600} for name in "abc"})
    assert Store(store.path).about == store.about


def test_an_unknown_source_is_refused_and_nothing_is_written(store: Store) -> None:
    with pytest.raises(SourcesError, match="there is no source 'd'"):
        store.describe({"a": TIMES, "d": TIMES})
    assert not (store.path / ABOUT).exists()


def test_a_killed_change_leaves_what_was_known_or_what_is(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.describe({"a": About("before")})

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        store.describe({"a": About("after")})
    monkeypatch.undo()
    assert Store(store.path).about[0].owner == "before"


FORGERIES: list[tuple[Any, str]] = [
    ({"schema": 2}, "has schema 2, this version reads up to 1: upgrade imprint"),
    ({"description": {"about": {"z": {}}, "changes": [], "forgotten": 0}}, "describes 'z', which is no source"),
    ({"description": {"about": {"a": {"url": "javascript:x"}}, "changes": [], "forgotten": 0}}, "must begin with http"),
    ({"description": {"about": {"a": {"evil": ""}}, "changes": [], "forgotten": 0}}, "has 'evil'"),
    ({"description": {"about": {"a": "x"}, "changes": [], "forgotten": 0}}, "must be an object, got 'x'"),
    ({"description": {"about": {}, "changes": [{}], "forgotten": 0}}, "time is missing"),
    ({"description": []}, "must be an object"),
]


@pytest.mark.parametrize(("changes", "words"), FORGERIES)
def test_a_forged_description_is_looked_at_field_by_field(changes: Any, words: str, store: Store) -> None:
    store.describe({"a": TIMES})
    values = json.loads((store.path / ABOUT).read_text())
    del values["sha256"]
    (store.path / ABOUT).write_text(json.dumps(sealed({**values, **changes})))
    with pytest.raises(StoreError, match=words):
        Store(store.path)


def test_damage_and_pipes_are_refused(store: Store) -> None:
    store.describe({"a": TIMES})
    place = store.path / ABOUT
    place.write_text(place.read_text().replace("The Times", "Somebody"))
    with pytest.raises(StoreError, match="checksum differs"):
        store.verify()
    with pytest.raises(StoreError, match=r"checksum differs. Delete about\.json, and describe the store again"):
        Store(store.path)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(StoreError, match="not a regular file"):
        Store(store.path)
    place.unlink()
    place.symlink_to("/nothing")
    with pytest.raises(StoreError, match=r"about\.json is a link"):
        Store(store.path)


def test_a_signature_covers_it(store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    private, public = make_keys(tmp_path / "key")
    sign_store(store, private)
    opened = Store(store.path, signed_by=public)
    opened.describe({"a": TIMES})
    assert opened.signed is None and "sign it again" in caplog.text
    with pytest.raises(
        StoreError, match=r"of its sources \(about\.json: .*\) was changed after it was signed\. If you"
    ):
        Store(store.path, signed_by=public)
    sign_store(opened, private)
    assert Store(store.path, signed_by=public).about[0] == TIMES
    (store.path / ABOUT).unlink()
    with pytest.raises(StoreError, match="was changed after it was signed"):
        Store(store.path, signed_by=public)
    with pytest.raises(StoreError, match="was changed since it was opened"):
        sign_store(opened, private)


def test_a_finished_simulation_does_not_break_a_signature(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private, public = make_keys(tmp_path / "key")
    sign_store(store, private)
    make(store.path, SOURCES.describe({"b": TIMES}))
    assert Store(store.path, signed_by=public).about == () and "describes its sources otherwise" in caplog.text


def test_results_carry_it_and_so_do_their_files(store: Store, tmp_path: Path) -> None:
    store.describe({"b": TIMES})
    result = attribute(task(), store, DATA, progress=False)
    result.save(tmp_path / "scores.safetensors")
    loaded = Attribution.load(tmp_path / "scores.safetensors")
    assert loaded.labels == result.labels and loaded.labels.source_about[1] == TIMES
    assert result.to_pandas().attrs["about"] == {"b": vars(TIMES)}
    frame = result.top(3).to_pandas()
    assert set(zip(frame["source"], frame["owner"], strict=True)) == {("a", ""), ("b", "The Times"), ("c", "")}
    united = result.group({"x": ["a", "b"], "y": ["b"]})
    assert united.labels.source_about == (About(), TIMES)
    assert "owner" not in attribute(task(), make(tmp_path / "other"), DATA, progress=False).top(1).to_pandas()


def test_a_page_links_to_the_web_alone(store: Store) -> None:
    store.describe({"b": About('<i>"x', "MIT", "https://x.example/?a=1&b=<b>'\"")})
    page = attribute(task(), store, DATA, progress=False)._repr_html_()
    assert 'href="https://x.example/?a=1&amp;b=&lt;b&gt;&#x27;&quot;" rel="noopener noreferrer nofollow"' in page
    assert 'title="&lt;i&gt;&quot;x, MIT"' in page and "<i>" not in page


def test_scores_do_not_depend_on_it(store: Store) -> None:
    before = attribute(task(), store, DATA, progress=False)
    store.describe({"a": TIMES})
    after = attribute(task(), store, DATA, progress=False)
    assert torch.equal(before.scores, after.scores)
    assert before.labels.fingerprints == after.labels.fingerprints


def test_what_somebody_else_changed_is_not_signed_unnoticed(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The advice to sign again would otherwise put the owner's signature under a forged owner."""
    private, _ = make_keys(tmp_path / "credit")
    store.describe({"a": TIMES})
    sign_store(Store(store.path), private)
    Store(store.path).describe({"b": TIMES})
    assert "look at all of it" not in caplog.text
    Store(store.path).describe({"c": TIMES})
    assert "was changed after it was signed, and before it is described now" in caplog.text
