"""Snapshots: when they are kept, and when they are gone on from."""

from pathlib import Path

import pytest
import torch

from imprint import StoreError
from imprint.simulation import snapshot
from tests.simulation.killing import PLANS, Made, contents, run

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(step: int = 1, rows: int = 3) -> snapshot.PathState:
    return snapshot.PathState(step, {"w": torch.ones(2)}, {"w": torch.ones(rows, 2)}, torch.ones(rows), {}, {})


def test_a_snapshot_that_cannot_be_kept_does_not_stop_the_run(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_space(*arguments: object) -> None:
        raise StoreError("could not write: No space left on device")

    monkeypatch.setattr(snapshot, "write_tensors", no_space)
    store = run(tmp_path / "store", PLANS["tangent"])
    assert contents(store.path) == contents(made(PLANS["tangent"]))
    assert "no snapshot could be saved, the simulation continues without it: could not write" in caplog.text
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(("takes", "pause"), [(1.0, 60.0), (3.0, 60.0), (6.0, 120.0), (30.0, 600.0)])
def test_snapshots_are_kept_more_seldom_where_they_take_long(
    takes: float, pause: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, written = Clock(), []

    def slow(*arguments: object) -> None:
        written.append(clock.now)
        clock.now += takes

    monkeypatch.setattr(snapshot, "write_tensors", slow)
    monkeypatch.setattr(snapshot, "SECONDS", 60.0)
    kept = snapshot.Snapshot(tmp_path / "snapshot.safetensors", 0, clock)
    while len(written) < 3:
        clock.now += 1.0
        kept.keep(state())
    assert written[0] == 60.0
    assert written[2] - written[1] == pause + takes


def test_a_snapshot_of_other_rows_is_not_gone_on_from(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.safetensors"
    snapshot.Snapshot(path, 4).keep(state())
    assert snapshot.Snapshot(path, 4).restore(state(0), 9) is not None
    assert snapshot.Snapshot(path, 4).restore(state(0, rows=2), 9) is None
    assert snapshot.Snapshot(path, 5).restore(state(0), 9) is None


def test_a_snapshot_goes_with_the_chunk_that_used_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.safetensors"
    snapshot.Snapshot(path, 4).keep(state())
    snapshot.Snapshot(path, 4).clear()
    assert path.is_file()
    used = snapshot.Snapshot(path, 4)
    used.restore(state(0), 9)
    used.clear()
    assert not path.exists()
