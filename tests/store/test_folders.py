"""Where a store may lie, and folders that vanish, lead elsewhere or hold something else."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from imprint import Store, StoreError
from tests.store.making import both, make


def snapshot_of(folder: Path) -> dict[str, tuple[bytes | None, int, int]]:
    """All there is in a folder: contents, permissions and times of change."""
    return {
        str(path.relative_to(folder)): (
            path.read_bytes() if path.is_file() else None,
            path.stat().st_mode,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("name", ["sources.json", "checkpoint-000", "checkpoint-000/imprints-00000.safetensors"])
def test_a_link_out_of_the_store_is_not_followed(name: str, copied: Path, tmp_path: Path) -> None:
    (copied / name).rename(tmp_path / "outside")
    (copied / name).symlink_to(tmp_path / "outside")
    with pytest.raises(StoreError, match="is a link that leads out of the store"):
        Store(copied).verify()


def test_a_store_behind_a_link_is_read(sound: Path, right: Tensor, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sound)
    assert torch.equal(both(Store(tmp_path / "link")), right)


@pytest.mark.parametrize("used", [False, True], ids=["before its first use", "after it"])
def test_a_store_that_disappears_is_missed(used: bool, copied: Path) -> None:
    store = Store(copied)
    if used:
        both(store)
    shutil.rmtree(copied)
    for use in (lambda: both(store), store.verify):
        with pytest.raises(StoreError, match=str(copied)):
            use()


def test_a_folder_that_disappears_during_a_simulation_is_missed(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"could not write .*No such file or directory"):
        make(tmp_path / "store", progress=lambda done, total: shutil.rmtree(tmp_path / "store", ignore_errors=True))


FOREIGN: dict[str, dict[str, str]] = {
    "a file": {"thesis.tex": "years of work"},
    "a hidden file": {".git/config": "[core]"},
    "a lock": {".lock": "mine", "thesis.tex": ""},
    "a manifest": {"manifest.json": '{"name": "My app", "icons": []}', "index.html": "<html>", ".lock": ""},
    "a journal": {"unfinished.json": '{"chapters": 3}', ".lock": "mine"},
    "tensors": {"checkpoint-000/base.safetensors": "?"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN.keys())
def test_nothing_is_touched_in_a_folder_that_holds_something_else(files: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    before = snapshot_of(folder)
    with pytest.raises(StoreError, match=str(folder)):
        make(folder)
    assert snapshot_of(folder) == before


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "within"):
        with pytest.raises(StoreError, match=r"is a file|Not a directory"):
            make(path)
    assert (tmp_path / "file").read_text() == "x"
    with pytest.raises(StoreError, match="holds no store"):
        Store(tmp_path / "file")


def test_what_others_put_into_the_folder_outlives_a_failed_simulation(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        (tmp_path / "store" / "thesis.tex").write_text("years of work")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make(tmp_path / "store", progress=fail)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    "name",
    [
        *("Žofia", "e\u0301", "👩‍👩‍👧‍👦", "שלום", "\"'`$x", "one\ntwo", " ", "[a] *?", "#%20&+", "-rf", "x" * 255),
    ],
)
def test_a_store_may_lie_anywhere(name: str, right: Tensor, tmp_path: Path) -> None:
    path = tmp_path / name
    assert torch.equal(both(make(path)), right)
    assert torch.equal(both(Store(path)), right)
    assert len(make(str(path))) == 3
    assert [found.name for found in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a\0b", "x" * 256, os.fsdecode(b"not \xff UTF-8")])
def test_a_path_that_no_store_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="could not make the folder"):
        make(tmp_path / name)
    with pytest.raises(StoreError, match="there is no folder"):
        Store(tmp_path / name)
    assert not list(tmp_path.iterdir())
