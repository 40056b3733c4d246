"""A simulation may die at any moment: the same call goes on where it stood, and ends in the very same store."""

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Sources, Store, StoreError, Task, attribute, simulate
from imprint.progress import Advance
from imprint.simulation import snapshot

N, STEPS = 24, 12
PLANS = {
    "tangent": Plan(steps=STEPS, lr=0.2),
    "automatic step": Plan(steps=STEPS),
    "mini-batches": Plan(steps=STEPS, lr=0.2, batch_size=7, source_sample=3),
    "two-sided": Plan(engine="trajectories", steps=STEPS, lr=0.2, keep_pair=True),
    "one-sided mini-batches": Plan(engine="trajectories", variant="one_sided", steps=STEPS, lr=0.2, batch_size=7),
    "automatic epsilon": Plan(engine="trajectories", epsilon="auto", steps=STEPS, lr=0.2),
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


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 4, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def run(out: Path, plan: Plan, **changes: Any) -> Store:
    """Two checkpoints, six sources, two at a time: several shards to die between."""
    states = [{name: scale * t for name, t in task().state().items()} for scale in (1.0, 0.5)]
    given = {
        "sources": Sources.by_label([i % 6 for i in range(N)]),
        "checkpoints": states,
        "progress": False,
        **changes,
    }
    return simulate(given.pop("task", task()), given.pop("data", data()), plan=plan, out=out, memory="12kB", **given)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store; of the manifest all but when it was made."""
    files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    manifest = json.loads(files["manifest.json"])
    del manifest["created"]
    return {**files, "manifest.json": json.dumps(manifest).encode()}


@pytest.fixture(autouse=True)
def _snapshots_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "SECONDS", 0.0)


@every_plan
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(plan: Plan, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", plan).path)
    assert sum("imprints-" in name for name in expected) > 3  # there is something to die between
    draw = random.Random(0)
    for _ in range(100):
        try:
            run(tmp_path / "broken", plan, progress=dies_after(draw.randrange(1, 60)))
            break
        except Killed:
            continue
    assert contents(tmp_path / "broken") == expected


def test_a_run_goes_on_from_its_snapshot_and_not_from_the_start(tmp_path: Path) -> None:
    plan = Plan(steps=STEPS, lr=0.2)
    reached: list[int] = []

    def die_late(done: int, total: int) -> None:
        reached.append(done)
        if len(reached) == STEPS - 2:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "store", plan, progress=die_late)
    again: list[int] = []
    run(tmp_path / "store", plan, progress=lambda done, total: again.append(done))
    assert again[0] >= reached[-2]


def test_a_finished_store_is_returned_as_it_is(tmp_path: Path) -> None:
    first = run(tmp_path / "store", PLANS["tangent"])
    before = (first.path / "manifest.json").read_bytes()
    calls: list[int] = []
    again = run(tmp_path / "store", PLANS["tangent"], progress=lambda done, total: calls.append(done))
    assert (again.path / "manifest.json").read_bytes() == before
    assert not calls


def changed_task() -> Task:
    model = task().model
    return Task(
        model, loss=lambda model, batch: 2 * nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    )


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "plan": ({"plan": Plan(steps=STEPS + 1, lr=0.2)}, "the plan's steps was 12, is 13"),
    "loss": ({"task": changed_task()}, r"loss on probe example 0 is .*, was .*: the loss function changed"),
    "data": ({"data": (data()[0] + torch.eye(N, 4), data()[1])}, "the training data changed"),
    "length": (
        {"data": tuple(t[:23] for t in data()), "sources": Sources.groups({"a": [0]})},
        "had 24 examples, has 23",
    ),
    "sources": ({"sources": Sources.by_label([i % 5 for i in range(N)])}, "the sources changed"),
    "weights": ({"checkpoints": [task().state(), task().state()]}, "the weights of checkpoint 1 changed"),
    "checkpoints": ({"checkpoints": [task().state()]}, "there were 2 checkpoints, are 1"),
    "dtype": ({"dtype": torch.bfloat16}, "kept as float32, now as bfloat16"),
}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
@pytest.mark.parametrize(("change", "difference"), CHANGES.values(), ids=CHANGES.keys())
def test_another_request_is_refused_and_the_difference_named(
    change: dict[str, Any], difference: str, finished: bool, tmp_path: Path
) -> None:
    try:
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(10**6 if finished else 20))
    except Killed:
        assert not finished
    kept = {p: p.read_bytes() for p in (tmp_path / "store").rglob("*") if p.is_file()}
    with pytest.raises(StoreError, match=difference):
        run(tmp_path / "store", **{"plan": PLANS["tangent"], **change})
    assert {p: p.read_bytes() for p in (tmp_path / "store").rglob("*") if p.is_file()} == kept


def test_an_unfinished_store_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(30))
    with pytest.raises(StoreError, match="unfinished simulation"):
        Store(tmp_path / "store")


def test_a_store_is_not_read_with_another_loss(tmp_path: Path) -> None:
    store = run(tmp_path / "store", PLANS["tangent"])
    with pytest.raises(StoreError, match=r"loss on probe example 0 is .*, was .*the loss function changed"):
        attribute(changed_task(), store, data(), progress=False)


def test_the_measurement_may_change_freely(tmp_path: Path) -> None:
    store = run(tmp_path / "store", PLANS["tangent"])
    margin = Task.classifier(task().model, measure="margin")
    assert attribute(margin, store, data(), progress=False).scores.isfinite().all()


def test_a_second_process_is_told_and_changes_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=f"another process .*{os.getpid()}.* is writing") as error:
                run(tmp_path / "store", PLANS["tangent"])
            refused.append(str(error.value))

    store = run(tmp_path / "store", PLANS["tangent"], progress=intrude)
    assert refused
    assert contents(store.path) == contents(run(tmp_path / "alone", PLANS["tangent"]).path)


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(40, KeyboardInterrupt))
    assert "the same call again goes on" in caplog.text


def test_a_damaged_shard_of_an_unfinished_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(40))
    shard = next((tmp_path / "store").rglob("imprints-00000.safetensors"))
    shard.write_bytes(shard.read_bytes()[:20])
    with pytest.raises(StoreError, match=r"imprints-00000\.safetensors is damaged"):
        run(tmp_path / "store", PLANS["tangent"])


KILLABLE = """
import sys, torch
from pathlib import Path
from tests.test_resume import PLANS, run
from imprint.simulation import snapshot
torch.set_num_threads(1)
snapshot.SECONDS = 0.0
print("ready", flush=True)
run(Path(sys.argv[1]), PLANS[sys.argv[2]])
"""


def kill_and_resume(folder: Path, plan: str, kills: int, seed: int) -> dict[str, bytes]:
    """Run in processes of their own, killed after random times, until one comes through."""
    draw = random.Random(seed)
    for attempt in range(10 * kills + 10):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLABLE, str(folder), plan],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
        )
        assert process.stdout is not None
        process.stdout.readline()  # imports are done: what follows is the simulation
        if attempt < kills:
            time.sleep(draw.uniform(0, 0.6))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return contents(folder)
    raise AssertionError("the run never came through")


@pytest.mark.parametrize("plan", ["tangent", "two-sided", "one-sided mini-batches"])
def test_a_process_killed_at_random_moments_ends_in_the_same_store(plan: str, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=2, seed=len(plan)) == expected


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("plan", PLANS.keys())
def test_processes_killed_a_hundred_times_end_in_the_same_store(plan: str, seed: int, tmp_path: Path) -> None:
    expected = contents(run(tmp_path / "whole", PLANS[plan]).path)
    assert kill_and_resume(tmp_path / "killed", plan, kills=5, seed=seed) == expected
