"""A training that is interrupted at any moment resumes, and its recording is the one it would have been."""

import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from imprint import Recording, RunRecorder, StoreError
from imprint.store.folder import write_sealed
from tests.recording.runs import N, assert_same, contents, make_adamw, make_model, train

EPOCHS = 6  # of four steps


def finish_resumed(folder: Path) -> Recording:
    """Resume a training with a fresh process's model, and finish it."""
    return train(folder, model=make_model(9), epochs=EPOCHS, resume=True)[1].finish()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, epochs=EPOCHS, every=5)[1].finish()
    return folder


@pytest.mark.parametrize("stop", [1, 5, 6, 13, 23])
def test_a_resumed_training_gives_the_same_recording_bit_for_bit(stop: int, whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=EPOCHS, every=5, stop=stop)
    with pytest.raises(StoreError, match="is the recording of an unfinished run: resume the training"):
        Recording(tmp_path / "run")
    resumed = finish_resumed(tmp_path / "run")
    assert contents(tmp_path / "run") == contents(whole)
    assert resumed.sha256 == Recording(whole).sha256


def test_chosen_checkpoints_are_those_of_a_run_that_was_never_interrupted(tmp_path: Path) -> None:
    train(tmp_path / "whole", epochs=23)[1].finish()
    for stop in (15, 84):
        train(tmp_path / "run", epochs=23, stop=stop, resume=True)
    train(tmp_path / "run", epochs=23, resume=True)[1].finish()
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_resuming_loads_the_latest_checkpoint(tmp_path: Path) -> None:
    model, _ = train(tmp_path / "run", epochs=EPOCHS, every=4, stop=8)
    other = make_model(9)
    optimiser = make_adamw(other)
    run = RunRecorder(tmp_path / "run", other, optimiser)
    with pytest.raises(StoreError, match=r"unfinished recording of 8 steps: call run\.resume\(\)"):
        run.step([0, 1])
    with pytest.raises(StoreError, match="unfinished recording of 8 steps"):
        run.batches(N, 6)
    assert run.resume() == 4  # the checkpoint of step 8 would have been written with the next step
    assert run.steps == 4
    assert optimiser.param_groups[0]["lr"] < 0.05
    assert optimiser.state[other.get_parameter("0.weight")]["step"] == 4
    assert not torch.equal(other.get_parameter("0.weight"), model.get_parameter("0.weight"))
    with pytest.raises(StoreError, match=r"resume\(\) comes before the first step\..* make a new RunRecorder"):
        run.resume()


def test_there_is_nothing_to_resume_in_a_new_folder(tmp_path: Path) -> None:
    model = make_model()
    run = RunRecorder(tmp_path / "run", model, make_adamw(model), step=0)
    assert run.resume() == 0


def test_checkpoints_of_the_users_own_resume_without_losing_a_step(whole: Path, tmp_path: Path) -> None:
    """Between two checkpoints of the recording, from a state that the user has kept."""
    for stop in (8, 11):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        model, _ = train(tmp_path / "run", epochs=EPOCHS, every=5, stop=stop)
        with pytest.raises(StoreError, match=f"has {stop} steps of the run, where 12 are needed: steps {stop + 1} "):
            RunRecorder(tmp_path / "run", model, make_adamw(model), step=12)
        run = RunRecorder(tmp_path / "run", model, make_adamw(model), step=8)
        assert run.steps == 8
        indices = next(run.batches(N, 6, epochs=EPOCHS))
        expected = Recording(whole).steps[8].batches[0].examples
        assert tuple(indices.tolist()) == expected
        run.close()
        assert len(list((tmp_path / "run").glob("checkpoint-*[0-9].safetensors"))) == 2
    with pytest.raises(StoreError, match="has no recording: steps 1 to 3 are missing"):
        RunRecorder(tmp_path / "new", model, make_adamw(model), step=3)


def test_a_checkpoint_that_the_user_forgot_to_load_is_noticed(tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=EPOCHS, every=5, stop=8)
    model = make_model(9)
    run = RunRecorder(tmp_path / "run", model, make_adamw(model), step=5)
    with pytest.raises(StoreError, match=r"whose model had another '0\.weight' after 5 steps: load your checkpoint"):
        run.step([0, 1])


def test_another_model_optimiser_seed_or_data_do_not_resume(tmp_path: Path) -> None:
    model, _ = train(tmp_path / "run", data=(torch.arange(N), torch.arange(N)), stop=3)
    smaller = torch.nn.Sequential(*list(make_model())[2:])
    for given, optimiser, options, message in (
        (model, torch.optim.SGD(model.parameters(), lr=0.1), {}, r"the optimiser is torch\.optim\.AdamW, not torch"),
        (model, make_adamw(model), {"seed": 1}, "the seed is 0, not 1"),
        (model, make_adamw(model), {"n": 5}, "the number of training examples is 24, not 5"),
        (model, make_adamw(model), {"data": (torch.arange(N), torch.ones(N))}, "with other data"),
        (smaller, make_adamw(smaller), {}, "with other trained parameters"),
    ):
        with pytest.raises(StoreError, match=message):
            RunRecorder(tmp_path / "run", given, optimiser, **options)


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_files_that_were_cut_short_resume_or_say_what_is_missing(cut: int, whole: Path, tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=EPOCHS, every=5, stop=8)
    steps = tmp_path / "run" / "steps.jsonl"
    kept = steps.read_bytes()
    steps.write_bytes(kept[: len(kept) * cut // 60])
    complete = steps.read_bytes().count(b"\n")
    if complete >= 5:
        finish_resumed(tmp_path / "run")
        assert contents(tmp_path / "run") == contents(whole)
    else:
        with pytest.raises(StoreError, match=f"it has {complete} steps, and there is a checkpoint of step 5"):
            finish_resumed(tmp_path / "run")


def test_a_checkpoint_that_was_damaged_does_not_resume(tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=EPOCHS, every=5, stop=8)
    place = tmp_path / "run" / "checkpoint-000005.optimiser.safetensors"
    place.write_bytes(place.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"checkpoint-000005\.optimiser\.safetensors is damaged: it has"):
        finish_resumed(tmp_path / "run")


def test_a_step_that_fails_is_not_recorded_and_the_training_resumes(whole: Path, tmp_path: Path) -> None:
    model = make_model()
    optimiser = make_adamw(model)
    run = RunRecorder(tmp_path / "run", model, optimiser, n=N)

    def fail() -> None:
        with run, run.step([0, 1, 2]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert run.steps == 0
    train(tmp_path / "run", epochs=EPOCHS, resume=True)[1].finish()  # the lock was released
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == (whole / "steps.jsonl").read_bytes()


def test_a_resumed_run_adds_up_the_time_it_took(tmp_path: Path) -> None:
    train(tmp_path / "run", epochs=EPOCHS, every=5, stop=8)
    run = RunRecorder(tmp_path / "run", model := make_model(), make_adamw(model))
    before = run._files.require_header()
    run.close()
    write_sealed(tmp_path / "run" / "recording.json", {**asdict(before), "seconds": 1000.0})
    assert 1000 < finish_resumed(tmp_path / "run").seconds < 1100


KILLABLE = """
import sys
from pathlib import Path
import torch
from tests.recording.runs import make_model, train
folder, threads = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(threads)  # bits depend on it
print(flush=True)
run = train(folder, model=make_model(9 if (folder / "recording.json").exists() else 0), epochs=120, resume=True)[1]
run.finish()
"""


@pytest.mark.system
def test_a_training_killed_at_random_moments_ends_in_the_same_recording(tmp_path: Path) -> None:
    model, run = train(tmp_path / "whole", epochs=120)
    run.finish()
    draw = random.Random(0)
    for attempt in range(20):
        command = [sys.executable, "-c", KILLABLE, str(tmp_path / "run"), str(torch.get_num_threads())]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stdout is not None
        process.stdout.readline()  # imports are done: what follows is the training
        if attempt < 3:
            time.sleep(draw.uniform(0, 1.0))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            break
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")
    assert_same(model, _load(Recording(tmp_path / "run")))


def _load(recording: Recording) -> torch.nn.Module:
    model = make_model(5)
    model.load_state_dict(recording.state(len(recording.steps)))
    return model
