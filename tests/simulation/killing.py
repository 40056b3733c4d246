"""Simulations that die, of every kind of plan, and what they leave."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Part, Plan, Sources, Store, Task, simulate, simulate_part
from imprint.runtime.progress import Advance

N, STEPS = 24, 6
DIRECTIONS = 10
PATHS = {
    "tangent": Plan(steps=STEPS, lr=0.2),
    "automatic step": Plan(steps=STEPS),
    "mini-batches": Plan(steps=STEPS, lr=0.2, batch_size=7, source_sample=3),
    "two-sided": Plan(engine="trajectories", steps=STEPS, lr=0.2, keep_pair=True),
    "one-sided mini-batches": Plan(engine="trajectories", variant="one_sided", steps=STEPS, lr=0.2, batch_size=7),
    "automatic epsilon": Plan(engine="trajectories", epsilon="auto", steps=STEPS, lr=0.2),
}
PLANS = {
    **PATHS,
    "spectral": Plan(engine="spectral", steps=STEPS, lr=0.2, directions=DIRECTIONS),
    "spectral, projected": Plan(
        engine="spectral", steps="infinite", damping=0.1, directions=DIRECTIONS, form="projected"
    ),
    "spectral in full": Plan(engine="spectral", steps="infinite", damping=0.1, directions=DIRECTIONS, form="dense"),
    "spectral, complete": Plan(engine="spectral", curvature="hessian", steps=STEPS, directions=1000),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


class Killed(BaseException):
    """Stands for whatever ends a process."""


def dies_after(steps: int, how: type[BaseException] = Killed) -> Advance:
    """Progress that ends the run it is told of, at the call after so many."""
    calls = iter(range(steps))

    def die(done: int, total: int, /) -> None:
        if next(calls, None) is None:
            raise how

    return die


def die_until_done(attempt: Callable[[Advance], object], longest: int) -> None:
    """Make the same attempt again and again, each time killed before so many steps, until one comes to its end."""
    draw = random.Random(0)
    for _ in range(100):
        try:
            attempt(dies_after(draw.randrange(1, longest)))
            return
        except Killed:
            continue


def kill_before_change(changes: int) -> None:
    """Have this process killed before the change of the file system after so many."""
    left = iter(range(changes))

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **options: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*given, **options)

        return counting

    for owner, names in {
        Path: ("rename", "replace", "unlink", "rmdir", "mkdir"),
        os: ("link", "fsync"),
        shutil: ("rmtree",),
    }.items():
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))


def dies_at(share: float) -> Advance:
    """The same, once so much of the work is done."""

    def die(done: int, total: int, /) -> None:
        if done >= share * total:
            raise Killed

    return die


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def run(out: Path, plan: Plan, **changes: Any) -> Store:
    """Two checkpoints, six sources, two at a time: several shards to die between."""
    return simulate(out=out, **_given(plan, changes))


def run_part(out: Path, part: str, plan: Plan, **changes: Any) -> Part:
    """A part of the same."""
    return simulate_part(part, out=out, **_given(plan, changes))


def _given(plan: Plan, changes: dict[str, Any]) -> dict[str, Any]:
    full = "30kB" if plan.engine == "tangent" else "56kB"
    room = "600B" if plan.engine == "spectral" else "12kB" if plan.batch_size else full
    groups = Sources.by_label([i % 6 for i in range(N)])
    return {
        **{"task": task(), "data": data(), "plan": plan, "memory": room},  # so that there are several files
        "sources": Sources.per_example(N).rows(0, 6) if plan.engine == "spectral" else groups,
        "checkpoints": [{name: scale * t for name, t in task().state().items()} for scale in (1.0, 0.5)],
        "progress": False,
        **changes,
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store, hidden ones too; of the manifest all but when it was made and what that took."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = json.loads(files["manifest.json"])
    del manifest["created"], manifest["cost"], manifest["sha256"]
    return {**files, "manifest.json": json.dumps(manifest).encode()}


Made = Callable[[Plan], Path]


def flip(place: Path, position: int) -> None:
    content = bytearray(place.read_bytes())
    content[position] ^= 1
    place.write_bytes(content)
