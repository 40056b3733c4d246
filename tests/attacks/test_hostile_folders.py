"""Folders that are not what they seem: links, pipes, devices and enormous files, where the library reads and writes.

A store's file may be a link that leads out, a pipe that nobody writes to, a device, a folder, or a sparse file larger
than the memory. Where the library writes, the attacker has put links to a victim outside under every name that it
uses: locks, journals, temporary files, results. Nothing outside may change, and nothing may hang.
"""

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.journals import journal, listed
from tests.attacks.judging import attacked
from tests.attacks.stores import READ, REPEAT, TASK, WRITE, Attack, Bases, Scene, command, entries

pytestmark = pytest.mark.long

# --- what stands in the place of a file

Make = Callable[[Scene, Path], object]


def device(scene: Scene, place: Path) -> None:
    try:
        os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # as /dev/zero is
    except PermissionError:
        pytest.skip("a device can be made by root only")


def bound(scene: Scene, place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        before = Path.cwd()
        os.chdir(place.parent)  # the name of a socket may have 107 characters
        try:
            made.bind(place.name)
        finally:
            os.chdir(before)


def sparse(size: int) -> Make:
    def make(scene: Scene, place: Path) -> None:
        with place.open("wb") as file:
            file.truncate(size)

    return make


def linked(target: str) -> Make:
    return lambda scene, place: place.symlink_to(target.replace("OUTSIDE", str(scene.outside)))


def looped(scene: Scene, place: Path) -> None:
    place.symlink_to(place.name)


def piped(scene: Scene, place: Path) -> None:
    os.mkfifo(scene.outside / "pipe")
    place.symlink_to(scene.outside / "pipe")


def without_rights(scene: Scene, place: Path) -> None:
    place.write_text("{}")
    place.chmod(0)


THINGS: dict[str, Make] = {
    "a pipe": lambda scene, place: os.mkfifo(place),
    "a device": device,
    "a socket": bound,
    "a folder": lambda scene, place: place.mkdir(),
    "a sparse file of 6 GiB": sparse(6 << 30),
    "a sparse file of 64 GiB": sparse(64 << 30),
    "a link out": linked("OUTSIDE/victim.txt"),
    "a link to /dev/zero": linked("/dev/zero"),
    "a link to /proc": linked("/proc/self/environ"),
    "a link to itself": looped,
    "a link to nothing": linked("nowhere"),
    "a link to a pipe": piped,
    "a file without rights": without_rights,
}  # fmt: skip


def folder_of(fill: Callable[[Path], object]) -> Make:
    def make(scene: Scene, place: Path) -> None:
        place.mkdir()
        fill(place)

    return make


FOLDER = folder_of(lambda place: (place / "x").touch())


def file_of(scene: Scene, kind: str) -> Path:
    values = scene.manifest
    names: dict[str, str] = {
        "manifest": "manifest.json",
        "sources": "sources.json",
        "shard": values["checkpoints"][0]["imprints"][0]["path"],
        "base": values["checkpoints"][2]["base"]["path"],
        "probes": values["probes"]["file"]["path"],
        "folder": "checkpoint-000",
    }
    return scene.gift / names[kind]


def replaced(kind: str, make: Make) -> Attack:
    def change(scene: Scene) -> None:
        place = file_of(scene, kind)
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        make(scene, place)

    return Attack(change)


ZEROS = (
    "a7c744c13cc101ed66c29f672f92455547889cc586ce6d44fe76ae824958ea51",
    2 << 30,
)  # the checksum of two GiB of zeros


def enormous(kind: str) -> Attack:
    """A file larger than the memory that is just what the manifest says."""

    def change(scene: Scene) -> None:
        place, values = file_of(scene, kind), scene.manifest
        sparse(ZEROS[1])(scene, place)
        for file in entries(values):
            if scene.gift / file["path"] == place:
                file |= {"sha256": ZEROS[0], "bytes": ZEROS[1]}
        scene.write_manifest(values)

    return Attack(change, ("verify gift",))


READING = {
    **{
        f"{kind}: {name}": replaced(kind, make)
        for kind in ("manifest", "sources", "shard", "base", "folder")
        for name, make in THINGS.items()
        if not (kind == "folder" and name == "a folder")
    },
    "probes: a pipe": replaced("probes", THINGS["a pipe"]),
    "probes: a link out": replaced("probes", THINGS["a link out"]),
    **{f"{kind}: 2 GiB of zeros, as they should be": enormous(kind) for kind in ("sources", "shard")},
}


@pytest.mark.parametrize("attack", READING.values(), ids=READING.keys())
def test_what_is_no_file_is_not_read_as_one(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- a store that is something else


def gift(make: Make) -> Attack:
    def change(scene: Scene) -> None:
        shutil.rmtree(scene.gift)
        make(scene, scene.gift)

    return Attack(change, (*READ, command("attribute", "gift", *TASK), *REPEAT))


STORES = {
    **{name: gift(THINGS[name]) for name in ("a pipe", "a device", "a folder", "a link out", "a link to itself")},
    "a link to /proc": gift(linked("/proc/self")),
    "a link to /dev": gift(linked("/dev")),
    "a folder of a pipe": gift(folder_of(lambda place: os.mkfifo(place / "manifest.json"))),
    "a folder of a folder": gift(lambda scene, place: (place / "manifest.json").mkdir(parents=True)),
    "a folder of a journal that is a pipe": gift(folder_of(lambda place: os.mkfifo(place / "unfinished.json"))),
}


@pytest.mark.parametrize("attack", STORES.values(), ids=STORES.keys())
def test_what_is_no_store_is_not_read_as_one(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- what is planted where a simulation writes


def emptied(scene: Scene) -> None:
    shutil.rmtree(scene.gift)
    scene.gift.mkdir()


def planted(name: str, make: Make, before: Callable[[Scene], object] = emptied) -> Attack:
    """Something in the folder that a simulation will write to."""

    def change(scene: Scene) -> None:
        before(scene)
        place = scene.gift / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        make(scene, place)

    return Attack(change, WRITE)


def hard(scene: Scene, place: Path) -> None:
    os.link(scene.outside / "victim.txt", place)


OUT = linked("OUTSIDE/victim.txt")
INTO = linked("OUTSIDE/folder")
WRITTEN = (
    *(".imprint.lock", "unfinished.json", "unfinished.files", "manifest.json", "sources.json", "probes.safetensors"),
    *(".manifest.json.tmp", ".unfinished.json.tmp", ".sources.json.tmp", ".unfinished.files.tmp"),
    *("checkpoint-000/base.safetensors", "checkpoint-000/.base.safetensors.tmp", "checkpoint-000/snapshot.safetensors"),
    "checkpoint-000/imprints-00000.safetensors",
)


def leave_links(scene: Scene) -> None:
    for name in (".a.tmp", "unfinished.json", "snapshot.safetensors", ".imprint.lock"):
        (scene.gift / name).symlink_to(scene.outside / "victim.txt")


WRITING = {
    **{f"link out: {name}": planted(name, OUT) for name in WRITTEN},
    **{f"link out, resumed: {name}": planted(name, OUT, journal()) for name in WRITTEN if name != "manifest.json"},
    **{f"hard link: {name}": planted(name, hard) for name in WRITTEN},
    **{f"hard link, resumed: {name}": planted(name, hard, journal()) for name in WRITTEN if name != "manifest.json"},
    "checkpoint-000 leads out": planted("checkpoint-000", INTO),
    "checkpoint-000 leads out, resumed": planted("checkpoint-000", INTO, journal()),
    "checkpoint-000 leads out, and a list": planted(
        "checkpoint-000", INTO, listed("checkpoint-000/base.safetensors")
    ),
    "a list of a shard that leads out": planted(
        "checkpoint-000", INTO, listed("checkpoint-000/imprints-00000.safetensors")
    ),
    "a list of the model": Attack(listed("../model.py"), WRITE),
    "a list of an absolute path": Attack(listed("/etc/hostname"), WRITE),
    "a lock that is a folder": planted(".imprint.lock", THINGS["a folder"]),
    "a lock that is a pipe": planted(".imprint.lock", THINGS["a pipe"]),
    "a lock that is a device": planted(".imprint.lock", device),
    "a lock that leads to a device": planted(".imprint.lock", linked("/dev/full")),
    "a journal that is a pipe": planted("unfinished.json", THINGS["a pipe"]),
    "a journal that is a folder": planted("unfinished.json", THINGS["a folder"]),
    "a list that is a pipe": planted("unfinished.files", THINGS["a pipe"], journal()),
    "a snapshot that is a pipe": planted("checkpoint-000/snapshot.safetensors", THINGS["a pipe"], journal()),
    "a temporary name that is a folder": planted(".manifest.json.tmp", FOLDER),
    "a temporary name that is a folder, resumed": planted(".manifest.json.tmp", FOLDER, journal()),
    "leftovers beside a finished store": Attack(leave_links, WRITE),
    "leftovers through a link": Attack(lambda scene: (scene.gift / "more").symlink_to(scene.outside / "folder"), WRITE),
    "the folder is a link to a folder of others": gift(linked("OUTSIDE/folder")),
}  # fmt: skip


@pytest.mark.parametrize("attack", WRITING.values(), ids=WRITING.keys())
def test_nothing_outside_changes_when_a_simulation_writes(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- what is planted where results are written


def result(name: str, make: Make) -> Attack:
    """Something where the scores of a sound store are written to."""
    steps = (command("attribute", "gift", *TASK, "--out", name),)
    return Attack(lambda scene: make(scene, scene.folder / name.replace("TEMPORARY", "")), steps)


def beside(name: str, temporary: str, make: Make) -> Attack:
    steps = (command("attribute", "gift", *TASK, "--out", name),)
    return Attack(lambda scene: make(scene, scene.folder / temporary), steps)


RESULTS = {
    **{
        f"{name}: {thing}": result(name, THINGS[thing])
        for name in ("out.csv", "out.safetensors")
        for thing in ("a pipe", "a device", "a folder", "a link out", "a link to /dev/zero", "a link to itself")
    },
    **{
        f"{temporary} is {thing}": beside(name, temporary, make)
        for name, temporary in (("out.csv", ".out.csv.tmp"), ("out.safetensors", ".out.safetensors.tmp"))
        for thing, make in (
            ("a link out", OUT),
            ("a pipe", THINGS["a pipe"]),
            ("a folder", FOLDER),
        )
    },
    "a repeat into a link": Attack(
        lambda scene: (scene.folder / "again").symlink_to(scene.outside / "folder"), REPEAT),
}  # fmt: skip


@pytest.mark.parametrize("attack", RESULTS.values(), ids=RESULTS.keys())
def test_nothing_outside_changes_when_results_are_written(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


@pytest.mark.parametrize("name", ["out.csv", "out.safetensors"])
def test_a_file_of_the_users_that_has_a_temporary_name_stays(name: str, bases: Bases, tmp_path: Path) -> None:
    scene = bases.scene("dense", tmp_path)
    mine = scene.folder / f".{name}.tmp"
    mine.write_text("years of work")
    report = bases.server.perform(scene.folder, (command("attribute", "gift", *TASK, "--out", name),))
    assert report["steps"][0]["code"] == 0
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("thing", ["a device", "a pipe"])
def test_what_is_no_file_stays_what_it_is(thing: str, bases: Bases, tmp_path: Path) -> None:
    """A save does not replace it, nor write into it."""
    scene = bases.scene("dense", tmp_path)
    place = scene.folder / "out.safetensors"
    THINGS[thing](scene, place)
    before = place.lstat()
    bases.server.perform(scene.folder, (command("attribute", "gift", *TASK, "--out", "out.safetensors"),))
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
