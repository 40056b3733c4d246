"""What an unfinished run has left may be damaged: it is made again, or refused with advice."""

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imprint import StoreError
from imprint.store import finished as listing
from imprint.store.files import LOCK, append
from imprint.store.finished import FILES
from imprint.store.manifest import SCHEMA
from imprint.store.request import Request
from imprint.store.writing import Writer
from tests.simulation.killing import PLANS, STEPS, Killed, Made, contents, dies_after, flip, run

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


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
