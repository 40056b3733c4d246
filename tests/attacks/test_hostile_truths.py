"""Folders of ground truth that say what they should not, given to `imprint evaluate` and `imprint retrain`.

Every field of `truth.json` takes hostile values under a checksum that is right again; tables of subsets and values are
damaged, forged and replaced by what is no file. A truth that was damaged is refused; one that was forged throughout
crashes nothing.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from imprint.store.values import sealed
from tests.attacks.judging import attacked
from tests.attacks.stores import Attack, Bases, Scene, command
from tests.attacks.test_hostile_folders import THINGS, Make
from tests.attacks.test_hostile_names import SEQUENCES

pytestmark = pytest.mark.long
STEPS = (
    command("evaluate", "scores.safetensors", "truth"),
    command("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "truth"),
)
FIELDS: dict[str, tuple[Any, ...]] = {
    "schema": (0, 1, 99, "3", None, -1),
    "kind": ("halves", "", 5, None, "__import__"),
    "question": ("this_run", "", 5, None),
    "n": (0, -12, "12", 2**62, None),
    "runs": (0, -1, 10**9, 2**62, "2", None, 1.5),
    "subsets": (0, 10**9, [], "6", None),
    "queries": (0, -2, 10**9, {}, None),
    "seed": (-1, "0", None),
    "measure": (None, 5, [], SEQUENCES["colour"], SEQUENCES["override"]),
    "fingerprints": (None, [], {}, {"sources": None}, "x"),
    "probes": (None, [], {}, {"losses": None}, {"losses": ["a"], "measures": []}),
    "device": (None, SEQUENCES["colour"]),
    "versions": (None, [], {"torch": SEQUENCES["colour"]}),
    "extra": ({}, SEQUENCES["colour"]),
}


def told(name: str, value: Any) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        place = scene.folder / "truth" / "truth.json"
        values = {key: item for key, item in json.loads(place.read_text()).items() if key != "sha256"}
        place.write_text(json.dumps(sealed({**values, name: value})))

    return change


ABOUT = {
    f"{name} = {value!r}": Attack(told(name, value), STEPS, forged=True)
    for name, values in FIELDS.items()
    for value in values
}


@pytest.mark.parametrize("attack", ABOUT.values(), ids=ABOUT.keys())
def test_a_truth_with_a_hostile_value_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


def first(scene: Scene, pattern: str) -> Path:
    return min((scene.folder / "truth").glob(pattern))


def content(pattern: str, change: Callable[[bytes], bytes]) -> Attack:
    def rewrite(scene: Scene) -> None:
        place = first(scene, pattern)
        place.write_bytes(change(place.read_bytes()))

    return Attack(rewrite, STEPS)


def instead(pattern: str, make: Make) -> Attack:
    def change(scene: Scene) -> None:
        place = first(scene, pattern)
        place.unlink()
        make(scene, place)

    return Attack(change, STEPS)


def tensors(pattern: str, change: Callable[[Any], Any]) -> Attack:
    def rewrite(scene: Scene) -> None:
        place = first(scene, pattern)
        save_file(change(load_file(place)), place, {"imprint": "{}"})

    return Attack(rewrite, STEPS)


PATTERNS = ("truth.json", "subsets.safetensors", "values-*.safetensors")
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda c: c[:-3],
    "a bit flipped": lambda c: c[:-9] + bytes([c[-9] ^ 4]) + c[-8:],
    "empty": lambda c: b"",
    "deep": lambda c: b"[" * 100_000,
}
FILES = {
    **{f"{pattern}: {name}": content(pattern, change) for pattern in PATTERNS for name, change in DAMAGES.items()},
    **{
        f"{pattern}: {name}": instead(pattern, THINGS[name])
        for pattern in PATTERNS
        for name in (
            "a pipe",
            "a device",
            "a folder",
            "a link to /dev/zero",
            "a link to itself",
            "a sparse file of 6 GiB",
        )
    },
    "values of NaN": tensors("values-*.safetensors", lambda t: {k: v * float("nan") for k, v in t.items()}),
    "values of another shape": tensors("values-*.safetensors", lambda t: {k: v.flatten() for k, v in t.items()}),
    "values of whole numbers": tensors("values-*.safetensors", lambda t: {k: v.long() for k, v in t.items()}),
    "no values": tensors("values-*.safetensors", lambda t: {}),
    "subsets of negative members": tensors("subsets.safetensors", lambda t: {k: -v for k, v in t.items()}),
    "subsets of enormous lengths": tensors("subsets.safetensors", lambda t: {k: v * 10**12 for k, v in t.items()}),
    "subsets of fractions": tensors("subsets.safetensors", lambda t: {k: v.double() for k, v in t.items()}),
    "subsets of nothing": tensors("subsets.safetensors", lambda t: {k: torch.empty(0) for k in t}),
}


@pytest.mark.parametrize("attack", FILES.values(), ids=FILES.keys())
def test_a_damaged_truth_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)
