"""Models with batch norm, trained with Adam: predicted removals against retraining, plan by plan.

    OMP_NUM_THREADS=2 python benchmarks/batch_norm.py            # the settings that are reported
    python benchmarks/batch_norm.py --settings develop           # the one on which choices were made

Digits of eight suppliers, one of whom mislabels a third. Each layer before a batch norm has a bias, as an ordinary
model has. The ground truth is the mean over seeds of retraining without each supplier; predicted and actual are means
over queries. Prints correlation and slope (of actual on predicted), the largest prediction, whether the careless
supplier comes out as the least helpful, and the number of warnings.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import imprint

SUPPLIERS = 8


@dataclass(frozen=True)
class Setting:
    """A model, how it is trained, and the split of the digits."""

    make: Callable[[], nn.Module]
    split: int
    lr: float
    examples: int = 300
    epochs: int = 10
    checkpoints: tuple[int, ...] = (1, 3, 10)


def convolutional() -> nn.Module:
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32, 10)),
    )


def perceptron() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()),
        nn.Linear(32, 10),
    )


SETTINGS = {
    "develop": Setting(convolutional, split=100, lr=1e-2),
    "convolutional": Setting(convolutional, split=1, lr=1e-2),
    "perceptron": Setting(perceptron, split=3, lr=3e-3),
    "perceptron, slower": Setting(perceptron, split=4, lr=1e-3),
}


def digits(setting: Setting) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Training data, queries, and who supplied what; supplier 0 has wrong labels."""
    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pictures).float(), torch.from_numpy(labels)
    x = (x - x.mean()) / x.std()
    draw = np.random.default_rng(setting.split)
    order = draw.permutation(len(x))
    chosen, held_out = order[: setting.examples], order[setting.examples : setting.examples + 300]
    owners = draw.integers(0, SUPPLIERS, setting.examples)
    delivered = np.flatnonzero(owners == 0)
    wrong = draw.choice(delivered, len(delivered) // 3, replace=False)
    given = y[chosen].clone()
    given[wrong] = (given[wrong] + torch.from_numpy(draw.integers(1, 10, len(wrong)))) % 10
    return (x[chosen], given), (x[held_out], y[held_out]), torch.from_numpy(owners)


def train(
    setting: Setting, data: tuple[Tensor, Tensor], kept: Tensor, seed: int, folder: str | None = None
) -> tuple[nn.Module, list[str]]:
    """A model trained on some of the examples, and the files of its checkpoints, where they are wanted."""
    torch.manual_seed(seed)
    model = setting.make()
    optimiser = torch.optim.Adam(model.parameters(), lr=setting.lr)
    recorder = imprint.Recorder(folder, at=setting.checkpoints, optimiser=optimiser) if folder else None
    model.train()
    for epoch in range(1, setting.epochs + 1):
        for rows in kept[torch.randperm(len(kept))].split(32):
            if len(rows) < 2:
                continue
            optimiser.zero_grad()
            F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
            optimiser.step()
        if recorder:
            recorder(model, epoch)
    return model.eval(), [str(path) for path in recorder.paths] if recorder else []


def removals(setting: Setting, seeds: int) -> Tensor:
    """The change of the mean loss over queries when each supplier is left out, mean over seeds, and its error."""
    data, queries, owners = digits(setting)

    def losses(model: nn.Module) -> Tensor:
        with torch.no_grad():
            return F.cross_entropy(model(queries[0]), queries[1])

    found = []
    for seed in range(seeds):
        whole = losses(train(setting, data, torch.arange(len(owners)), seed)[0])
        without = [losses(train(setting, data, (owners != b).nonzero()[:, 0], seed)[0]) for b in range(SUPPLIERS)]
        found.append(torch.stack(without) - whole)
    return torch.stack(found)


PLANS: dict[str, imprint.Plan | Literal["auto"]] = {
    "Plan(steps=60)": imprint.Plan(steps=60),
    '"auto"': "auto",
    "Plan(steps=60, preconditioner='adam')": imprint.Plan(steps=60, preconditioner="adam"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=[name for name in SETTINGS if name != "develop"])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--truth", type=Path, help="Folder that keeps the ground truth for another run.")
    options = parser.parse_args()
    for name in options.settings:
        setting = SETTINGS[name]
        data, queries, owners = digits(setting)
        known = options.truth / f"{name}.pt" if options.truth else None
        actual = torch.load(known) if known and known.exists() else removals(setting, options.seeds)
        if known:
            known.parent.mkdir(parents=True, exist_ok=True)
            torch.save(actual, known)
        mean, error = actual.mean(0), actual.std(0) / len(actual) ** 0.5
        shown = " ".join(f"{v:+.3f}±{e:.3f}" for v, e in zip(mean.tolist(), error.tolist(), strict=True))
        print(f"\n{name}: actual {shown}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            model, paths = train(setting, data, torch.arange(len(owners)), 0, folder)
            task = imprint.Task.classifier(model)
            for label, plan in PLANS.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    sources = imprint.Sources.by_label(owners)
                    try:
                        store = imprint.simulate(task, data, sources, plan, checkpoints=paths, progress=False)
                    except imprint.ImprintError as problem:
                        print(f"  {label:38} refused: {problem}", flush=True)
                        continue
                    result = imprint.attribute(task, store, queries, progress=False)
                predicted = result.removal_effect.mean(0).float()
                correlation = float(np.corrcoef(predicted, mean)[0, 1])
                slope = float(np.polyfit(predicted, mean, 1)[0])
                lowest = "yes" if int(predicted.argmin()) == 0 else "NO"
                print(
                    f"  {label:38} correlation {correlation:+.2f}  slope {slope:8.4f}  largest "
                    f"{float(predicted.abs().max()):9.3g}  of a query {float(result.removal_effect.abs().max()):9.3g}  "
                    f"careless lowest {lowest}  warnings {len(getattr(result, 'warnings', ()))}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
