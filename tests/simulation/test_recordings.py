"""A recording is repeated from the recorder, from what it returns and from its folder, with the same result."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from imprint import DataError, Plan, Reader, Recording, RunRecorder, StoreError, Task, attribute, check, simulate
from tests.simulation.killing import contents
from tests.simulation.recordings import record
from tests.simulation.removals import SOURCES, make_data, make_model, make_task


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = record(tmp_path_factory.mktemp("recorded") / "train")
    run.finish()
    return run.folder


def test_recorder_recording_and_folder_are_the_same_run(folder: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"recorder": record(tmp_path / "train"), "recording": Recording(folder), "folder": folder}
    found = []
    for name, run in given.items():
        store = simulate(make_task(), make_data(), SOURCES, run=run, out=tmp_path / name, progress=False)
        found.append({path: text for path, text in contents(store.path).items() if path.endswith(".safetensors")})
        assert store.question == "this_run" and store.manifest.request.recording == Recording(folder).sha256
    assert found[0] == found[1] == found[2]


def test_the_removal_is_that_of_a_training_without_the_source(folder: Path) -> None:
    """Batch norm leaves a source out of the batch, and the normaliser is kept."""
    store = simulate(make_task(), make_data(), SOURCES, run=folder, progress=False)
    assert list(store.manifest.request.buffers) == ["1.running_mean", "1.running_var"]
    run, (x, y) = Recording(folder), make_data()
    effects = []
    everyone: list[list[int]] = [[], *(members.tolist() for members in SOURCES.members)]
    for members in everyone:
        model = make_model()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
        model.train()
        for step in run.steps:
            (batch,) = step.batches
            kept = [index for index in batch.examples if index not in members]
            optimiser.zero_grad()
            (nn.functional.cross_entropy(model(x[kept]), y[kept], reduction="sum") / batch.normaliser).backward()
            optimiser.step()
        with torch.no_grad():
            effects.append(nn.functional.cross_entropy(model.eval()(x), y, reduction="none"))
    expected = torch.stack([effect - effects[0] for effect in effects[1:]], 1)
    found = attribute(make_task(), store, make_data(), progress=False)
    torch.testing.assert_close(torch.as_tensor(found.removal_effect), expected, rtol=1e-8, atol=1e-10)
    noise = Reader(make_task(), store).noise_changes(make_data())
    assert noise is not None and bool((noise != 0).all())


def test_the_trained_model_itself_serves_as_the_task(folder: Path) -> None:
    """The end is taken from the recording, whatever the model holds by now."""
    trained = make_model()
    trained.load_state_dict(Recording(folder).state(6))
    ours = simulate(make_task(trained), make_data(), SOURCES, run=folder, progress=False)
    theirs = simulate(make_task(), make_data(), SOURCES, run=folder, progress=False)
    for name, tensor in ours.base(0, torch.device("cpu")).items():
        assert torch.equal(tensor, theirs.base(0, torch.device("cpu"))[name])


def test_what_does_not_fit_the_recording_is_refused(folder: Path, tmp_path: Path) -> None:
    x, y = make_data()
    with pytest.raises(DataError, match="the run was recorded with other training data"):
        simulate(make_task(), (x + 1, y), SOURCES, run=folder, progress=False)
    record(tmp_path / "unfinished").close()
    with pytest.raises(StoreError, match="is the recording of an unfinished run"):
        simulate(make_task(), make_data(), SOURCES, run=tmp_path / "unfinished", progress=False)


def test_a_recording_is_checked(folder: Path) -> None:
    found = check(make_task(), make_data(), SOURCES, run=folder)
    assert found.ok, found.problems
    assert found.plan.rules.question == "this_run" and found.estimate is not None


def test_its_checkpoints_serve_other_engines(folder: Path) -> None:
    paths = Recording(folder).paths
    store = simulate(make_task(), make_data(), SOURCES, Plan(steps=1, lr=0.1), checkpoints=paths, progress=False)
    assert len(store.checkpoints) == 2 and store.question == "expected"


def test_a_fine_tune_of_the_head_has_rows_of_the_head_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(False)
    x, y = make_data()
    run = RunRecorder(tmp_path / "train", model, torch.optim.AdamW(model[2].parameters(), lr=0.05))
    for indices in run.batches(len(x), 8, epochs=2):
        with run.step(indices) as step:
            step.backward(nn.functional.cross_entropy(model(x[indices]), y[indices]))
            run.optimiser.step()
    task = Task.classifier(copy.deepcopy(model))
    store = simulate(task, make_data(), SOURCES, run=run, progress=False)
    assert set(store.manifest.request.displaced) == {"2.weight", "2.bias"}
    assert attribute(task, store, make_data(), progress=False).question == "this_run"
    auto = simulate(task, make_data(), SOURCES, "auto", run=run, progress=False)
    assert auto.question == "this_run"
