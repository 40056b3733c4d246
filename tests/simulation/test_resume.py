"""A simulation may die at any moment: the same call goes on where it stood, and ends in the very same store."""

import logging
import os
from pathlib import Path

import pytest
import torch

from imprint import Plan, StoreError
from imprint.runtime.progress import Progress
from tests.simulation.killing import (
    PATHS,
    PLANS,
    STEPS,
    Killed,
    Made,
    contents,
    die_until_done,
    dies_after,
    dies_at,
    every_plan,
    run,
)

pytestmark = pytest.mark.usefixtures("snapshots_at_every_step")


@every_plan
def test_a_run_that_dies_again_and_again_ends_in_the_same_store(plan: Plan, made: Made, tmp_path: Path) -> None:
    expected = contents(made(plan))
    assert sum("imprints-" in name for name in expected) > 3  # there is something to die between
    longest = 60 if plan.engine == "spectral" else 18
    die_until_done(lambda progress: run(tmp_path / "broken", plan, progress=progress), longest)
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


def test_a_finished_store_is_returned_as_it_is(finished: Path, tmp_path: Path) -> None:
    before = (finished / "manifest.json").read_bytes()
    calls: list[int] = []
    again = run(tmp_path / "store", PLANS["tangent"], progress=lambda done, total: calls.append(done))
    assert (again.path / "manifest.json").read_bytes() == before
    assert not calls


def test_a_second_process_is_told_and_changes_nothing(made: Made, tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=f"another process .*{os.getpid()}.* is writing") as error:
                run(tmp_path / "store", PLANS["tangent"])
            refused.append(str(error.value))

    store = run(tmp_path / "store", PLANS["tangent"], progress=intrude)
    assert refused
    assert contents(store.path) == contents(made(PLANS["tangent"]))


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(STEPS, KeyboardInterrupt))
    assert "the same call again resumes" in caplog.text


def test_an_interruption_that_torch_has_made_an_error_of_is_one_again(tmp_path: Path) -> None:
    """As its interpreter of derivatives words it."""
    words = "The following operation failed in the TorchScript interpreter.\nRuntimeError: KeyboardInterrupt: <EMPTY>\n"

    def interrupt(done: int, total: int) -> None:
        raise RuntimeError(words)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "store", PLANS["tangent"], progress=interrupt)
    assert (tmp_path / "store" / "unfinished.json").is_file()


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        *(pytest.param(plan, 0.25, id=f"{name}, with a snapshot") for name, plan in PATHS.items()),
        pytest.param(PATHS["tangent"], 0.65, id="tangent, with a shard"),
    ],
)
def test_a_run_goes_on_with_less_memory(
    plan: Plan, share: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fewer sources at once, in the same files; and again with as much as before."""
    whole = run(tmp_path / "whole", plan, memory="1GB")
    with pytest.raises(Killed):
        run(tmp_path / "store", plan, memory="1GB", progress=dies_at(share))
    assert "sources at once" not in caplog.text
    with pytest.raises(Killed):
        run(tmp_path / "store", plan, memory="1kB", progress=dies_at(share + 0.15))
    assert "simulating 1 source at once instead of 6, to respect memory=1kB" in caplog.text
    store = run(tmp_path / "store", plan, memory="1kB")
    assert store.checkpoints[0].choices.rows_at_once == 6
    store.verify()
    for index in range(2):
        one, other = (s.imprints(index, 0, 6, torch.device("cpu")) for s in (whole, store))
        for name, tensor in one.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-4 * float(tensor.abs().max()))
        found, expected = (vars(s.checkpoints[index].measured) for s in (store, whole))
        assert [name for name in found if found[name] is None] == [name for name in expected if expected[name] is None]


def test_the_rate_after_a_resume_is_that_of_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Killed):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(STEPS + 3))
    skipped: list[int] = []
    original = Progress.skip

    def counted(self: Progress, count: int) -> None:
        skipped.append(count)
        original(self, count)

    monkeypatch.setattr(Progress, "skip", counted)
    done: list[int] = []
    store = run(tmp_path / "store", PLANS["tangent"], progress=lambda now, total: done.append(now))
    shard = store.checkpoints[0].choices.rows_at_once * STEPS
    assert skipped[0] == shard and 0 < skipped[1] < shard
    assert done[:2] == [skipped[0], sum(skipped[:2])]


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit, Killed])
def test_whatever_ends_a_process_leaves_the_choice_of_steps(
    how: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imprint.simulation.snapshot.SECONDS", 60.0)  # no other work is kept
    with pytest.raises(how):
        run(tmp_path / "store", PLANS["tangent"], progress=dies_after(1, how))
    assert (tmp_path / "store" / "unfinished.json").exists()


@every_plan
def test_progress_ends_with_all_of_it(plan: Plan, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    run(tmp_path / "store", plan, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1]
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_hidden_files_would_be_noticed(finished: Path) -> None:
    before = contents(finished)
    (finished / "checkpoint-000" / ".left").touch()
    assert contents(finished) != before
