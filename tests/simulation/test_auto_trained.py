"""Plans that are chosen for models as people train them, against retraining: batch norm and Adam."""

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import Recorder, Sources, Task, attribute, simulate
from imprint.evaluation import Subsets, Truth, retrain
from imprint.evaluation.metrics import slope

pytestmark = [pytest.mark.curvature, pytest.mark.wide]
SUPPLIERS, CARELESS = 6, 2
Columns = tuple[Tensor, Tensor]


@cache
def deliveries() -> tuple[Columns, Columns, Tensor]:
    """Small pictures of three shapes from six suppliers, one of whom mislabels; queries; who delivered what."""
    draw = torch.Generator().manual_seed(0)
    shapes = torch.randn(3, 1, 6, 6, generator=draw)

    def make(count: int) -> Columns:
        y = torch.randint(0, 3, (count,), generator=draw)
        return shapes[y] + 1.2 * torch.randn(count, 1, 6, 6, generator=draw), y

    (x, y), queries = make(150), make(60)
    owners = torch.randint(0, SUPPLIERS, (150,), generator=draw)
    return (x, torch.where(owners == CARELESS, (y + 1) % 3, y)), queries, owners


def convolutional() -> nn.Module:
    """Convolutions with biases before batch norm, whose second moments are rounding."""
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
    )


def train(kept: Tensor, seed: int, recorder: Path | None = None) -> nn.Module:
    (x, y), _, _ = deliveries()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = convolutional().train()
        optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
        keep = Recorder(recorder, at=(1, 2, 4, 8), optimiser=optimiser) if recorder else None
        for epoch in range(1, 9):
            for rows in kept[torch.randperm(len(kept))].split(25):
                optimiser.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimiser.step()
            if keep:
                keep(model, epoch)
    return model.eval()


def removed(seed: int, task: Task) -> Truth:
    _, queries, owners = deliveries()
    subsets = Subsets.without_each(Sources.by_label(owners), n=len(owners))
    return retrain(train, task, queries, subsets, runs=4, seed=seed, progress=False)


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.filterwarnings("ignore:.*values of")
def test_batch_norm_under_adam_has_the_careless_supplier_last_and_sizes_right(blind: bool, tmp_path: Path) -> None:
    data, queries, owners = deliveries()
    model = train(torch.arange(len(owners)), 0, tmp_path)
    task = Task.classifier(model)
    task = Task(model, loss=task.loss) if blind else task
    paths = sorted(path for path in tmp_path.glob("checkpoint-*.safetensors") if "moments" not in path.name)
    store = simulate(task, data, Sources.by_label(owners), "auto", checkpoints=paths, progress=False)
    assert store.manifest.plan.preconditioner == "adam"
    result = attribute(task, store, queries, progress=False)
    known, other = removed(0, task), removed(50, task)
    predicted, actual = result.removal_effect.mean(0), other.changes.mean((0, 1))
    assert int(predicted.argmin()) == int(actual.argmin()) == CARELESS
    assert float(torch.corrcoef(torch.stack([predicted.double(), actual.double()]))[0, 1]) > 0.8
    assert float(result.removal_effect.abs().max()) < 5  # nats; it was 79 where the step did not suit the path
    assert 0.5 < slope(result.calibrate(known), other).estimate.value < 2
