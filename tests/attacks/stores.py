"""The stores that are attacked, and the ways to tamper with them.

`Scene` is a user's folder with a model and a store that somebody gave them, `gift`; beside it lies a folder `outside`
that nothing may touch. An `Attack` changes the scene; the calls of its `steps` are then made apart (see
`tests.attacks.apart`), and `tests.attacks.judging` says what went wrong.
"""

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from safetensors.torch import load_file, save_file
from torch import Tensor

import imprint
from imprint.store.values import sealed

MODEL = """
import torch
from torch import nn
import imprint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("shift", torch.full((4,), 0.25))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)) + self.shift)


torch.manual_seed(0)
data = (torch.randn(12, 3), torch.arange(12) % 3)
queries = (torch.randn(2, 3), torch.tensor([0, 1]))
groups = {"ann": [0, 1, 2], "bob": [2, 3], "cid": [4, 11], "dot": [5, 6], "eve": [7, 8, 9, 10]}
sources = imprint.Sources.groups(groups) if SOURCES == "groups" else imprint.Sources.per_example(12)
plan = imprint.Plan(**PLAN)
task = imprint.Task.classifier(Net())
checkpoints = [{name: scale * t for name, t in task.state().items()} for scale in (0.5, 0.8, 1.0)]


def train(subset, seed):
    torch.manual_seed(seed)
    model = Net()
    loss = nn.functional.cross_entropy(model(data[0][subset]), data[1][subset])
    with torch.no_grad():
        for p, slope in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
            p -= 0.1 * slope
    return model
"""
PLANS = {
    "dense": ("groups", {"engine": "trajectories", "steps": 2, "lr": 0.1, "keep_pair": True, "weight": (1.0, 0, 2.0)}),
    "factored": ("each", {"engine": "spectral", "steps": 2, "lr": 0.1, "directions": 3, "weight": (1.0, 0, 2.0)}),
}
TASK = ("--task", "model.py:task")


def command(*arguments: str) -> str:
    """A step that is a command line."""
    return f"$ {list(arguments)!r}"


CALLS = ("verify gift", "inspect gift", "attribute gift")
SHOWING = (command("inspect", "gift"), command("attribute", "gift", *TASK, "--out", "scores.csv"))
READ = (*CALLS, *SHOWING)
JSON = (command("inspect", "gift", "--json"), command("attribute", "gift", *TASK, "--json"))
WRITE = ("simulate gift", command("simulate", "model.py:task", "--out", "gift", "--no-check"))
EXPLICIT = ("model.py:task", "--data", "data", "--sources", "sources", "-c", "model.py:checkpoints")
REPEAT = (command("simulate", *EXPLICIT, "--repeat", "gift", "--out", "again", "--no-check"),)


@dataclass
class Scene:
    """A user's folder, with a store in it that is not to be trusted."""

    folder: Path

    @property
    def gift(self) -> Path:
        return self.folder / "gift"

    @property
    def outside(self) -> Path:
        return self.folder.parent / "outside"

    @property
    def canary(self) -> Path:
        """What planted code leaves behind."""
        return self.folder.parent / "canary"

    @property
    def code(self) -> str:
        """Code that tells that it ran, and could pass for what a user's file has."""
        return f"open({str(self.canary)!r}, 'a').write(__name__)\n{MODEL_TEXT[self.folder.name]}\nx = test = task\n"

    @property
    def manifest(self) -> Any:
        return json.loads((self.gift / "manifest.json").read_text())

    def write_manifest(self, values: Any, seal: bool = True) -> None:
        if seal:
            values = sealed({name: value for name, value in values.items() if name != "sha256"})
        (self.gift / "manifest.json").write_text(json.dumps(values))

    def set(self, *path: Any, value: Any, seal: bool = True) -> None:
        """Change one value of the manifest, by default with a checksum that is right again."""
        values = self.manifest
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        self.write_manifest(values, seal)

    def table(self, **columns: Any) -> None:
        """Change columns of the table of sources, and all checksums with it."""
        place = self.gift / "sources.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), **columns}))
        self.recount("sources.json")

    def tensors(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = load_file(self.gift / name)
        return found

    def write_tensors(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write other tensors to a file of the store, and all checksums with it."""
        save_file(tensors, self.gift / name, {"imprint": "{}"})
        self.recount(name)

    def write_bytes(self, name: str, content: bytes) -> None:
        (self.gift / name).write_bytes(content)
        self.recount(name)

    def recount(self, name: str) -> None:
        """Make the manifest say of a file what it now is."""
        values, content = self.manifest, (self.gift / name).read_bytes()
        for file in entries(values):
            if file["path"] == name:
                file |= {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        self.write_manifest(values)


MODEL_TEXT: dict[str, str] = {}
for _name, (_sources, _plan) in PLANS.items():
    MODEL_TEXT[_name] = MODEL.replace("SOURCES", repr(_sources)).replace("PLAN", repr(_plan))


def entries(values: Any) -> Iterator[dict[str, Any]]:
    """Where a JSON document names files of a store."""
    if isinstance(values, dict) and {"path", "sha256", "bytes"} <= values.keys():
        yield values
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    for value in inner:
        yield from entries(value)


def shards(scene: Scene, checkpoint: int = 0, kind: str = "imprints") -> list[str]:
    return [file["path"] for file in scene.manifest["checkpoints"][checkpoint][kind]]


@dataclass(frozen=True)
class Attack:
    """What somebody does to a scene, and the calls that follow.

    forged: everything fits everything else, so that the store could be another one: nothing must run or crash, and
        scores must be finite, but they may be others.
    """

    change: Callable[[Scene], object]
    steps: tuple[str, ...] = READ
    forged: bool = False
    base: str = "dense"
    imports: tuple[str, ...] = ()


class Server:
    """The process that calls are made in."""

    def __init__(self, place: Path) -> None:
        self._report = place / "report.json"
        environment = {**os.environ, "PYTHONPATH": str(Path(imprint.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("apart.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=place,
            env=environment,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        assert self._out.readline() == "ready\n"

    def perform(self, folder: Path, steps: tuple[str, ...]) -> dict[str, Any]:
        self._report.unlink(missing_ok=True)
        request = {"folder": str(folder), "steps": steps, "report": str(self._report)}
        print(json.dumps(request), file=self._in, flush=True)
        report: dict[str, Any] = json.loads(self._out.readline())
        return report

    def stop(self) -> None:
        self._in.close()
        self._process.wait(10)


@dataclass
class Bases:
    """Stores to attack, made once, with what an untouched one gives."""

    place: Path
    server: Server

    def __post_init__(self) -> None:
        self._reports: dict[str, dict[str, dict[str, Any]]] = {}

    def scene(self, base: str, place: Path) -> Scene:
        """A copy to tamper with."""
        if not (self.place / base).exists():
            self._make(base)
        shutil.copytree(self.place / base, place / base)
        (place / "outside" / "folder").mkdir(parents=True)
        for name in ("victim.txt", "folder/base.safetensors", "folder/imprints-00000.safetensors", "folder/.a.tmp"):
            (place / "outside" / name).write_text("years of work")
        return Scene(place / base)

    def untouched(self, base: str, step: str) -> dict[str, Any]:
        """What a call gives on the store as it was made."""
        known: dict[str, dict[str, Any]] = self._reports.setdefault(base, {})
        if step not in known:
            (self.place / "sound").mkdir(exist_ok=True)
            scene = Scene(self.place / "sound" / base)
            if not scene.folder.exists():
                shutil.copytree(self.place / base, scene.folder)
            report = self.server.perform(scene.folder, (step,))
            assert not report["died"], report["died"]
            known[step] = report["steps"][0]
        return known[step]

    def _make(self, base: str) -> None:
        folder = self.place / base
        folder.mkdir()
        (folder / "model.py").write_text(MODEL_TEXT[base])
        self._do(folder, "simulate gift")
        for checkpoint in (0, 2):
            for kind in ("imprints", "midpoints"):
                _split(Scene(folder), checkpoint, kind)
        if base == "dense":
            self._do(folder, command("attribute", "gift", *TASK, "--out", "scores.safetensors"))
            self._do(folder, command("retrain", "model.py:train", "--kind", "sources", "--runs", "2", "--out", "truth"))

    def _do(self, folder: Path, step: str) -> None:
        report = self.server.perform(folder, (step,))
        assert not report["died"] and report["steps"][0]["raised"] is None, report
        assert not report["steps"][0]["code"], report


def _split(scene: Scene, checkpoint: int, kind: str) -> None:
    """Make two shards of one, whatever the library would have chosen."""
    values = scene.manifest
    files = values["checkpoints"][checkpoint][kind]
    if len(files) != 1:
        return
    whole, (first, last) = files[0], files[0]["rows"]
    parts = []
    for number, (start, stop) in enumerate(((first, 2), (2, last))):
        name = whole["path"].replace("00000", f"0000{number}")
        rows = {key: tensor[start:stop].clone() for key, tensor in scene.tensors(whole["path"]).items()}
        parts.append((name, rows, {**whole, "path": name, "rows": [start, stop]}))
    values["checkpoints"][checkpoint][kind] = [about for _, _, about in parts]
    scene.write_manifest(values)
    for name, rows, _ in parts:
        scene.write_tensors(name, rows)


def doubled(text: str, key: str, value: Any) -> str:
    """A JSON object, as text, with a key a second time in front."""
    return "{" + f"{json.dumps(key)}: {json.dumps(value)}, " + text.lstrip()[1:]


def without(values: Any, *path: Any) -> Any:
    """A copy of a JSON document that lacks one value."""
    found = copy.deepcopy(values)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return found


def set_field(path: tuple[Any, ...], value: Any) -> Callable[[Scene], None]:
    """Give one value of the manifest, and seal it."""

    def change(scene: Scene) -> None:
        values = scene.manifest
        if values.get("note") is None:
            values["note"] = {}
        inner = values
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value
        scene.write_manifest(values)

    return change
