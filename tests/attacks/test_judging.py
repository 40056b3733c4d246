"""The judge itself: what is sound passes, and everything that an attack could do is seen when it happens."""

from pathlib import Path

import pytest

from tests.attacks.judging import attacked
from tests.attacks.stores import JSON, READ, REPEAT, WRITE, Attack, Bases, Scene, command

pytestmark = pytest.mark.long


def nothing(scene: Scene) -> None:
    pass


@pytest.mark.parametrize("base", ["dense", "factored"])
def test_an_untouched_store_passes_and_every_call_succeeds(base: str, bases: Bases, tmp_path: Path) -> None:
    steps = (*READ, *JSON, *(("literal gift",) if base == "dense" else ()), *WRITE, *REPEAT)
    assert attacked(Attack(nothing, steps, base=base), bases, tmp_path) == []
    for step in steps:
        found = bases.untouched(base, step)
        assert found["raised"] is None and not found["code"], found


def changed(model: str) -> Attack:
    """The user's own file does what an attack would."""

    def change(scene: Scene) -> None:
        place = scene.folder / "model.py"
        place.write_text(place.read_text() + model.replace("OUTSIDE", str(scene.outside)))

    return Attack(change, ("attribute gift",))


SEEN = {
    "other scores": ("queries = (queries[0] + 1, queries[1])", "other scores without a word"),
    "an exception": ("queries = 1 / 0", "raised ZeroDivisionError"),
    "a wait": ("import time; time.sleep(1000)", "hung"),
    "too much memory": ("big = bytearray(8 << 30)", "raised MemoryError"),
    "the end of the process": ("import os; os.kill(os.getpid(), 11)", "SIGSEGV"),
    "a silent end": ("import os; os._exit(3)", "ended with 3"),
    "a changed file": ("open('OUTSIDE/victim.txt', 'a').write('!')", "changed outside the store: victim.txt"),
    "a new file": ("open('OUTSIDE/new.txt', 'a').write('!')", "changed outside the store: new.txt"),
    "a process": ("import subprocess; subprocess.run(['true'])", "ran: subprocess.Popen"),
    "a control character": ("print('\\x1b[31m')", "shows '\\x1b'"),
}


@pytest.mark.parametrize(("model", "expected"), SEEN.values(), ids=SEEN.keys())
def test_what_goes_wrong_is_seen(model: str, expected: str, bases: Bases, tmp_path: Path) -> None:
    found = attacked(changed(model), bases, tmp_path)
    assert any(expected in fault for fault in found), found


def test_planted_code_is_seen(bases: Bases, tmp_path: Path) -> None:
    """Here the user names it."""
    attack = Attack(
        lambda scene: (scene.gift / "evil.py").write_text(scene.code),
        (command("attribute", "gift", "--task", "gift/evil.py:task"),),
    )
    found = attacked(attack, bases, tmp_path)
    assert [fault.partition(" ")[0] for fault in found] == ["planted", "ran:"], found


def test_a_named_module_is_seen(bases: Bases, tmp_path: Path) -> None:
    attack = Attack(nothing, (command("attribute", "gift", "--task", "this:s"),), imports=("this",))
    assert "ran: import this" in attacked(attack, bases, tmp_path)
