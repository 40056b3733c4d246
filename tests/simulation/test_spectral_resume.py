"""The spectral engine, which measures the curvature first and then takes the sources, goes on where it stood."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from imprint import Plan, Store
from imprint.store import finished as listing
from imprint.store.files import append
from tests.simulation.killing import PLANS, Killed, Made, contents, flip, run

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


SPECTRAL = {name: plan for name, plan in PLANS.items() if plan.engine == "spectral"}
every_spectral_plan = pytest.mark.parametrize("plan", SPECTRAL.values(), ids=SPECTRAL.keys())


def dies_at_file(name: str) -> Callable[..., None]:
    """Ends a run between the renaming of a file and the line about it."""

    def dies(place: Path, line: str) -> None:
        if name in line:
            raise Killed
        append(place, line)

    return dies


@every_spectral_plan
@pytest.mark.parametrize("name", ["base", "basis", "imprints-00000", "imprints-00003", "checkpoint-001/base"])
def test_a_spectral_run_that_dies_at_a_file_ends_in_the_same_store(
    name: str, plan: Plan, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = contents(made(plan))
    name = "scratch" if name == "basis" and plan.form == "dense" else name
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file(name))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    run(tmp_path / "store", plan)
    assert contents(tmp_path / "store") == expected


@every_spectral_plan
def test_curvature_that_was_measured_is_not_measured_again(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("checkpoint-001/imprints-00001"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    monkeypatch.setattr("imprint.simulation.engines.spectral.freeze_curvature", None)
    told: list[tuple[int, int]] = []
    run(tmp_path / "store", plan, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]


@every_spectral_plan
def test_a_damaged_curvature_of_an_unfinished_run_is_made_again(
    plan: Plan, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = contents(made(plan))
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("imprints-00002"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan)
    name = "scratch" if plan.form == "dense" else "basis"
    flip(tmp_path / "store" / "checkpoint-000" / f"{name}.safetensors", -3)
    run(tmp_path / "store", plan)
    assert f"{name}.safetensors is damaged: its shard is simulated again" in caplog.text
    assert contents(tmp_path / "store") == expected


@every_spectral_plan
def test_a_spectral_run_goes_on_with_less_memory(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run(tmp_path / "whole", plan, memory="1GB")
    with monkeypatch.context() as patch:
        patch.setattr(listing, "append", dies_at_file("imprints-00000"))
        with pytest.raises(Killed):
            run(tmp_path / "store", plan, memory="1GB")
    store = run(tmp_path / "store", plan, memory="1kB")
    assert "simulating 1 source at once instead of 6, to respect memory=1kB" in caplog.text
    store.verify()
    one, other = (s.imprints(0, 0, 6, torch.device("cpu")) for s in (whole, store))
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))


@every_spectral_plan
def test_a_spectral_store_is_repeated_to_the_bit(plan: Plan, made: Made, tmp_path: Path) -> None:
    store = Store(made(plan))
    again = run(tmp_path / "again", plan, repeat=store, memory="1GB")
    assert again.checkpoints == store.checkpoints
    assert contents(again.path) == contents(store.path)
