"""Simulations that were killed before their end, made of finished stores: to be resumed, with whatever was planted."""

import hashlib
import json
import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from imprint.store.values import sealed
from tests.attacks.stores import Scene


def journal(**changes: Any) -> Callable[[Scene], None]:
    """A simulation that was killed before its end, with a journal that says something else."""

    def change(scene: Scene) -> None:
        values = scene.manifest
        checkpoints: list[Any] = [
            {**checkpoint, "base": None, "imprints": [], "midpoints": [], "basis": None}
            for checkpoint in values["checkpoints"]
        ]
        checkpoints[1] = None
        found = {"schema": values["schema"], "request": values["request"], "checkpoints": checkpoints, **changes}
        (scene.gift / "manifest.json").unlink()
        (scene.gift / "unfinished.json").write_text(json.dumps(sealed(found)))

    return change


def line(about: dict[str, Any]) -> str:
    """One line of the list of finished files."""
    text = json.dumps(about)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]} {text}\n"


def listed(name: str) -> Callable[[Scene], None]:
    """A list of finished files that has one which is not what it says: such a file is made again."""

    def change(scene: Scene) -> None:
        journal()(scene)
        about = {"path": name, "sha256": "0" * 64, "bytes": 1, "rows": None}
        (scene.gift / "unfinished.files").write_text(line(about))

    return change


def finished(
    metadata: dict[str, str] | None, change: Callable[[Any], Any] = lambda tensors: tensors
) -> Callable[[Scene], None]:
    """A list with all files of the first checkpoint, its shard with other metadata or tensors."""

    def plant(scene: Scene) -> None:
        first, found = scene.manifest["checkpoints"][0], []
        for kind in ("midpoints", "imprints"):
            parts = [scene.tensors(file["path"]) for file in first[kind]]
            tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            place = scene.gift / first[kind][0]["path"]
            save_file(change(tensors) if kind == "imprints" else tensors, place, metadata)
            found.append({**first[kind][0], "rows": [0, first[kind][-1]["rows"][1]]})
        journal()(scene)
        shutil.rmtree(scene.gift / "checkpoint-002")
        for about in (first["base"], *found):
            content = (scene.gift / about["path"]).read_bytes()
            about |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            with (scene.gift / "unfinished.files").open("a") as file:
                file.write(line(about))

    return plant
