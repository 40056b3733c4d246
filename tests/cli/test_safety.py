"""What a store must not do to a machine, whoever made it."""

import os
import re
import shlex
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import imprint
from imprint import Plan, Sources, Store, StoreError, simulate
from imprint.cli.app import app
from imprint.keys import make_keys
from imprint.readout.reader import Reader
from imprint.store.files import sha256
from tests.cli.commands import Command
from tests.cli.forging import DATA, HOSTILE, MODEL, forge, harmless, made, task

EVIL = MODEL + "\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\nx = test = task\n"


NOTES: dict[str, dict[str, Any]] = {
    "a package": {"task": "gift.evil:task"},
    "a module in the folder": {"task": "evil:task"},
    "a file in the folder": {"task": "gift/evil.py:task"},
    "queries of the standard library": {"task": "digits", "queries": "gift.evil:test"},
    "an attribute of the user's file": {"task": "digits", "queries": "nuke"},
    "checkpoints": {"task": "digits", "checkpoints": ["gift/evil.py:x"]},
    "data": {"task": "digits", "data": "gift.evil:x", "collate_fn": "gift.evil:x"},
}


@pytest.mark.parametrize("kind", NOTES)
def test_nothing_that_a_store_names_is_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path), str(tmp_path / "gift")])
    made(Path("gift"), {"imprint": {"command": NOTES[kind]}})
    Path("gift/evil.py").write_text(EVIL)
    lines = {
        "attribute": ["attribute", "gift"],
        "export": ["export", "gift", "-o", "exported"],
        "simulate": ["simulate", "--repeat", "gift", "-o", "again", "--no-check"],
    }
    wants = {"attribute": {"task", "queries", "collate_fn"}, "export": {"task", "queries"}}
    for name, words in lines.items():
        left = {"task": "", **NOTES[kind]}.keys() & wants.get(name, {*NOTES[kind]} - {"queries"})
        if left - {"task"} or NOTES[kind]["task"] != "digits":  # otherwise it is a setting, which is the library's own
            found = CliRunner().invoke(app, words)
            assert isinstance(found.exception, imprint.errors.ConfigurationError), name
            assert "that a store names are not loaded on their own" in str(found.exception)
    assert not list(tmp_path.rglob("ran"))
    assert not any(name in sys.modules for name in ("evil", "gift", "gift.evil"))


def test_the_command_to_copy_is_complete_and_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("my model.py").write_text(MODEL)
    run = CliRunner()
    given = ["my model.py:task", "--data", "data", "--sources", "per-example", "-o", "runs/a b", "--no-check"]
    assert run.invoke(app, ["simulate", *given]).exit_code == 0
    for words in (
        ["attribute", "runs/a b", "--top", "2", "--json"],
        ["simulate", "--repeat", "runs/a b", "--no-check", "-o", "again"],
    ):
        refused = run.invoke(app, words)
        assert refused.exit_code == 1
        copied = shlex.split(re.sub(r".*run: \S+ ", "", str(refused.exception)))
        assert {*words} <= {*copied, "-o"} and "my model.py:task" in copied
        assert run.invoke(app, copied).exit_code == 0, copied
    assert [f.sha256 for f in Store("again").checkpoints[0].imprints] == [
        f.sha256 for f in Store("runs/a b").checkpoints[0].imprints
    ]


def test_the_command_to_copy_is_clean_and_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made(Path("gift"), {"imprint": {"command": {"task": f"$(touch ran); {HOSTILE}:x"}}})
    refused = CliRunner().invoke(app, ["attribute", "gift"])
    assert harmless(str(refused.exception))
    assert shlex.split(str(refused.exception).rsplit("--task ")[-1])[0].startswith("$(touch ran); \\x1b]0;owned")


def test_a_manifest_cannot_ask_for_a_billion_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    Path("model.py").write_text(MODEL)
    assert CliRunner().invoke(app, ["simulate", "model.py:task", "-o", "a", "--no-check"]).exit_code == 0
    for threads, expected in ((10**9, []), (2, [2])):
        asked.clear()
        forge(tmp_path / "a", lambda values, threads=threads: values["execution"].update(threads=threads))  # type: ignore[misc]
        again = ["simulate", "model.py:task", "--repeat", "a", "-o", f"again{threads}", "--no-check"]
        assert CliRunner().invoke(app, again).exit_code == 0
        assert asked == expected


@pytest.mark.parametrize("name", ["imprints-00000", "base"])
def test_a_reader_sees_that_a_file_was_damaged_after_it_was_read(name: str, tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    reader = Reader(task(), Store(store.path))
    before = reader.scores(DATA)
    place = store.path / "checkpoint-000" / f"{name}.safetensors"
    content = bytearray(place.read_bytes())
    content[-1] ^= 0x40
    with place.open("r+b") as file:  # in place: tensors are mapped from the file
        file.write(content)
    with pytest.raises(StoreError, match=f"{name}.safetensors is damaged: it differs from its checksum"):
        reader.scores(DATA)
    content[-1] ^= 0x40
    with place.open("r+b") as file:
        file.write(content)
    assert torch.equal(reader.scores(DATA), before)


def test_a_file_that_is_touched_is_hashed_again_and_not_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(made(tmp_path / "store").path)
    reader = Reader(task(), store)
    before, hashed = reader.scores(DATA), list[str]()

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256(path)

    monkeypatch.setattr("imprint.store.opening.sha256", counted)
    reader.scores(DATA)
    assert not hashed
    (store.path / "checkpoint-000/imprints-00000.safetensors").touch()
    assert torch.equal(reader.scores(DATA), before)
    assert hashed == ["imprints-00000.safetensors"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_delete_a_temporary_store() -> None:
    store = made()
    child = os.fork()
    if child == 0:
        del store  # the last reference of this process: its store goes
        os._exit(0)
    os.waitpid(child, 0)
    store.verify()
    path = store.path
    del store
    assert not path.exists()


def test_a_name_twice_in_an_object_is_refused(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    text = (store.path / "manifest.json").read_text()
    (store.path / "manifest.json").write_text('{"created": "1000000",' + text.lstrip().removeprefix("{"))
    with pytest.raises(StoreError, match="the name 'created' appears more than once"):
        Store(store.path)


def test_a_manifest_of_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    store = made(tmp_path / "store")
    os.truncate(store.path / "manifest.json", 6 << 30)  # sparse: it takes no room
    with pytest.raises(StoreError, match="it has 6,442,450,944 bytes, and at most 67,108,864 are expected"):
        Store(store.path)


def test_a_note_that_fits_no_manifest_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"note must be made of JSON values: .* fit a manifest"):
        made(tmp_path / "store", note="x" * (33 << 20))
    assert not (tmp_path / "store").exists()


def test_linearity_is_kept_to_six_digits_as_other_figures_are(tmp_path: Path) -> None:
    """The last digits depend on where tensors lie in memory, and a resumed store is the same to the bit."""
    plan = Plan(engine="trajectories", steps=2, lr=0.1, epsilon=1.0)
    sources = Sources.by_label([0, 1, 2] * 3)
    store = simulate(task(), DATA, sources, plan, out=tmp_path / "store", progress=False)
    measured = asdict(store.checkpoints[0].measured)
    values = [*measured["linearity"].values(), *measured["norms"].values(), measured["drift"]]
    assert all(value == float(f"{value:.6g}") for value in values)


@pytest.mark.skipif(not find_spec("cryptography"), reason="cryptography is not installed")
@pytest.mark.parametrize(
    "line", ["inspect runs/news", "attribute runs/news", "inside runs/news times", "verify runs/news"]
)
def test_a_key_in_the_environment_is_demanded_of_every_store_that_is_read(
    line: str, command: Command, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path / "store.key")
    monkeypatch.setenv("IMPRINT_SIGNED_BY", str(tmp_path / "store.key.pub"))
    failed = command(*line.split())
    assert failed.code == 1 and "is not signed" in failed.err
