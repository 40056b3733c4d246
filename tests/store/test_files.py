"""Files are written whole or not at all, replace nothing but regular files, and remove nothing of the user's."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from imprint import Recorder, StoreError
from imprint.store.files import LOCK, Lock, append, clear_leftovers, write, write_tensors
from imprint.store.folder import locked, make_folder


def fill(path: Path) -> None:
    path.write_text("new")


def a_link(place: Path) -> None:
    (place.parent / "target").write_text("mine")
    place.symlink_to(place.parent / "target")


def a_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))


IRREGULAR: dict[str, tuple[Callable[[Path], Any], str]] = {
    "link": (a_link, "a link"),
    "link to nothing": (lambda place: place.symlink_to("nowhere"), "a link"),
    "folder": (Path.mkdir, "a folder"),
    "pipe": (os.mkfifo, "a pipe"),
    "socket": (a_socket, "a socket"),
}


@pytest.mark.parametrize("kind", IRREGULAR)
def test_only_regular_files_are_replaced(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, what = IRREGULAR[kind]
    monkeypatch.chdir(tmp_path)  # the address of a socket is short
    make(Path("scores"))
    before = os.lstat("scores")
    with pytest.raises(StoreError, match=f"could not write {tmp_path / 'scores'}: it is {what}, and only a regular"):
        write(tmp_path / "scores", fill)
    assert os.path.samestat(os.lstat("scores"), before)
    if kind == "link":
        assert Path("target").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/null").is_char_device(), reason="there are no devices here")
def test_a_device_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "replace", lambda *names: pytest.fail("it would be gone"))
    with pytest.raises(StoreError, match="could not write /dev/null: it is a device"):
        write(Path("/dev/null"), fill)


def test_a_file_that_is_there_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (tmp_path / "scores").write_text("old")
    write(tmp_path / "scores", fill)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"scores": "new"}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_has_the_name_of_a_temporary_file_stays(kind: str, tmp_path: Path) -> None:
    mine = tmp_path / ".scores.tmp"
    mine.mkdir() if kind == "folder" else mine.write_text("mine")
    write(tmp_path / "scores", fill)
    assert (tmp_path / "scores").read_text() == "new"
    assert mine.is_dir() if kind == "folder" else mine.read_text() == "mine"


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Each has a place of its own for what it writes, which nobody can foresee."""
    places: list[Path] = []

    def inside(path: Path) -> None:
        places.append(path)
        fill(path)

    def within(path: Path) -> None:
        places.append(path)
        write(tmp_path / "scores", inside)
        path.write_text("outer")

    write(tmp_path / "scores", within)
    assert len({path.parent for path in places}) == 2
    assert (tmp_path / "scores").read_text() == "outer"


def test_a_file_has_the_permissions_that_the_user_gives_to_new_files(tmp_path: Path) -> None:
    """Safetensors makes files for their owner alone."""
    (tmp_path / "plain").touch()
    write(tmp_path / "tensors", lambda path: save_file({"x": torch.ones(1)}, path))
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_failed_write_leaves_the_file_as_it_was_and_names_it(tmp_path: Path) -> None:
    (tmp_path / "scores").write_text("old")

    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=f"could not write {tmp_path / 'scores'}: No space left"):
        write(tmp_path / "scores", fails)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"scores": "old"}


def test_nothing_is_appended_to_the_target_of_a_link(tmp_path: Path) -> None:
    a_link(tmp_path / "list")
    with pytest.raises(StoreError, match="list: it is a link"):
        append(tmp_path / "list", "a line")
    assert (tmp_path / "target").read_text() == "mine"


def test_a_lock_does_not_empty_the_target_of_a_link(tmp_path: Path) -> None:
    a_link(tmp_path / LOCK)
    with pytest.raises(StoreError, match="it is a link"):
        Lock(tmp_path)
    assert (tmp_path / "target").read_text() == "mine"


def test_leftovers_are_folders_with_a_name_that_only_we_give(tmp_path: Path) -> None:
    kept = [".scores.tmp", ".tmpAb12Cd", ".imprint-mine.tmp", ".imprint-0123456789abcdef.tmp.bak", "a.tmp"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".imprint-0000000000000000.tmp").write_text("a file")
    (tmp_path / ".imprint-1111111111111111.tmp").symlink_to(tmp_path / "a.tmp", target_is_directory=True)
    (tmp_path / ".imprint-0123456789abcdef.tmp").mkdir()
    (tmp_path / ".imprint-0123456789abcdef.tmp" / "half").write_text("half")
    clear_leftovers(tmp_path)
    links = [".imprint-0000000000000000.tmp", ".imprint-1111111111111111.tmp"]
    assert {path.name for path in tmp_path.iterdir()} == {*kept, *links}


def test_a_recorder_removes_no_link(tmp_path: Path) -> None:
    """Moments that are there without an optimiser would be another training's: a file goes, a link is refused."""
    a_link(tmp_path / "checkpoint-000001.moments.safetensors")
    with pytest.raises(StoreError, match=r"checkpoint-000001\.moments\.safetensors: it is a link"):
        Recorder(tmp_path)(nn.Linear(2, 1), 1)
    assert (tmp_path / "checkpoint-000001.moments.safetensors").is_symlink()


def test_tensors_are_read_as_they_were_written_even_where_they_share_memory(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    tensors = {
        "whole": flat,
        "tied": flat,
        "part": flat[2:5],
        "turned": flat.view(3, 4).T,
        "half": flat.bfloat16(),
        "z": flat.to(torch.complex64),
        "none": torch.zeros(0, 4),
        "one": torch.tensor(3),
    }
    write_tensors(tmp_path / "file", tensors, {"about": "é"})
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with safe_open(tmp_path / "file", framework="pt") as file:
        assert file.metadata() == {"about": "é"}


def test_a_folder_is_made_and_one_with_other_things_is_refused(tmp_path: Path) -> None:
    assert not make_folder(tmp_path / "new" / "folder", "the store", "manifest.json")
    assert make_folder(tmp_path / "new" / "folder", "the store", "manifest.json")
    (tmp_path / "new" / "folder" / ".imprint.lock").touch()  # of a process that was killed
    assert make_folder(tmp_path / "new" / "folder", "the store", "manifest.json")
    with pytest.raises(StoreError, match="new holds something else: give a new folder for the truth"):
        make_folder(tmp_path / "new", "the truth", "truth.json")
    (tmp_path / "new" / "truth.json").touch()
    assert make_folder(tmp_path / "new", "the truth", "truth.json")
    with pytest.raises(StoreError, match=r"truth\.json is a file: give a folder for the truth"):
        make_folder(tmp_path / "new" / "truth.json", "the truth")
    with pytest.raises(StoreError, match=r"could not make the folder .* Give a folder that you may write to"):
        make_folder(tmp_path / "new" / "truth.json" / "below", "the truth")


def test_a_folder_is_free_again_whatever_happened_in_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is writing to"), locked(tmp_path):
        Lock(tmp_path)
    Lock(tmp_path).release()
    assert not list(tmp_path.iterdir())
