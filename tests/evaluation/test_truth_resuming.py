"""A truth survives being killed, and grows by more runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from imprint import DataError, StoreError
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.together import Together, Train
from imprint.evaluation.truth import Truth
from imprint.store.files import LOCK
from tests.evaluation.truths import (
    EXTRA,
    HALVES,
    REMOVALS,
    RUNS,
    TRIALS,
    Counting,
    Killed,
    ask,
    contents,
    dies_after,
    every_kind,
    named,
    nudged,
    stubborn,
    together,
    train,
)


@pytest.mark.parametrize("models", [3, 4, 6, 9])
def test_a_loop_that_dies_goes_on_without_training_again_what_is_there(models: int, tmp_path: Path) -> None:
    expected = ask(how=train).values
    with pytest.raises(Killed):
        ask(tmp_path / "truth", Counting(models))
    again = Counting()
    assert torch.equal(ask(tmp_path / "truth", again).values, expected)
    kept = models - EXTRA if models >= TRIALS else 0
    assert again.made == RUNS * len(HALVES) - kept + (1 if kept else EXTRA)
    assert torch.equal(Truth.load(tmp_path / "truth").values, expected)
    finished = Counting()
    assert torch.equal(ask(tmp_path / "truth", finished).values, expected)
    assert finished.made == 1  # to see that it is the same function


def test_training_together_that_dies_again_and_again_ends_in_the_same_truth(tmp_path: Path) -> None:
    expected = ask(tmp_path / "whole").values
    for calls in (1, 4, 6, 100):
        try:
            ask(tmp_path / "broken", progress=dies_after(calls))
        except Killed:
            continue
    assert torch.equal(Truth.load(tmp_path / "broken").values, expected)
    whole, broken = ([path.name for path in contents(tmp_path / name)] for name in ("whole", "broken"))
    assert whole == broken


def test_how_many_were_trained_at_once_is_kept_by_what_goes_on(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path / "truth", progress=dies_after(5))
    assert torch.equal(ask(tmp_path / "truth", together(3)).values, ask(how=together(2)).values)


KILLABLE = """
import sys, torch
from pathlib import Path
from tests.evaluation.truths import ask, train
torch.set_num_threads(1)
def slow(subset, seed):
    print("training", flush=True)
    sys.stdin.readline()
    return train(subset, seed)
ask(Path(sys.argv[1]), slow)
"""


@pytest.mark.system
def test_a_killed_process_leaves_its_models_and_lets_others_in(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLABLE, str(tmp_path / "truth")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent.parent,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    for _ in range(EXTRA + 5):
        assert process.stdout.readline() == "training\n"
        process.stdin.write("\n")
        process.stdin.flush()
    process.stdout.readline()  # it has begun the sixth
    with pytest.raises(StoreError, match=f"another process .*{process.pid}.* is writing"):
        ask(tmp_path / "truth", Counting())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = Counting()

    def slow(subset: Tensor, seed: int) -> nn.Module:
        return again(subset, seed)

    slow.__qualname__ = "slow"
    assert torch.equal(ask(tmp_path / "truth", slow).values, ask(how=train).values)
    assert again.made == RUNS * len(HALVES) - 5 + 1  # to see that it is the same function
    assert {file.suffix for file in contents(tmp_path)} == {".safetensors", ".json"}


def test_a_second_process_is_told_and_changes_nothing(tmp_path: Path) -> None:
    refused: list[str] = []

    def intrude(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(StoreError, match=f"another process .*{os.getpid()}.* is writing") as error:
                ask(tmp_path / "truth")
            refused.append(str(error.value))

    truth = ask(tmp_path / "truth", progress=intrude)
    assert refused
    assert torch.equal(truth.values, ask().values)


def test_a_call_killed_as_it_began_is_begun_anew(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1")
    (tmp_path / ".imprint-0123456789abcdef.tmp").mkdir()
    assert torch.equal(ask(tmp_path).values, ask().values)
    assert not any(path.name.endswith(".tmp") for path in tmp_path.iterdir())


def test_a_list_of_subsets_that_is_missing_is_written_again(tmp_path: Path) -> None:
    expected = ask(tmp_path).values
    (tmp_path / "subsets.safetensors").unlink()
    with pytest.raises(StoreError, match=r"subsets\.safetensors is damaged"):
        Truth.load(tmp_path)
    ask(tmp_path)
    assert torch.equal(Truth.load(tmp_path).values, expected)


# More runs.


@every_kind
@pytest.mark.parametrize("how", [together(), together(3), together(None), train], ids=["two", "three", "all", "loop"])
def test_more_runs_add_to_a_folder_and_fewer_are_read(how: Train | Together, subsets: Subsets, tmp_path: Path) -> None:
    expected = ask(how=how, subsets=subsets, runs=4).values
    for runs in (1, 3, 2, 4, 4):
        truth = ask(tmp_path, how, subsets=subsets, runs=runs)
        torch.testing.assert_close(truth.values, expected[:runs], rtol=1e-10, atol=1e-13)
        assert truth.runs == truth.about["runs"] == runs
    assert torch.equal(Truth.load(tmp_path).values, truth.values)


def test_only_what_is_missing_is_trained_for_more_runs(tmp_path: Path) -> None:
    ask(tmp_path, Counting(), runs=2)
    kept = contents(tmp_path)
    more = Counting()
    ask(tmp_path, more, runs=3)
    assert more.made == len(HALVES) + 1
    assert {path: contents(tmp_path)[path] for path in kept if path.name != "truth.json"} == {
        path: content for path, content in kept.items() if path.name != "truth.json"
    }
    fewer = Counting()
    ask(tmp_path, fewer, runs=1)
    assert fewer.made == 1


def test_models_of_several_missing_runs_train_together(tmp_path: Path) -> None:
    ask(tmp_path, together(7), runs=1)
    ask(tmp_path, together(7), runs=4)
    sizes = [len(load_file(file)["values"]) for file in sorted(tmp_path.glob("values-*"))]
    assert sizes == [5, 7, 7, 1]
    ask(tmp_path / "removals", together(7), runs=2, subsets=REMOVALS)
    assert [len(load_file(file)["values"]) for file in sorted((tmp_path / "removals").glob("values-*"))] == [5, 5]


def test_more_runs_that_are_killed_leave_the_others_and_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few = ask(tmp_path, runs=1)
    with pytest.raises(Killed):
        ask(tmp_path, runs=3, progress=dies_after(6))
    assert torch.equal(Truth.load(tmp_path).values, few.values)
    assert "1 of 3 runs are complete" in caplog.text
    assert torch.equal(ask(tmp_path, runs=1).values, few.values)
    torch.testing.assert_close(ask(tmp_path, runs=3).values, ask(runs=3).values, rtol=1e-10, atol=1e-13)


def test_more_runs_by_another_function_change_nothing(tmp_path: Path) -> None:
    ask(tmp_path, nudged(0.0), runs=1)
    kept = contents(tmp_path)
    with pytest.raises(StoreError, match="of another train"):
        ask(tmp_path, nudged(0.5), runs=2)
    assert contents(tmp_path) == kept


@every_kind
def test_a_second_run_needs_a_function_that_hears_its_seed(subsets: Subsets, tmp_path: Path) -> None:
    ask(tmp_path / "deaf", named(lambda *given: stubborn(*given)), subsets=subsets, runs=1)
    kept = contents(tmp_path)
    with pytest.raises(DataError, match="same model for two seeds"):
        ask(tmp_path / "deaf", named(lambda *given: stubborn(*given)), subsets=subsets, runs=2)
    assert contents(tmp_path) == kept
    ask(tmp_path / "fine", train, subsets=subsets, runs=1)
    told: list[tuple[int, int]] = []
    both = ask(tmp_path / "fine", train, subsets=subsets, progress=lambda *now: told.append(now))
    assert torch.equal(both.values, ask(how=train, subsets=subsets).values)
    assert told[-1][0] == told[-1][1] and all(done <= total for done, total in told)


def test_a_description_that_stays_the_same_is_not_written_again(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        ask(tmp_path, progress=dies_after(5))
    before = (tmp_path / "truth.json").stat()
    ask(tmp_path)
    ask(tmp_path, runs=1)
    after = (tmp_path / "truth.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
