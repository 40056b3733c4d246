"""Stores that name code: whatever a store says, nothing of it is imported, run or called.

A store's note tells what its command line named. Each attack plants code where the name leads, in one of many
spellings and in each of the places that a note has, and gives the commands that would look there. Planted code leaves
a canary; names of the standard library are watched for by their import.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.judging import attacked
from tests.attacks.stores import TASK, Attack, Bases, Scene, command

pytestmark = pytest.mark.long

ALONE = (
    command("attribute", "gift"),
    command("simulate", "--repeat", "gift", "--out", "again", "--no-check"),
)
PARTLY = (
    command("attribute", "gift", *TASK),
    command("attribute", "gift", "--queries", "model.py:queries"),
    command("simulate", "model.py:task", "--repeat", "gift", "--out", "again", "--no-check"),
    command("simulate", "--repeat", "gift/manifest.json", "--out", "other", "--no-check"),
)
EXPORTED = (command("export", "gift", "--out", "adapters"), command("export", "gift", *TASK, "--out", "adapters"))
OURS = {"task": "model.py:task", "data": "data", "sources": "sources", "queries": "queries"}


def planted(scene: Scene, *files: str) -> None:
    for name in files:
        place = scene.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(scene.code)


def noted(scene: Scene, **names: Any) -> None:
    scene.set("note", value={"imprint": {"command": names}})


def spelled(string: str, *files: str, prepare: Callable[[Scene], object] = lambda scene: None) -> Attack:
    """A task by a name that leads to planted files."""

    def change(scene: Scene) -> None:
        planted(scene, *(files or ("gift/evil.py",)))
        prepare(scene)
        noted(scene, task=string.replace("HERE", str(scene.folder)))

    return Attack(change, ALONE, forged=True)


def compiled(scene: Scene) -> None:
    import py_compile

    source = scene.gift / "evil.py"
    py_compile.compile(str(source), str(scene.gift / "evil.pyc"))
    source.unlink()


def zipped(scene: Scene) -> None:
    import zipfile

    with zipfile.ZipFile(scene.gift / "evil.zip", "w") as archive:
        archive.writestr("evil.py", scene.code)


SPELLINGS = {
    "module in the folder": spelled("gift.evil:task"),
    "module beside the folder": spelled("evil:task", "evil.py"),
    "package in the folder": spelled("gift.evil:task", "gift/evil/__init__.py"),
    "module of a package": spelled("gift.pack.evil:task", "gift/pack/evil.py"),
    "the folder as a package": spelled("gift:task", "gift/__init__.py"),
    "path into the folder": spelled("gift/evil.py:task"),
    "path with a dot": spelled("./gift/evil.py:task"),
    "path with two dots": spelled("gift/../gift/evil.py:task"),
    "path from outside": spelled("../outside/evil.py:task", "../outside/evil.py"),
    "absolute path": spelled("HERE/gift/evil.py:task"),
    "path beside the folder": spelled("evil.py:task", "evil.py"),
    "path through a link": spelled(
        "link/evil.py:task", prepare=lambda scene: (scene.folder / "link").symlink_to(scene.gift)
    ),
    "link to the file": spelled(
        "mine.py:task", prepare=lambda scene: (scene.folder / "mine.py").symlink_to(scene.gift / "evil.py")
    ),
    "hard link to the file": spelled(
        "mine.py:task", prepare=lambda scene: os.link(scene.gift / "evil.py", scene.folder / "mine.py")
    ),
    "path in a checkpoint's folder": spelled("gift/checkpoint-000/evil.py:task", "gift/checkpoint-000/evil.py"),
    "hidden file": spelled("gift/.evil.py:task", "gift/.evil.py"),
    "compiled module": spelled("gift.evil:task", prepare=compiled),
    "file in a zip": spelled("gift/evil.zip/evil.py:task", prepare=zipped),
    "path with spaces": spelled(" gift/evil.py:task"),
    "path with a line": spelled("gift/evil.py\n:task"),
    "path with two colons": spelled("gift/evil.py:x:task"),
    "name in another case": spelled("gift/EVIL.py:task", "gift/EVIL.py"),
    "attribute of an attribute": spelled("gift.evil:task.model"),
    "sitecustomize": spelled("sitecustomize:task", "sitecustomize.py"),
    "usercustomize": spelled("gift.usercustomize:task", "gift/usercustomize.py"),
    "conftest": spelled("gift.conftest:task", "gift/conftest.py"),
    "a name of the library's own": spelled("imprint.evil:task", "imprint/evil.py", "gift/imprint/evil.py"),
    "a name of the library's modules": spelled("imprint_experiment_model:task", "imprint_experiment_model.py"),
    "a module that shadows torch": spelled("gift.torch:task", "gift/torch.py"),
    "a name with a long tail": spelled("gift.evil:" + "x." * 500 + "x"),
}


@pytest.mark.parametrize("attack", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_no_spelling_of_a_task_makes_a_store_run_code(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- every place of a note


def placed(slot: str, string: Any, steps: tuple[str, ...] = (*ALONE, *PARTLY)) -> Attack:
    """A name in one place of the note, beside names of the user's own."""

    def change(scene: Scene) -> None:
        planted(scene, "gift/evil.py", "evil.py")
        noted(scene, **{**OURS, slot: string})

    return Attack(change, steps, forged=True)


STRINGS = ("gift.evil:x", "gift/evil.py:x", "evil:x")
SLOTS = {
    **{f"{slot}: {string}": placed(slot, string) for slot in (*OURS, "collate_fn") for string in STRINGS},
    **{f"checkpoints: {string}": placed("checkpoints", [string]) for string in STRINGS},
    "checkpoints: one text": placed("checkpoints", "gift.evil:x"),
    "checkpoints: several": placed("checkpoints", ["gift.evil:x", "gift/evil.py:x"]),
    "checkpoints: a pickle": placed("checkpoints", ["gift/evil.pt"]),
    "checkpoints: a file outside": placed("checkpoints", ["../outside/victim.txt"]),
    "plan: a text": placed("plan", "gift.evil:x"),
    "plan: a field": placed("plan", {"engine": "gift.evil:x"}),
    "out: a folder outside": placed("out", "../outside/folder"),
    "device: a text": placed("device", "gift.evil:x"),
    "device: a text of torch": placed("device", "meta"),
    "memory: a text": placed("memory", "gift.evil:x"),
    "memory: none": placed("memory", 0),
    "batch_size: huge": placed("batch_size", 10**18),
    "dtype: a text": placed("dtype", "gift.evil:x"),
    "config: a file": placed("config", "gift/evil.toml"),
    "a setting that is a name": placed("sources", "per-example"),
    "task: gift.evil:x, exported": placed("task", "gift.evil:x", EXPORTED),
    "queries: gift.evil:x, exported": placed("queries", "gift.evil:x", EXPORTED),
    "an unknown place": placed("__import__", "gift.evil:x"),
}


@pytest.mark.parametrize("attack", SLOTS.values(), ids=SLOTS.keys())
def test_no_place_of_a_note_makes_a_store_run_code(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- what is installed already


UNCOMMON = ("this", "__hello__", "tabnanny", "http.server", "torch.utils.collect_env")  # nothing else imports these


def of_python(string: str, slot: str = "task") -> Attack:
    module = string.rpartition(":")[0]
    return Attack(
        lambda scene: noted(scene, **{**OURS, slot: string}),
        (*ALONE, *PARTLY),
        forged=True,
        imports=(module,) if module in UNCOMMON else (),
    )


INSTALLED = {
    **{
        f"{slot}: {string}": of_python(string, slot)
        for slot in ("task", "queries", "data", "collate_fn")
        for string in ("this:s", "__hello__:main", "tabnanny:main")
    },
    "a server": of_python("http.server:test", "queries"),
    "a server for data": of_python("http.server:test", "data"),
    "a debugger": of_python("pdb:help", "queries"),
    "a shell": of_python("os:system"),
    "a shell for queries": of_python("os:system", "queries"),
    "the end of the process": of_python("os:abort", "queries"),
    "the site's own": of_python("site:main", "queries"),
    "an interpreter": of_python("code:interact", "queries"),
    "a pseudo-terminal": of_python("pty:spawn", "queries"),
    "a frame of torch": of_python("torch.utils.collect_env:main", "queries"),
    "a tree of files": of_python("shutil:rmtree", "collate_fn"),
}


@pytest.mark.parametrize("attack", INSTALLED.values(), ids=INSTALLED.keys())
def test_nothing_that_is_installed_runs_because_a_store_names_it(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- code that lies where Python or the library might look


READING = (
    command("inspect", "gift"),
    command("verify", "gift"),
    command("attribute", "gift", *TASK),
    "verify gift",
    "attribute gift",
)


def lying(*files: str, steps: tuple[str, ...] = READING) -> Attack:
    return Attack(lambda scene: planted(scene, *files), steps)


LYING = {
    "the store has model.py": lying("gift/model.py"),
    "the store has torch.py": lying("gift/torch.py", "gift/numpy.py", "gift/imprint.py"),
    "the store has __init__.py": lying("gift/__init__.py", "gift/__main__.py"),
    "the store has conftest.py": lying("gift/conftest.py", "gift/setup.py", "gift/sitecustomize.py"),
    "the store has plan.py and queries.py": lying("gift/plan.py", "gift/queries.py", "gift/collate_fn.py"),
    "checkpoints have __init__.py": lying("gift/checkpoint-000/__init__.py", "gift/checkpoint-000/base.py"),
}


@pytest.mark.parametrize("attack", LYING.values(), ids=LYING.keys())
def test_code_that_lies_in_a_store_is_not_found(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


@pytest.mark.parametrize("attack", LYING.values(), ids=LYING.keys())
def test_code_that_lies_in_a_store_is_not_found_from_within(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    """The user goes into the store's folder: what is there is not theirs."""

    def enter(scene: Scene) -> None:
        attack.change(scene)
        for place in scene.folder.glob("gift/*.py"):  # the folder's own files, where commands are given
            if place.name != "model.py":
                place.rename(scene.folder / place.name)
        noted(scene, task="evil:task", queries="queries:x", data="plan:x")
        planted(scene, "evil.py")

    assert not attacked(Attack(enter, (*ALONE, command("attribute", "gift", "--queries", "model.py:queries"))), bases,
                        tmp_path)  # fmt: skip
