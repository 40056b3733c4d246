"""A simulation may die at any moment: the same call goes on where it stood, and ends in the very same store."""

import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.runtime.progress import Advance, Progress
from imprint.simulation import snapshot
from imprint.store import finished as listing
from imprint.store.files import LOCK, Lock, append
from imprint.store.finished import FILES
from imprint.store.manifest import SCHEMA
from imprint.store.request import Request
from imprint.store.writing import Writer

N, STEPS = 24, 6
DIRECTIONS = 10
PATHS = {
    "tangent": Plan(steps=STEPS, lr=0.2),
    "automatic step": Plan(steps=STEPS),
    "mini-batches": Plan(steps=STEPS, lr=0.2, batch_size=7, source_sample=3),
    "two-sided": Plan(engine="trajectories", steps=STEPS, lr=0.2, keep_pair=True),
    "one-sided mini-batches": Plan(engine="trajectories", variant="one_sided", steps=STEPS, lr=0.2, batch_size=7),
    "automatic epsilon": Plan(engine="trajectories", epsilon="auto", steps=STEPS, lr=0.2),
}
PLANS = {
    **PATHS,
    "spectral": Plan(engine="spectral", steps=STEPS, lr=0.2, directions=DIRECTIONS),
    "spectral, projected": Plan(
        engine="spectral", steps="infinite", damping=0.1, directions=DIRECTIONS, form="projected"
    ),
    "spectral in full": Plan(engine="spectral", steps="infinite", damping=0.1, directions=DIRECTIONS, form="dense"),
    "spectral, complete": Plan(engine="spectral", curvature="hessian", steps=STEPS, directions=1000),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


class Killed(BaseException):
    """Stands for whatever ends a process."""


def dies_after(steps: int, how: type[BaseException] = Killed) -> Advance:
    """Progress that ends the run it is told of, at the call after so many."""
    calls = iter(range(steps))

    def die(done: int, total: int, /) -> None:
        if next(calls, None) is None:
            raise how

    return die


def dies_at(share: float) -> Advance:
    """The same, once so much of the work is done."""

    def die(done: int, total: int, /) -> None:
        if done >= share * total:
            raise Killed

    return die


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def run(out: Path, plan: Plan, **changes: Any) -> Store:
    """Two checkpoints, six sources, two at a time: several shards to die between."""
    states = [{name: scale * t for name, t in task().state().items()} for scale in (1.0, 0.5)]
    groups = Sources.by_label([i % 6 for i in range(N)])
    given = {
        "sources": Sources.per_example(N).rows(0, 6) if plan.engine == "spectral" else groups,
        "checkpoints": states,
        "progress": False,
        **changes,
    }
    full = "30kB" if plan.engine == "tangent" else "56kB"
    room = "600B" if plan.engine == "spectral" else "12kB" if plan.batch_size else full
    memory = given.pop("memory", room)  # so that there are several files
    return simulate(given.pop("task", task()), given.pop("data", data()), plan=plan, out=out, memory=memory, **given)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store, hidden ones too; of the manifest all but when it was made and what that took."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = json.loads(files["manifest.json"])
    del manifest["created"], manifest["cost"], manifest["sha256"]
    return {**files, "manifest.json": json.dumps(manifest).encode()}


@pytest.fixture(autouse=True, scope="module")
def _snapshots_at_every_step() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "SECONDS", 0.0)
        yield


Made = Callable[[Plan], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The folder of a plan's store, simulated once for all tests: to read and to copy."""
    folders: list[tuple[Plan, Path]] = []

    def make(plan: Plan) -> Path:
        for other, folder in folders:
            if other == plan:
                return folder
        folders.append((plan, run(tmp_path_factory.mktemp("made") / "store", plan).path))
        return folders[-1][1]

    return make


@every_plan
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(plan: Plan, made: Made, tmp_path: Path) -> None:
    expected = contents(made(plan))
    assert sum("imprints-" in name for name in expected) > 3  # there is something to die between
    draw, longest = random.Random(0), 60 if plan.engine == "spectral" else 18
    for _ in range(100):
        try:
            run(tmp_path / "broken", plan, progress=dies_after(draw.randrange(1, longest)))
            break
        except Killed:
            continue
    assert contents(tmp_path / "broken") == expected


def test_a_run_goes_on_from_its_snapshot_and_not_from_the_start(tmp_path: Path) -> None:
    plan = Plan(steps=STEPS, lr=0.2)
    reached: list[int] = []

    def die_late(done: int, total: int) -> None:
        reached.append(done)
        if len(reached) == STEPS - 2:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "store", plan, progress=die_late)
    again: list[int] = []
    run(tmp_path / "store", plan, progress=lambda done, total: again.append(done))
    assert again[0] >= reached[-2]


@pytest.fixture
def finished(made: Made, tmp_path: Path) -> Path:
    """A folder with all of a store."""
    return Path(shutil.copytree(made(PLANS["tangent"]), tmp_path / "store"))


def test_a_finished_store_is_returned_as_it_is(finished: Path, tmp_path: Path) -> None:
    before = (finished / "manifest.json").read_bytes()
    calls: list[int] = []
    again = run(tmp_path / "store", PLANS["tangent"], progress=lambda done, total: calls.append(done))
    assert (again.path / "manifest.json").read_bytes() == before
    assert not calls


def changed_task() -> Task:
    model = task().model
    return Task(
        model, loss=lambda model, batch: 2 * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    )


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "plan": ({"plan": Plan(steps=STEPS + 1, lr=0.2)}, f"the plan's steps was {STEPS}, is {STEPS + 1}"),
    "loss": ({"task": changed_task()}, r"loss on probe example 0 is .*, was .*: the loss function changed"),
    "data": ({"data": (data()[0] + torch.eye(N, 4), data()[1])}, "the training data changed"),
    "length": (
        {"data": tuple(t[:23] for t in data()), "sources": Sources.groups({"a": [0]})},
        "had 24 examples, has 23",
    ),
    "sources": ({"sources": Sources.by_label([i % 5 for i in range(N)])}, "the sources changed"),
    "weights": ({"checkpoints": [task().state(), task().state()]}, "the weights of checkpoint 1 changed"),
    "checkpoints": ({"checkpoints": [task().state()]}, "there were 2 checkpoints, are 1"),
    "dtype": ({"dtype": torch.bfloat16}, "kept as float32, now as bfloat16"),
}


@pytest.mark.parametrize("state", ["finished", "unfinished"])
@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES.keys())
def test_another_request_is_refused_and_the_difference_named(
    change: dict[str, Any], difference: str, state: str, finished: Path, begun: Path, tmp_path: Path
) -> None:
    folder = finished if state == "finished" else Path(shutil.copytree(begun, tmp_path / "begun"))
    kept = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match=difference):
        run(folder, **{"plan": PLANS["tangent"], **change})
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == kept


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with part of a store."""
    folder = tmp_path_factory.mktemp("begun") / "store"
    with pytest.raises(Killed):
        run(folder, PLANS["tangent"], progress=dies_after(STEPS + 3))
    return folder


def test_an_unfinished_store_is_not_read(begun: Path) -> None:
    with pytest.raises(StoreError, match="unfinished simulation"):
        Store(begun)


def test_a_store_is_not_read_with_another_loss(made: Made) -> None:
    with pytest.raises(StoreError, match=r"loss on probe example 0 is .*, was .*the loss function changed"):
        attribute(changed_task(), Store(made(PLANS["tangent"])), data(), progress=False)


def test_the_measurement_may_change_freely(made: Made) -> None:
    margin = Task.classifier(task().model, measure="margin")
    assert attribute(margin, Store(made(PLANS["tangent"])), data(), progress=False).scores.isfinite().all()


def test_a_second_process_is_told_and_changes_nothing(made: Made, tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=f"another process .*{os.getpid()}.* is writing") as error:
                run(tmp_path / "store", PLANS["tangent"])
            refused.append(str(error.value))

    store = run(tmp_path / "store", PLANS["tangent"], progress=intrude)
    assert refused
    assert contents(store.path) == contents(made(PLANS["tangent"]))


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(STEPS, KeyboardInterrupt))
    assert "the same call again resumes" in caplog.text


def test_an_interruption_that_torch_has_made_an_error_of_is_one_again(tmp_path: Path) -> None:
    """As its interpreter of derivatives words it."""
    words = "The following operation failed in the TorchScript interpreter.\nRuntimeError: KeyboardInterrupt: <EMPTY>\n"

    def interrupt(done: int, total: int) -> None:
        raise RuntimeError(words)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", PLANS["tangent"], progress=interrupt)
    assert (tmp_path / "store" / "unfinished.json").is_file()


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        *(pytest.param(plan, 0.25, id=f"{name}, with a snapshot") for name, plan in PATHS.items()),
        pytest.param(PATHS["tangent"], 0.65, id="tangent, with a shard"),
    ],
)
def test_a_run_goes_on_with_less_memory(
    plan: Plan, share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer sources at once, in the same files; and again with as much as before."""
    whole = run(tmp_path / "whole", plan, memory="1GB")
    with pytest.raises(Killed):
        run(tmp_path / "store", plan, memory="1GB", progress=dies_at(share))
    assert "sources at once" not in caplog.text
    with pytest.raises(Killed):
        run(tmp_path / "store", plan, memory="1kB", progress=dies_at(share + 0.15))
    assert "simulating 1 sources at once instead of 6, to respect memory=1kB" in caplog.text
    store = run(tmp_path / "store", plan, memory="1kB")
    assert store.checkpoints[0].choices.rows_at_once == 6
    store.verify()
    for index in range(2):
        one, other = (s.imprints(index, 0, 6, torch.device("cpu")) for s in (whole, store))
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))
        found, expected = (vars(s.checkpoints[index].measured) for s in (store, whole))
        assert [name for name in found if found[name] is None] == [name for name in expected if expected[name] is None]


def test_the_rate_after_a_resume_is_that_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(STEPS + 3))
    skipped: list[int] = []
    original = Progress.skip

    def counted(self: Progress, count: int) -> None:
        skipped.append(count)
        original(self, count)

    monkeypatch.setattr(Progress, "skip", counted)
    done: list[int] = []
    store = run(tmp_path / "store", PLANS["tangent"], progress=lambda now, total: done.append(now))
    shard = store.checkpoints[0].choices.rows_at_once * STEPS
    assert skipped[0] == shard and 0 < skipped[1] < shard
    assert done[:2] == [skipped[0], sum(skipped[:2])]


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit, Killed])
def test_whatever_ends_a_process_leaves_the_choice_of_steps(
    how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.simulation.snapshot.SECONDS", 60.0)  # no other work is kept
    with pytest.raises(how):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(1, how))
    assert (tmp_path / "store" / "unfinished.json").exists()


# --- what an unfinished run has left may be damaged


@pytest.fixture(scope="module")
def whole(made: Made) -> dict[str, bytes]:
    """The store that every continued run must end in."""
    return contents(made(PLANS["two-sided"]))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Request:
    """What a simulation asks for."""
    return run(tmp_path_factory.mktemp("asked") / "store", PLANS["tangent"]).manifest.request


@pytest.fixture(scope="module")
def died(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("died") / "store"
    with pytest.raises(Killed):
        run(folder, PLANS["two-sided"], progress=dies_after(2 * STEPS + 3))
    return folder


@pytest.fixture
def unfinished(died: Path, tmp_path: Path) -> Path:
    """A folder with two finished shards, and a snapshot of the third."""
    folder = Path(shutil.copytree(died, tmp_path / "store"))
    assert len(list(folder.rglob("imprints-*.safetensors"))) == 2
    assert len(list(folder.rglob("snapshot.safetensors"))) == 1
    return folder


def flip(place: Path, position: int) -> None:
    content = bytearray(place.read_bytes())
    content[position] ^= 1
    place.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda place: flip(place, -3),
    "truncated": lambda place: place.write_bytes(place.read_bytes()[:20]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["base", "imprints-00000", "midpoints-00001"])
def test_a_damaged_file_of_an_unfinished_run_is_named_and_made_again(
    name: str, damage: str, unfinished: Path, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](unfinished / "checkpoint-000" / f"{name}.safetensors")
    run(unfinished, PLANS["two-sided"])
    state = "missing" if damage == "missing" else "damaged"
    assert f"{name}.safetensors is {state}: its shard is simulated again" in caplog.text
    assert contents(unfinished) == whole


def test_what_is_sound_is_not_made_again(unfinished: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = {p: p.stat().st_mtime_ns for p in unfinished.rglob("*-0000[01].safetensors")}
    run(unfinished, PLANS["two-sided"])
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert "simulated again" not in caplog.text


@pytest.mark.parametrize("after", range(6))
def test_a_file_that_could_not_be_noted_is_made_again(
    after: int, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies between the renaming of a file and the line about it."""
    calls = iter(range(after))

    def dies(*arguments: Any) -> None:
        if next(calls, None) is None:
            raise Killed
        append(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies)
        with pytest.raises(Killed):
            run(tmp_path / "store", PLANS["two-sided"])
    run(tmp_path / "store", PLANS["two-sided"])
    assert contents(tmp_path / "store") == whole


@pytest.mark.parametrize("cut", [0, 1, 100, 250, -1])
def test_a_list_of_files_that_is_cut_short_is_made_whole(cut: int, unfinished: Path, whole: dict[str, bytes]) -> None:
    place = unfinished / FILES
    place.write_bytes(place.read_bytes()[:cut])
    run(unfinished, PLANS["two-sided"])
    assert contents(unfinished) == whole


def test_a_damaged_list_of_files_is_refused_with_advice_that_helps(unfinished: Path, whole: dict[str, bytes]) -> None:
    flip(unfinished / FILES, 30)
    with pytest.raises(StoreError, match=r"unfinished\.files is damaged in line 1: delete it to have .* made again"):
        run(unfinished, PLANS["two-sided"])
    (unfinished / FILES).unlink()
    run(unfinished, PLANS["two-sided"])
    assert contents(unfinished) == whole


def test_the_list_of_files_grows_by_a_line_a_file(unfinished: Path) -> None:
    """Nothing is written again for each shard, of which there may be thousands."""
    noted = (unfinished / FILES).read_text().splitlines()
    assert [json.loads(line.partition(" ")[2])["path"] for line in noted] == [
        f"checkpoint-000/{name}.safetensors"
        for name in ("base", "midpoints-00000", "imprints-00000", "midpoints-00001", "imprints-00001")
    ]


@settings(max_examples=60)
@given(position=st.floats(0, 1, exclude_max=True), cut=st.booleans())
def test_a_damaged_journal_is_refused_with_advice(position: float, cut: bool, died: Path, asked: Request) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Path(shutil.copytree(died, Path(folder) / "store"))
        place = store / "unfinished.json"
        where = int(position * place.stat().st_size)
        if cut:
            place.write_bytes(place.read_bytes()[:where])
        else:
            flip(place, where)
        before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
        with pytest.raises(StoreError, match=f"Delete {store} to begin anew") as error:
            Writer(store, asked, lambda examples: pytest.fail("a damaged journal is not compared"), lambda *_: None)
        assert "\n" not in str(error.value)
        assert {p: p.read_bytes() for p in store.rglob("*") if p.is_file()} == before


def test_a_journal_of_another_version_is_left_to_that_version(unfinished: Path) -> None:
    place = unfinished / "unfinished.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "schema": SCHEMA - 1}))
    with pytest.raises(StoreError, match="begun by another version of imprint: finish it with that one"):
        run(unfinished, PLANS["two-sided"])


@pytest.mark.parametrize("position", [-1, -100, 70, 8])
def test_a_damaged_snapshot_is_not_gone_on_from(
    position: int, unfinished: Path, whole: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """In its tensors, in what it says about them, and where it begins."""
    flip(next(unfinished.rglob("snapshot.safetensors")), position)
    run(unfinished, PLANS["two-sided"])
    assert "snapshot.safetensors is damaged, its chunk starts over" in caplog.text
    assert contents(unfinished) == whole


def test_a_snapshot_does_not_lie_about_its_step(unfinished: Path, whole: dict[str, bytes]) -> None:
    place = next(unfinished.rglob("snapshot.safetensors"))
    content = place.read_bytes()
    found = re.search(rb'\\"step\\": (\d)', content)
    assert found is not None
    flip(place, found.start(1))
    run(unfinished, PLANS["two-sided"])
    assert contents(unfinished) == whole


LEFT = ".imprint-0123456789abcdef.tmp"


@pytest.mark.parametrize("stray", [f"{LEFT}/file.json", f"checkpoint-000/{LEFT}/.tmpAb12Cd"])
def test_half_written_files_of_a_killed_process_go(stray: str, unfinished: Path, whole: dict[str, bytes]) -> None:
    (unfinished / stray).parent.mkdir()
    (unfinished / stray).write_text("half")
    run(unfinished, PLANS["two-sided"])
    assert contents(unfinished) == whole


@pytest.mark.parametrize(
    "name", [".notes.tmp", ".tmpAb12Cd", "checkpoint-000/.mine.tmp", "mine/snapshot.safetensors", LEFT]
)
def test_no_file_of_the_users_goes_when_a_simulation_resumes(
    name: str, unfinished: Path, whole: dict[str, bytes]
) -> None:
    (unfinished / name).parent.mkdir(exist_ok=True)
    (unfinished / name).write_text("mine")
    run(unfinished, PLANS["two-sided"])
    assert (unfinished / name).read_text() == "mine"


def test_links_in_an_unfinished_store_are_refused(unfinished: Path, tmp_path: Path) -> None:
    """What is written to a link, or removed from it, would be somebody else's."""
    mine = tmp_path / "mine"
    (unfinished / "checkpoint-000").rename(mine)
    (unfinished / "checkpoint-000").symlink_to(mine, target_is_directory=True)
    before = {path.name for path in mine.iterdir()}
    with pytest.raises(StoreError, match="checkpoint-000 is a link"):
        run(unfinished, PLANS["two-sided"])
    assert {path.name for path in mine.iterdir()} == before


def test_a_process_killed_before_its_journal_was_there_is_no_obstacle(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / LOCK).write_text("process 1")
    (folder / LEFT).mkdir()
    assert contents(run(folder, PLANS["two-sided"]).path) == whole


def test_a_process_killed_after_its_manifest_was_there_leaves_nothing_in_the_end(
    unfinished: Path, whole: dict[str, bytes]
) -> None:
    run(unfinished, PLANS["two-sided"])
    for name in (LOCK, "unfinished.json", "unfinished.files", "checkpoint-000/snapshot.safetensors"):
        (unfinished / name).write_bytes(b"left")
    run(unfinished, PLANS["two-sided"])
    assert contents(unfinished) == whole


# --- the spectral engine, which measures the curvature first and then takes the sources

SPECTRAL = {name: plan for name, plan in PLANS.items() if plan.engine == "spectral"}
every_spectral_plan = pytest.mark.parametrize("plan", SPECTRAL.values(), ids=SPECTRAL.keys())


def dies_at_file(name: str) -> Callable[..., None]:
    """Ends a run between the renaming of a file and the line about it."""

    def dies(place: Path, line: str) -> None:
        if name in line:
            raise Killed
        append(place, line)

    return dies


@every_spectral_plan
@pytest.mark.parametrize("name", ["base", "basis", "imprints-00000", "imprints-00003", "checkpoint-001/base"])
def test_a_spectral_run_that_dies_at_a_file_ends_in_the_same_store(
    name: str, plan: Plan, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(made(plan))
    name = "scratch" if name == "basis" and plan.form == "dense" else name
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file(name))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    run(tmp_path / "store", plan)
    assert contents(tmp_path / "store") == expected


@every_spectral_plan
def test_curvature_that_was_measured_is_not_measured_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("checkpoint-001/imprints-00001"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    monkeypatch.setattr("imprint.simulation.engines.spectral.freeze_curvature", None)
    told: list[tuple[int, int]] = []
    run(tmp_path / "store", plan, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]


@every_spectral_plan
def test_a_damaged_curvature_of_an_unfinished_run_is_made_again(
    plan: Plan, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = contents(made(plan))
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("imprints-00002"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    name = "scratch" if plan.form == "dense" else "basis"
    flip(tmp_path / "store" / "checkpoint-000" / f"{name}.safetensors", -3)
    run(tmp_path / "store", plan)
    assert f"{name}.safetensors is damaged: its shard is simulated again" in caplog.text
    assert contents(tmp_path / "store") == expected


@every_spectral_plan
def test_a_spectral_run_goes_on_with_less_memory(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", plan, memory="1GB")
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("imprints-00000"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan, memory="1GB")
    store = run(tmp_path / "store", plan, memory="1kB")
    assert "simulating 1 sources at once instead of 6, to respect memory=1kB" in caplog.text
    store.verify()
    one, other = (s.imprints(0, 0, 6, torch.device("cpu")) for s in (whole, store))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))


@every_spectral_plan
def test_a_spectral_store_is_replayed_to_the_bit(plan: Plan, made: Made, tmp_path: Path) -> None:
    store = Store(made(plan))
    again = run(tmp_path / "again", plan, replay=store, memory="1GB")
    assert again.checkpoints == store.checkpoints
    assert contents(again.path) == contents(store.path)


@every_plan
def test_progress_ends_with_all_of_it(plan: Plan, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    run(tmp_path / "store", plan, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# --- processes


def hammer(folder: Path, times: int) -> None:
    """Take the lock so many times; leave with 1 if another process holds it too."""
    while times:
        try:
            lock = Lock(folder)
        except StoreError:
            continue
        try:
            (folder / "alone").touch(exist_ok=False)
            (folder / "alone").unlink()
            times -= 1
        finally:
            lock.release()


@pytest.mark.skipif(sys.platform == "win32", reason="folders go unlocked there")
def test_only_one_of_many_processes_holds_a_lock_that_is_made_and_removed_all_the_time(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=hammer, args=(tmp_path, 100)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 6
    assert not list(tmp_path.iterdir())


def test_hidden_files_would_be_noticed(finished: Path) -> None:
    before = contents(finished)
    (finished / "checkpoint-000" / ".left").touch()
    assert contents(finished) != before


KILLABLE = """
import sys, torch
from pathlib import Path
from tests.simulation.test_resume import PLANS, run
from imprint.simulation import snapshot
torch.set_num_threads(1)
snapshot.SECONDS = 0.0
print("ready", flush=True)
run(Path(sys.argv[1]), PLANS[sys.argv[2]])
"""


def kill_and_resume(folder: Path, plan: str, kills: int, seed: int) -> dict[str, bytes]:
    """Run in processes of their own, killed after random times, until one comes through."""
    draw = random.Random(seed)
    for attempt in range(10 * kills + 10):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLABLE, str(folder), plan],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        process.stdout.readline()  # imports are done: what follows is the simulation
        if attempt < kills:
            time.sleep(draw.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return contents(folder)
    raise AssertionError("the run never came through")


@pytest.mark.system
@pytest.mark.curvature  # as in the other process
@pytest.mark.parametrize("plan", ["tangent", "one-sided mini-batches", "spectral"])
def test_a_process_killed_at_random_moments_ends_in_the_same_store(plan: str, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=2, seed=len(plan)) == expected


@pytest.mark.long
@pytest.mark.curvature  # as in the other process
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plan", PLANS.keys())
def test_processes_killed_a_hundred_times_end_in_the_same_store(plan: str, seed: int, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=5, seed=seed) == expected


# --- snapshots


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(step: int = 1, rows: int = 3) -> snapshot.PathState:
    return snapshot.PathState(step, {"w": torch.ones(2)}, {"w": torch.ones(rows, 2)}, torch.ones(rows), {}, {})


def test_a_snapshot_that_cannot_be_kept_does_not_stop_the_run(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*arguments: object) -> None:
        raise StoreError("could not write: No space left on device")

    monkeypatch.setattr(snapshot, "write_tensors", no_space)
    store = run(tmp_path / "store", PLANS["tangent"])
    assert contents(store.path) == contents(made(PLANS["tangent"]))
    assert "no snapshot could be saved, the simulation continues without it: could not write" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(("takes", "pause"), [(1.0, 60.0), (3.0, 60.0), (6.0, 120.0), (30.0, 600.0)])
def test_snapshots_are_kept_more_seldom_where_they_take_long(
    takes: float, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = Clock(), []

    def slow(*arguments: object) -> None:
        written.append(clock.now)
        clock.now += takes

    monkeypatch.setattr(snapshot, "write_tensors", slow)
    monkeypatch.setattr(snapshot, "SECONDS", 60.0)
    kept = snapshot.Snapshot(tmp_path / "snapshot.safetensors", 0, clock)
    while len(written) < 3:
        clock.now += 1.0
        kept.keep(state())
    assert written[0] == 60.0
    assert written[2] - written[1] == pause + takes


def test_a_snapshot_of_other_rows_is_not_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.safetensors"
    snapshot.Snapshot(path, 4).keep(state())
    assert snapshot.Snapshot(path, 4).restore(state(0), 9) is not None
    assert snapshot.Snapshot(path, 4).restore(state(0, rows=2), 9) is None
    assert snapshot.Snapshot(path, 5).restore(state(0), 9) is None


def test_a_snapshot_goes_with_the_chunk_that_used_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.safetensors"
    snapshot.Snapshot(path, 4).keep(state())
    snapshot.Snapshot(path, 4).clear()
    assert path.is_file()
    used = snapshot.Snapshot(path, 4)
    used.restore(state(0), 9)
    used.clear()
    assert not path.exists()
