"""A recorded run is replayed from its folder, through the same call as any simulation."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from imprint import DataError, Recording, RunRecorder, Sources, Task, TaskError, attribute, simulate
from tests.recording.runs import N, X, Y
from tests.recording.test_frozen import Adapted
from tests.simulation.engines.trainings import Adapting

SOURCES = Sources.groups({"first": range(8), "second": range(8, 16), "third": range(16, N)})
DATA = (X.double(), Y)


def record(
    folder: Path, model: nn.Module, without: range = range(0), kind: Callable[..., Optimizer] = torch.optim.AdamW
) -> RunRecorder:
    """Train a model with the mean loss of each batch, in which some examples have weight 0."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = kind(trained, lr=0.02)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.1, 12)
    run = RunRecorder(folder, model, optimiser, data=DATA)
    for indices in run.batches(N, 6, epochs=3):
        with run.step(indices) as step:
            run.optimiser.zero_grad()
            losses = nn.functional.cross_entropy(model(DATA[0][indices]), Y[indices], reduction="none")
            kept = torch.tensor([int(index) not in without for index in indices])
            step.backward((losses * kept).sum() / len(indices))
            step.clip_grad_norm_(0.3)
            optimiser.step()
            scheduler.step()
    return run


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).double()


@torch.no_grad()
def measure(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model.eval()(DATA[0]), Y, reduction="none")


@pytest.mark.parametrize(
    ("make", "kind"),
    [(make_model, torch.optim.AdamW), (lambda: Adapted().double(), torch.optim.AdamW), (make_model, Adapting)],
    ids=["dropout", "adapter", "an optimiser that adapts its settings"],
)
def test_a_replay_gives_the_models_that_training_without_each_source_gives(
    make: Callable[[], nn.Module], kind: type[Optimizer], tmp_path: Path
) -> None:
    torch.optim.SGD(
        [torch.zeros(1)]
    )  # from now on torch tells of its steps, also within those of a class of the user's
    model = make()
    run = record(tmp_path / "run", model, kind=kind)
    task = Task.classifier(model)
    store = simulate(task, DATA, SOURCES, run=run, progress=False)
    effects = attribute(task, store, DATA).removal_effect
    base = measure(model)
    for index, members in enumerate(SOURCES.members):
        other = make()
        record(tmp_path / str(index), other, range(int(members[0]), int(members[-1]) + 1), kind).finish()
        actual = measure(other) - base
        torch.testing.assert_close(torch.as_tensor(effects[:, index]), actual, rtol=1e-8, atol=1e-12)


def test_other_data_and_other_frozen_parameters_are_refused(tmp_path: Path) -> None:
    model = Adapted().double()
    recording = record(tmp_path / "run", model).finish()
    with pytest.raises(DataError, match="recorded with other training data"):
        simulate(Task.classifier(model), (DATA[0] + 1, Y), SOURCES, run=recording, progress=False)
    model.base.weight.data += 1
    with pytest.raises(TaskError, match="other values of the 2 frozen parameters"):
        simulate(Task.classifier(model), DATA, SOURCES, run=Recording(tmp_path / "run"), progress=False)
