"""Folders of unfinished simulations that were forged: journals, lists of finished files, snapshots.

A user who makes the same call again goes on with what lies there. Whatever it says, the simulation resumes or is
refused in words; what was forged throughout may give other scores, but they are numbers.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from imprint.store.fingerprint import of_tensors
from tests.attacks.journals import finished, journal
from tests.attacks.judging import attacked
from tests.attacks.stores import WRITE, Attack, Bases, Scene

pytestmark = pytest.mark.long
ABOUT = {"linearity": [0.01] * 5, "norms": [0.2] * 5, "drift": 0.05}


def emptied(scene: Scene) -> None:
    """Only the journal is left."""
    journal()(scene)
    for path in scene.gift.glob("checkpoint-*"):
        shutil.rmtree(path)


@pytest.mark.parametrize("change", [emptied, finished({"imprint": json.dumps(ABOUT)})], ids=["journal", "shards"])
def test_an_honest_journal_is_resumed(change: Callable[[Scene], None], bases: Bases, tmp_path: Path) -> None:
    """Without which the attacks below would be refused for another reason than they should be."""
    scene = bases.scene("dense", tmp_path)
    change(scene)
    report = bases.server.perform(scene.folder, WRITE)
    assert [step["raised"] for step in report["steps"]] == [None, None]
    assert report["steps"][0]["scores"] == bases.untouched("dense", "attribute gift")["scores"]


JOURNALS = {
    "a journal of another shape": Attack(journal(request=[]), WRITE),
    "a journal of no checkpoints": Attack(journal(checkpoints={}), WRITE),
    "a journal of a thousand checkpoints": Attack(journal(checkpoints=[None] * 1000), WRITE),
    "a journal of another schema": Attack(journal(schema=-1), WRITE),
    "a journal with a schema of text": Attack(journal(schema="6"), WRITE),
    "a journal with a field more": Attack(journal(code="gift.evil:task"), WRITE),
    "a journal that is deep": Attack(
        lambda scene: (journal()(scene), (scene.gift / "unfinished.json").write_text("[" * 100_000)), WRITE
    ),
    "a list that is noise": Attack(
        lambda scene: (journal()(scene), (scene.gift / "unfinished.files").write_bytes(os.urandom(999))), WRITE
    ),
}


@pytest.mark.parametrize("attack", JOURNALS.values(), ids=JOURNALS.keys())
def test_a_journal_that_is_none_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


def settled(**changes: Any) -> Attack:
    """A journal with a hostile choice of steps for the first checkpoint, sealed."""

    def change(scene: Scene) -> None:
        first = {**scene.manifest["checkpoints"][0], "base": None, "imprints": [], "midpoints": []}
        for name, value in changes.items():
            first[name] = {**first[name], **value} if isinstance(value, dict) else value
        journal(checkpoints=[first])(scene)
        for path in scene.gift.glob("checkpoint-*"):
            shutil.rmtree(path)

    return Attack(change, WRITE, forged=True)


SETTLED = {
    "rows at once of 0": settled(decided={"rows_at_once": 0}),
    "rows at once of 2⁶²": settled(decided={"rows_at_once": 2**62}),
    "an lr of 1e300": settled(decided={"lr": 1e300}),
    "steps of 10¹²": settled(steps=10**12),
    "an ε of 1e-300": settled(decided={"epsilon": 1e-300}),
    "an ε of null": settled(decided={"epsilon": None}),
    "a curvature of one number": settled(measured={"curvature": [1.0]}),
    "an enormous curvature": settled(measured={"curvature": [-1e300, 1e300]}),
    "vectorised of text": settled(decided={"vectorised": "no"}),
    "a weight of 0": settled(weight=0.0),
    "layers": settled(decided={"layers": ["first"]}),
}


@pytest.mark.parametrize("attack", SETTLED.values(), ids=SETTLED.keys())
def test_a_forged_journal_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


def without_figure(part: str, name: str) -> Attack:
    def change(scene: Scene) -> None:
        first = {**scene.manifest["checkpoints"][0], "base": None, "imprints": [], "midpoints": []}
        figures = {key: value for key, value in first[part].items() if key != name}
        journal(checkpoints=[{**first, part: figures}])(scene)

    return Attack(change, WRITE, forged=True)


@pytest.mark.parametrize(
    ("part", "name"), [("decided", "rows_at_once"), ("decided", "vectorised"), ("measured", "curvature")]
)
def test_a_forged_journal_that_lacks_a_figure_harms_nothing(part: str, name: str, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(without_figure(part, name), bases, tmp_path)


# --- files that are counted as done


def put(value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: torch.full_like(tensor, value) for name, tensor in tensors.items()}


def shard(about: Any) -> Attack:
    text = about if isinstance(about, str) else json.dumps(about)
    return Attack(finished({"imprint": text}), WRITE, forged=True)


SHARDS = {
    "no metadata": Attack(finished(None), WRITE, forged=True),
    "other metadata": Attack(finished({"format": "pt"}), WRITE, forged=True),
    "metadata of nothing": shard({}),
    "metadata that is no JSON": shard("about"),
    "metadata that is a list": shard([]),
    "metadata that is null": shard("null"),
    "metadata that is deep": shard("[" * 100_000),
    "norms of text": shard({**ABOUT, "norms": ["a"] * 5}),
    "norms of nothing": shard({**ABOUT, "norms": []}),
    "norms of null": shard({**ABOUT, "norms": None}),
    "norms of NaN": shard({**ABOUT, "norms": [float("nan")] * 5}),
    "linearity of an object": shard({**ABOUT, "linearity": {}}),
    "linearity of text": shard({**ABOUT, "linearity": "high"}),
    "drift of text": shard({**ABOUT, "drift": "far"}),
    "drift of infinity": shard({**ABOUT, "drift": float("inf")}),
    "tensors of NaN": Attack(finished({"imprint": json.dumps(ABOUT)}, put(float("nan"))), WRITE, forged=True),
    "tensors of 1e38": Attack(finished({"imprint": json.dumps(ABOUT)}, put(1e38)), WRITE, forged=True),
    "a tensor less": Attack(
        finished({"imprint": json.dumps(ABOUT)}, lambda t: dict(list(t.items())[1:])), WRITE, forged=True
    ),
    "a row less": Attack(
        finished({"imprint": json.dumps(ABOUT)}, lambda t: {k: v[1:] for k, v in t.items()}), WRITE, forged=True
    ),
    "another precision": Attack(
        finished({"imprint": json.dumps(ABOUT)}, lambda t: {k: v.half() for k, v in t.items()}), WRITE, forged=True
    ),
    "no tensors": Attack(finished({"imprint": json.dumps(ABOUT)}, lambda t: {}), WRITE, forged=True),
}


@pytest.mark.parametrize("attack", SHARDS.values(), ids=SHARDS.keys())
def test_a_forged_shard_of_an_unfinished_store_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)


# --- snapshots


def snapshot(
    step: Any = 1, start: Any = 0, change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
) -> Attack:
    """A snapshot in the middle of the first chunk, with a checksum that is right."""

    def plant(scene: Scene) -> None:
        base = scene.tensors(scene.manifest["checkpoints"][0]["base"]["path"])
        emptied(scene)
        names = {name: tensor for name, tensor in base.items() if name != "shift"}
        tensors = {"pull": torch.ones(10)}
        for name, tensor in names.items():
            tensors |= {f"base/{name}": tensor, f"rows/{name}": torch.stack([tensor] * 10)}
        tensors = {name: tensor.contiguous() for name, tensor in change(tensors).items()}
        checksum = hashlib.sha256(f"{step} {start} {of_tensors(tensors)}".encode()).hexdigest()
        (scene.gift / "checkpoint-000").mkdir()
        about = {"imprint": json.dumps({"step": step, "start": start, "sha256": checksum})}
        save_file(tensors, scene.gift / "checkpoint-000" / "snapshot.safetensors", about)

    return Attack(plant, WRITE, forged=True)


SNAPSHOTS = {
    "of a step that was not made": snapshot(step=10**12),
    "of a negative step": snapshot(step=-1),
    "of a step of text": snapshot(step="1"),
    "of a step of null": snapshot(step=None),
    "of a fraction of a step": snapshot(step=0.5),
    "of a start of text": snapshot(start="0"),
    "without its pull": snapshot(change=lambda t: {k: v for k, v in t.items() if k != "pull"}),
    "without its base": snapshot(change=lambda t: {k: v for k, v in t.items() if not k.startswith("base/")}),
    "without its rows": snapshot(change=lambda t: {k: v for k, v in t.items() if not k.startswith("rows/")}),
    "without a row's tensor": snapshot(change=lambda t: {k: v for k, v in t.items() if k != "rows/first.bias"}),
    "of five rows": snapshot(change=lambda t: {k: v[:5] if k.startswith("rows/") else v for k, v in t.items()}),
    "of rows of another shape": snapshot(
        change=lambda t: {k: v.flatten(1)[:, :1] if k.startswith("rows/") else v for k, v in t.items()}
    ),
    "of NaN": snapshot(change=lambda t: {k: v * float("nan") for k, v in t.items()}),
    "of infinity": snapshot(change=lambda t: {k: v / 0 for k, v in t.items()}),
    "of whole numbers": snapshot(change=lambda t: {k: v.long() for k, v in t.items()}),
    "of double precision": snapshot(change=lambda t: {k: v.double() for k, v in t.items()}),
    "of single numbers": snapshot(change=lambda t: {k: v.flatten()[0] for k, v in t.items()}),
    "with a tensor more": snapshot(
        change=lambda t: {**t, "rows/extra": torch.ones(10, 3), "base/extra": torch.ones(3)}
    ),
}


@pytest.mark.parametrize("attack", SNAPSHOTS.values(), ids=SNAPSHOTS.keys())
def test_a_forged_snapshot_harms_nothing(attack: Attack, bases: Bases, tmp_path: Path) -> None:
    assert not attacked(attack, bases, tmp_path)
