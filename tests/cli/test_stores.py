"""What `inspect` and `verify` say of a store."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from imprint import Store, simulate
from tests.cli.commands import MODEL, Command, imprints, loaded


def test_what_was_estimated_is_kept_and_shown_beside_what_it_took(command: Command, here: Path) -> None:
    note = Store("runs/news").manifest.note["imprint"]
    assert note["command"] == {"task": "model.py:task"}
    assert note["estimate"]["seconds"] > 0 and note["estimate"]["peak_bytes"] > 0
    assert re.search(
        r"took +│ 0:0\d \(estimated 0:0\d\); at most .* of memory \(estimated .*\)", command("inspect", "runs/news").out
    )


@pytest.mark.parametrize(
    "note",
    [
        "mine",
        {"command": "python train.py", "estimate": "an hour"},
        {"imprint": "yes"},
        {"imprint": {"command": "python train.py", "estimate": {"hours": 1}}},
        {"imprint": {"estimate": {"seconds": "many", "peak_bytes": None}}},
    ],
    ids=str,
)
def test_a_note_may_say_anything(note: Any, command: Command, empty: Path) -> None:
    (empty / "model.py").write_text(MODEL)
    model = loaded(empty / "model.py")
    simulate(model.task, model.data, model.sources, model.plan, out="store", note=note, progress=False)
    shown = command("inspect", "store")
    assert shown.code == 0 and "took" in shown.out and "estimated" not in shown.out
    assert command("attribute", "store", "--task", "model.py:task").code == 0
    assert command("simulate", "model.py:task", "--repeat", "store", "-o", "again", "--no-check").code == 0
    assert imprints("again") == imprints("store")


def test_a_damaged_store_is_found(command: Command, here: Path, tmp_path: Path) -> None:
    assert command("verify", "runs/news").out.startswith("runs/news: all files match their checksums (")
    shutil.copytree("runs/news", tmp_path / "store")
    shard = tmp_path / "store" / "checkpoint-000" / "imprints-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    found = command("verify", tmp_path / "store", "--json")
    assert found.code == 1 and not found.out
    assert "imprints-00000.safetensors is damaged" in found.err
