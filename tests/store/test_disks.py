"""Disks that are full or cannot be written to: the error says so, and the run goes on once they can."""

import os
import re
import resource
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Sources, StoreError
from imprint.simulation import snapshot
from tests.simulation.killing import contents
from tests.store.making import N, both, make


def run_apart(call: str, *arguments: object, mounts: bool = False) -> str:
    """Call a function of this file in a process of its own, on request one that may mount file systems."""
    code = f"import sys; from tests.store import test_disks; test_disks.{call}(*sys.argv[1:])"
    command = [*(["unshare", "--map-root-user", "--mount"] if mounts else []), sys.executable, "-c", code]
    result = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def can_mount() -> bool:
    script = 'mount -t tmpfs tmpfs "$0"'
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, folder]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            return False


mounting = pytest.mark.skipif(not can_mount(), reason="no file system can be mounted here")


def fails_for_want_of_room(folder: Path, **options: Any) -> str | None:
    """Try; what could not be written, if something could not be, after a look at what is left."""
    try:
        make(folder, **options)
    except StoreError as error:
        message = str(error)
        assert "same call again: a simulation with out= resumes, and a store is changed in full or not" in message, (
            message
        )
        assert "could not write" in message
        assert not list(folder.rglob(".*")), "a half-written file was left"
        return message
    return None


def full_disk(place: str) -> None:
    """Disks of more and more pages, each too small until it is made larger."""
    torch.set_num_threads(1)
    snapshot.SECONDS = 0.0
    expected = contents(make(Path(place) / "whole").path)
    for pages in range(1, 1000):
        disk = Path(place) / str(pages)
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "tmpfs", disk], check=True)
        message = fails_for_want_of_room(disk / "store")
        if message is None:
            break
        assert "No space left on device" in message
        print(message)
        subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
        make(disk / "store")
        assert contents(disk / "store") == expected, pages


@pytest.mark.system
@mounting
def test_a_full_disk_names_the_file_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    told = run_apart("full_disk", tmp_path, mounts=True)
    for name in ("unfinished.json", "unfinished.files", "midpoints", "imprints", "manifest.json"):
        assert f"/{name}" in told, f"the disk was never full at {name}"
    assert "/snapshot" not in told  # which is not needed to go on


def small_files(place: str) -> None:
    """Shards too large for what a file may have, until it may have more."""
    torch.set_num_threads(1)
    folder = Path(place)
    large: dict[str, Any] = {"memory": "1GB", "sources": Sources.groups({str(i): [i % N] for i in range(200)})}
    expected = contents(make(folder / "whole", **large).path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, hard))
    message = fails_for_want_of_room(folder / "store", **large)
    print(message)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    make(folder / "store", **large)
    assert contents(folder / "store") == expected


@pytest.mark.system
def test_a_file_that_may_not_grow_is_named_and_the_run_goes_on_once_it_may(tmp_path: Path) -> None:
    """What a full disk is where none can be mounted."""
    told = run_apart("small_files", tmp_path)
    assert "midpoints-00000.safetensors: File too large" in told


def read_only(place: str) -> None:
    """A folder that cannot be written to: neither is a store made there, nor one missed that is there already."""
    torch.set_num_threads(1)
    folder = Path(place)
    for path in (folder / "new", folder / "empty"):
        try:
            make(path)
        except StoreError as error:
            print(error)
        else:
            raise AssertionError("it was written to")
    store = make(folder / "made")
    assert both(store).isfinite().all()


def prepared(folder: Path) -> Path:
    make(folder / "made")
    (folder / "empty").mkdir()
    return folder


REFUSED = re.compile(
    r"could not make the folder .*/new: .*(Read-only|Permission denied).*\n"
    r".*/empty cannot be written to: (Read-only|Permission denied)"
)


def mounted_read_only(place: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", place], check=True)
    prepared(Path(place))
    subprocess.run(["mount", "-o", "remount,ro", place], check=True)
    read_only(place)


@pytest.mark.system
@mounting
def test_a_read_only_disk_is_told_and_its_stores_are_read(tmp_path: Path) -> None:
    told = run_apart("mounted_read_only", tmp_path, mounts=True)
    assert REFUSED.search(told), told


def without_rights(place: str) -> None:
    os.umask(0o022)
    prepared(Path(place))
    for path in (Path(place) / "empty", Path(place)):
        path.chmod(0o555)
    if os.geteuid() == 0:  # for whom permissions do not count
        os.setuid(65534)
    read_only(place)


@pytest.mark.system
def test_a_folder_without_the_right_to_write_is_told_and_its_stores_are_read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        told = run_apart("without_rights", folder)
        assert REFUSED.search(told), told
        Path(folder).chmod(stat.S_IRWXU)
