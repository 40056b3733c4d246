"""Parts of a simulation, merged, are the store that one simulation makes: of every plan, in any number and order."""

import copy
import errno
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import About, Part, Plan, Sources, Store, StoreError, Task, merge, simulate, simulate_part
from imprint.errors import PlanError, ReliabilityWarning
from imprint.runtime.memory import budget
from imprint.store.parts import PartsFolder, Share, place_file
from tests.simulation.engines.trainings import Training, classification, mlp
from tests.simulation.killing import (
    PLANS,
    STEPS,
    Killed,
    Made,
    N,
    contents,
    data,
    die_until_done,
    dies_after,
    run,
    run_part,
    task,
)

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")
TANGENT = PLANS["tangent"]
FEW = ("tangent", "mini-batches", "two-sided", "spectral", "spectral, projected", "spectral in full")


def part(out: Path, text: str, plan: Plan = TANGENT, **changes: Any) -> Part:
    return run_part(out, text, plan, **changes)


def all_parts(out: Path, of: int, plan: Plan = TANGENT, **changes: Any) -> list[Part]:
    """Make all parts, the last one first."""
    return [part(out, f"{number}/{of}", plan, **changes) for number in range(of, 0, -1)]


@pytest.mark.parametrize(
    "plan",
    [pytest.param(PLANS[name], id=name, marks=[] if name in FEW else pytest.mark.wide) for name in PLANS],
)
def test_three_parts_are_the_store_of_one_run_to_the_last_byte(plan: Plan, made: Made, tmp_path: Path) -> None:
    all_parts(tmp_path / "store", 3, plan)
    store = merge(tmp_path / "store", progress=False)
    store.verify()
    assert contents(store.path) == contents(made(plan))


@pytest.mark.parametrize(("plan", "of"), [("tangent", 2), ("spectral", 1), ("spectral", 2), ("spectral", 8)])
def test_any_number_of_parts_is_the_same_store(plan: str, of: int, made: Made, tmp_path: Path) -> None:
    """With files of as many sources as there: for eight parts of six sources that is one."""
    all_parts(tmp_path / "store", of, PLANS[plan])
    store = merge(tmp_path / "store", progress=False)
    whole = made(PLANS[plan]) if of < 8 else run(tmp_path / "whole", PLANS[plan], repeat=store).path
    assert contents(store.path) == contents(whole)


def test_sources_that_fit_one_file_are_shared_out_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made = all_parts(tmp_path / "store", 4, memory="1GB")
    assert [each.count for each in made] == [0, 2, 2, 2]
    assert caplog.text.count("part 4/4 has no sources") == caplog.text.count("has no sources") == 1
    store = merge(tmp_path / "store", progress=False)
    assert store.checkpoints[0].choices.rows_per_file == 2
    whole = run(tmp_path / "whole", TANGENT, memory="1GB")
    for name, expected in whole.imprints(0, 0, 6, torch.device("cpu")).items():
        found = store.imprints(0, 0, 6, torch.device("cpu"))[name]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_every_example_can_be_a_source_in_parts(tmp_path: Path) -> None:
    plan = Plan(engine="spectral", steps="infinite", damping=0.1, directions=5)
    given: dict[str, Any] = {"sources": Sources.per_example(N), "memory": "1GB"}
    all_parts(tmp_path / "store", 5, plan, **given)
    store = merge(tmp_path / "store", progress=False)
    assert contents(store.path) == contents(run(tmp_path / "whole", plan, repeat=store, **given).path)


def test_rounded_imprints_and_skipped_checkpoints_are_the_same_in_parts(tmp_path: Path) -> None:
    plan = replace(PLANS["spectral"], weight=(0.0, 2.0))
    all_parts(tmp_path / "store", 3, plan, dtype=torch.bfloat16)
    store = merge(tmp_path / "store", progress=False)
    assert contents(store.path) == contents(run(tmp_path / "whole", plan, dtype=torch.bfloat16).path)


def test_parts_of_a_repetition_are_the_store_that_is_repeated(made: Made, tmp_path: Path) -> None:
    all_parts(tmp_path / "store", 2, repeat=made(TANGENT))
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(TANGENT))


SOURCES = Sources.groups({"ann": [0, 1, 2, 3, 4, 5, 6], "bob": [7, 11, 30], "cid": [39], "dan": [3, 30, 31]})


@pytest.mark.parametrize("stacked", [True, False])
def test_a_recorded_run_is_replayed_in_parts(stacked: bool, tmp_path: Path) -> None:
    """The noise rows and the base come with the first sources, and what they say of all with all of them."""
    training = Training(mlp(), classification(), torch.optim.Adam, {"lr": 0.02}, steps=6)
    _, recorded = training.run()
    trained = replace(training, model=copy.deepcopy(training.model))
    trained.model.load_state_dict(recorded.state(6))
    plan = Plan(engine="replay", stacked=stacked)
    given: Any = (trained.task(), training.data, SOURCES, plan)
    for number in (3, 1, 2):
        simulate_part(f"{number}/3", *given, run=recorded, out=tmp_path / "parts", progress=False)
    store = merge(tmp_path / "parts", progress=False)
    whole = simulate(*given, run=recorded, out=tmp_path / "whole", repeat=store, progress=False)
    assert contents(store.path) == contents(whole.path)
    assert store.checkpoints[0].measured.chaos == whole.checkpoints[0].measured.chaos is not None
    assert store.warnings == whole.warnings


# --- parts at the same time


def test_parts_that_begin_at_the_same_time_agree(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to share how a checkpoint is simulated decides, even over one that has settled it meanwhile."""
    plan, publish, raced = PLANS["spectral"], PartsFolder.publish, list[str]()

    def race(self: PartsFolder, name: str, fill: Any) -> bool:
        raced.append(name)
        if len(raced) == 1:
            part(tmp_path / "store", "2/2", plan)
        return publish(self, name, fill)

    monkeypatch.setattr(PartsFolder, "publish", race)
    part(tmp_path / "store", "1/2", plan)
    assert raced.count("checkpoint-000") == 2
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(plan))


@pytest.mark.parametrize("memory", ["30kB", None])
@pytest.mark.parametrize("late", [False, True])
def test_a_part_that_settled_otherwise_takes_over_what_was_shared_first(
    late: bool, memory: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine with less memory, which would divide the sources otherwise."""
    publish, raced = PartsFolder.publish, list[str]()

    def race(self: PartsFolder, name: str, fill: Any) -> bool:
        if not raced:
            raced.append(name)
            part(tmp_path / "store", "2/2", memory="1GB")
        return publish(self, name, fill)

    if late:
        part(tmp_path / "store", "2/2", memory="1GB")
    else:
        monkeypatch.setattr(PartsFolder, "publish", race)
    monkeypatch.setattr("imprint.simulation.sizing.budget", lambda given, device: budget(given or "30kB", device))
    with caplog.at_level(logging.WARNING):
        part(tmp_path / "store", "1/2", memory=memory)  # which would take two at a time, and still does
    assert caplog.text.count("simulating 2 sources at once instead of 3") == 2  # at each checkpoint
    store = merge(tmp_path / "store", progress=False)
    assert store.checkpoints[0].choices.rows_per_file == 3


def test_a_folder_that_is_seen_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system, which remembers for a while that it was not there."""
    folder, exists, late = PartsFolder(tmp_path), Path.exists, [True, True]
    folder.publish("request", lambda place: (place / "a").touch())
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr(
        Path, "exists", lambda path: exists(path) and not (path.name == "request" and late and late.pop())
    )
    assert not folder.publish("request", lambda place: (place / "b").touch())
    assert (folder.shared / "request" / "a").exists() and not late


def test_a_second_process_at_one_part_is_told(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=r"another process .* is writing to .*1-of-2"):
                part(tmp_path / "store", "1/2")
            part(tmp_path / "store", "2/2")  # which has a folder of its own
            refused.append("told")

    part(tmp_path / "store", "1/2", progress=intrude)
    assert merge(tmp_path / "store", progress=False)


# --- interruptions


@pytest.mark.parametrize("plan", [pytest.param("automatic step", marks=pytest.mark.wide), "spectral"])
def test_a_part_that_dies_again_and_again_is_the_same(plan: str, made: Made, tmp_path: Path) -> None:
    part(tmp_path / "store", "2/2", PLANS[plan])
    die_until_done(lambda progress: part(tmp_path / "store", "1/2", PLANS[plan], progress=progress), 18)
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(PLANS[plan]))


def test_a_finished_part_does_nothing(tmp_path: Path) -> None:
    first = part(tmp_path / "store", "1/2")
    calls: list[int] = []
    again = part(tmp_path / "store", "1/2", progress=lambda done, total: calls.append(done))
    assert again == first and not calls
    assert repr(first) == f"Part(1/2: 4 of 6 sources in '{tmp_path}/store/parts/1-of-2')"
    part(tmp_path / "store", "2/2")
    merge(tmp_path / "store", progress=False)
    merged = part(tmp_path / "store", "1/2", progress=lambda done, total: calls.append(done))
    assert merged.path == tmp_path / "store" and merged.finished == 2 and not calls


def test_progress_is_that_of_the_parts_own_sources(tmp_path: Path) -> None:
    for number, sources in ((1, 4), (2, 2)):
        told: list[tuple[int, int]] = []
        part(tmp_path / "store", f"{number}/2", progress=lambda done, total, told=told: told.append((done, total)))
        assert told[-1] == (2 * STEPS * sources,) * 2
        assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_a_part_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ValueError("as a loss may")

    spoilt = data()[0].clone()
    spoilt[3, 0] = torch.nan
    with pytest.raises(Exception, match="training example 3"):
        part(tmp_path / "store", "1/2", data=(spoilt, data()[1]))
    assert not (tmp_path / "store").exists()


# --- merging


def test_merging_removes_the_parts_and_merging_again_changes_nothing(tmp_path: Path) -> None:
    all_parts(tmp_path / "store", 2)
    told: list[tuple[int, int]] = []
    store = merge(tmp_path / "store", progress=lambda done, total: told.append((done, total)))
    assert not (tmp_path / "store" / "parts").exists() and told[-1][0] == told[-1][1] > 0
    before = contents(store.path)
    assert contents(merge(tmp_path / "store", progress=False).path) == before


def test_a_complete_store_is_returned_though_its_parts_were_not_removed(tmp_path: Path) -> None:
    """As where a merge was killed before it was done."""
    all_parts(tmp_path / "store", 2)
    shutil.copytree(tmp_path / "store" / "parts", tmp_path / "parts")
    store = merge(tmp_path / "store", progress=False)
    shutil.move(tmp_path / "parts", tmp_path / "store" / "parts")
    assert run(tmp_path / "store", TANGENT).sha256 == store.sha256


def test_parts_in_other_folders_are_copied_and_stay(made: Made, tmp_path: Path) -> None:
    """As where machines have no common file system: what the first has shared is copied to the others."""
    part(tmp_path / "a", "1/2")
    shutil.copytree(tmp_path / "a" / "parts" / "shared", tmp_path / "b" / "parts" / "shared")
    part(tmp_path / "b", "2/2")
    with pytest.raises(StoreError, match="parts in 2 folders are merged into a further one: give it as out="):
        merge([tmp_path / "a", tmp_path / "b"])
    store = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "store", progress=False)
    assert contents(store.path) == contents(made(TANGENT))
    assert {path.name for path in (tmp_path / "a" / "parts").iterdir()} == {"shared", "1-of-2"}
    place = Path(store.checkpoints[0].imprints[0].path)
    assert not (store.path / place).samefile(tmp_path / "a" / "parts" / "1-of-2" / place)


def test_a_file_system_without_hard_links_gets_copies(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.store.parts._link", lambda *_: False)
    all_parts(tmp_path / "store", 2, PLANS["spectral"])
    assert contents(merge(tmp_path / "store", progress=False).path) == contents(made(PLANS["spectral"]))


def test_a_full_disk_is_explained_where_parts_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_parts(tmp_path / "a", 2)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "as on a full disk")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", fail)
        with pytest.raises(StoreError, match=r"could not write .*Make room and make the same call again"):
            merge(tmp_path / "a", tmp_path / "store", progress=False)
    merge(tmp_path / "a", tmp_path / "store", progress=False).verify()


@pytest.mark.parametrize("link", [True, False])
def test_no_link_is_replaced_by_a_file_of_a_part(link: bool, tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    (tmp_path / "place").symlink_to(tmp_path / "source")
    with pytest.raises(StoreError, match="it is a link, and only a regular file is replaced"):
        place_file(tmp_path / "source", tmp_path / "place", link=link)


def test_folders_that_were_settled_apart_are_refused(tmp_path: Path) -> None:
    part(tmp_path / "a", "1/2")
    part(tmp_path / "b", "2/2", memory="1GB")
    with pytest.raises(StoreError, match=r"at checkpoint 0, rows_per_file was 2, is 3\. Copy .*shared to every"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "store")


def test_missing_parts_are_named_with_what_makes_them(tmp_path: Path) -> None:
    part(tmp_path / "store", "2/4")
    with pytest.raises(Killed):
        part(tmp_path / "store", "3/4", memory="1GB", progress=dies_after(4))
    words = r'of its 4 parts, these are missing: 1/4, 3/4 \(unfinished\), 4/4\. .*with part "1/4" \(`--part 1/4`\)'
    with pytest.raises(StoreError, match=words):
        merge(tmp_path / "store")
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_parts_that_died_early_are_missing_too(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        part(tmp_path / "store", "1/2", progress=dies_after(STEPS + 3))  # at the first of two checkpoints
    with pytest.raises(StoreError, match=r"missing: 1/2 \(unfinished\), 2/2\."):
        merge(tmp_path / "store")
    part(tmp_path / "other", "8/8")  # which has no sources, and nothing to share
    with pytest.raises(StoreError, match="no part that got far enough to be merged"):
        merge(tmp_path / "other")


def test_a_changed_loss_is_noticed_by_a_finished_part(tmp_path: Path) -> None:
    """Even if nobody remembers what the parts were of."""
    part(tmp_path / "store", "1/2")
    shutil.rmtree(tmp_path / "store" / "parts" / "shared")
    changed = Task(task().model, loss=lambda model, batch: 2 * task().loss(model, batch))
    with pytest.raises(StoreError, match=r"holds parts of something else: .*the loss function changed"):
        part(tmp_path / "store", "1/2", task=changed)


def test_a_damaged_file_is_named_with_its_part(tmp_path: Path) -> None:
    all_parts(tmp_path / "store", 2)
    file = next((tmp_path / "store" / "parts" / "2-of-2").rglob("imprints-*"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"imprints-00002.safetensors is damaged: .* delete .*2-of-2, and make it"):
        merge(tmp_path / "store", progress=False)
    shutil.rmtree(tmp_path / "store" / "parts" / "2-of-2")
    part(tmp_path / "store", "2/2")
    merge(tmp_path / "store", progress=False).verify()


def test_a_damaged_basis_is_refused_by_the_parts_that_would_use_it(tmp_path: Path) -> None:
    part(tmp_path / "store", "1/2", PLANS["spectral"])
    basis = tmp_path / "store" / "parts" / "shared" / "checkpoint-000" / "basis.safetensors"
    copied = bytearray(basis.read_bytes())
    basis.unlink()  # and not the file of the part beside it
    basis.write_bytes(copied[:-1] + bytes([copied[-1] ^ 1]))
    with pytest.raises(StoreError, match=r"shared/checkpoint-000/basis.safetensors is damaged"):
        part(tmp_path / "store", "2/2", PLANS["spectral"])


def test_different_circumstances_are_kept_as_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(tmp_path / "store", "1/2")
    part(tmp_path / "store", "2/2", batch_size=5)
    with pytest.warns(ReliabilityWarning, match=r"\(parts 1 and 2: batch_size was 1024, then 5\)"):
        store = merge(tmp_path / "store", progress=False)
    assert any("different circumstances" in warning for warning in store.warnings)


# --- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0/8", "part 0/8 does not exist: of N parts the first is"),
        ("9/8", "part 9/8 does not exist"),
        ("a/b", "such as \"3/8\", the third of eight parts; got 'a/b'"),
        ("3", 'such as "3/8"'),
        (3, 'such as "3/8"'),
    ],
)
def test_parts_that_do_not_exist_are_refused(text: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        part(tmp_path / "store", text)
    assert not (tmp_path / "store").exists()


def test_a_part_cannot_be_validated(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"does not have all sources, so it takes no validate=: validate the merged"):
        part(tmp_path / "store", "1/2", validate=data())


def test_a_part_of_something_else_is_refused(tmp_path: Path) -> None:
    part(tmp_path / "store", "1/2")
    other = Plan(steps=STEPS + 1, lr=0.2)
    for text in ("1/2", "2/2"):
        with pytest.raises(StoreError, match="holds parts of something else: the plan's steps was 6, is 7"):
            part(tmp_path / "store", text, other)
    with pytest.raises(StoreError, match=r"is divided into 2 parts, not 3: give one of those"):
        part(tmp_path / "store", "1/3")
    part(tmp_path / "store", "2/2")
    merge(tmp_path / "store", progress=False)
    with pytest.raises(StoreError, match="already holds a store, made otherwise: the plan's steps was 6, is 7"):
        part(tmp_path / "store", "1/2", other)


def test_parts_and_a_whole_simulation_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "whole", TANGENT, progress=dies_after(STEPS))
    with pytest.raises(StoreError, match="was begun without parts"):
        part(tmp_path / "whole", "1/2")
    part(tmp_path / "store", "1/2")
    with pytest.raises(
        StoreError, match="holds an unfinished simulation or retraining in parts: make the others, and merge"
    ):
        run(tmp_path / "store", TANGENT)
    with pytest.raises(StoreError, match=r"holds parts of a store that are not merged: imprint\.merge"):
        Store(tmp_path / "store")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(StoreError, match="holds something else"):
        part(tmp_path / "full", "1/2")


def test_folders_without_parts_are_refused(made: Made, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no parts: give the folder that was the out="):
        merge(tmp_path / "nothing")
    with pytest.raises(StoreError, match="nothing holds no parts: give the folder that was the out="):
        merge(tmp_path / "nothing", made(TANGENT))  # which is a complete store
    with pytest.raises(StoreError, match="there are no parts to merge"):
        merge([])
    all_parts(tmp_path / "a", 2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(StoreError, match=r"holds something else \(thesis.txt\)"):
        merge(tmp_path / "a", tmp_path / "full")
    with pytest.raises(StoreError, match="already holds a store, made otherwise than the parts in"):
        merge(tmp_path / "a", made(PLANS["spectral"]))


def test_parts_beyond_the_sources_are_empty_and_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = all_parts(tmp_path / "store", 8)
    assert sorted(each.count for each in made) == [0, 0, 1, 1, 1, 1, 1, 1]
    assert caplog.text.count("has no sources: the other parts have all 6") == 2


def test_shares_cover_all_chunks_once_and_the_first_has_the_first() -> None:
    for of in range(1, 12):
        for count in range(30):
            ranges = [each.of_chunks(count) for each in Share(1, of).others()]
            assert [chunk for each in ranges for chunk in each] == list(range(count))
            assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
            assert count == 0 or 0 in ranges[0]


def test_a_plan_that_is_chosen_automatically_is_that_of_the_first_part(tmp_path: Path) -> None:
    given: dict[str, Any] = {"sources": Sources.by_label([i % 6 for i in range(N)]), "progress": False}
    simulate_part("1/2", task(), data(), plan="auto", out=tmp_path / "store", **given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "auto", lambda *_, **__: pytest.fail("the plan is known"))
        simulate_part("2/2", task(), data(), plan="auto", out=tmp_path / "store", **given)
    assert len(merge(tmp_path / "store", progress=False)) == 6


def test_descriptions_that_differ_between_folders_are_refused(tmp_path: Path) -> None:
    sources = Sources.by_label([i % 6 for i in range(N)]).describe({"3": About(owner="The Times")})
    given: dict[str, Any] = {"plan": TANGENT, "progress": False}
    simulate_part("1/2", task(), data(), sources, out=tmp_path / "a", **given)
    shutil.copytree(tmp_path / "a" / "parts" / "shared", tmp_path / "b" / "parts" / "shared")
    shutil.rmtree(tmp_path / "b" / "parts" / "shared" / "description")
    other = sources.describe({"3": About(owner="The Post")})
    simulate_part("2/2", task(), data(), other, out=tmp_path / "b", **given)
    with pytest.raises(StoreError, match=r"b/parts/shared/description describes source '3' otherwise than .*a/parts"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


def test_the_merged_store_knows_whose_its_sources_are(tmp_path: Path) -> None:
    sources = Sources.by_label([i % 6 for i in range(N)]).describe({"3": About(owner="The Times", licence="CC0")})
    for number in (2, 1):
        simulate_part(f"{number}/2", task(), data(), sources, TANGENT, out=tmp_path / "store", progress=False)
    store = merge(tmp_path / "store", progress=False)
    assert store.about == sources.about and store.about[3].owner == "The Times"
    assert merge(tmp_path / "store", progress=False).about == sources.about
    assert not (tmp_path / "store" / "parts").exists()


def test_parts_that_describe_sources_otherwise_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first description counts; that a later one does not must not go unnoticed."""
    by_label = Sources.by_label([i % 6 for i in range(N)])
    old, new = (by_label.describe({"3": About(owner=owner)}) for owner in ("The Times", "The Post"))
    part(tmp_path / "store", "1/2", sources=old)
    part(tmp_path / "store", "2/2", sources=old)
    assert "otherwise" not in caplog.text
    part(tmp_path / "store", "2/2", sources=new)
    assert "describes the sources otherwise than given here" in caplog.text
    assert merge(tmp_path / "store", progress=False).about == old.about
