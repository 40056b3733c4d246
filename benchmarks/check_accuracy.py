"""How well `imprint check` foretells what a simulation takes, on three different tasks.

    python benchmarks/check_accuracy.py

Checking and simulating each run in a process of their own; time and peak memory are compared as ratios. The tasks: the
demo's perceptron (tangent, automatic step); a convolutional network with batch norm (trajectories on mini-batches); a
transformer encoder with more parameters and sources than fit together (tangent in several chunks).
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

import imprint


@dataclass(frozen=True)
class Case:
    """The arguments of a simulation."""

    task: imprint.Task
    data: tuple[Tensor, Tensor]
    sources: imprint.Sources
    plan: imprint.Plan
    memory: str | None = None


def perceptron() -> Case:
    from imprint.benchmarking.settings import digits

    setting = digits.load(0)
    return Case(digits.task(digits.model()), setting.train, setting.sources, digits.PLAN)


def convolution() -> Case:
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(512, 10)),
    )
    labels = torch.randint(0, 10, (2000,))
    images = torch.randn(10, 1, 16, 16)[labels] + torch.randn(2000, 1, 16, 16)
    plan = imprint.Plan(engine="trajectories", steps=60, lr=0.02, batch_size=128)
    return Case(imprint.Task.classifier(model), (images, labels), by_eights(2000), plan)


def transformer() -> Case:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 64)
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(64, 5)

        def forward(self, tokens: Tensor) -> Tensor:
            read: Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
            return read

    labels = torch.randint(0, 5, (256,))
    tokens = torch.randint(0, 10, (256, 16)) + 10 * labels[:, None]
    plan = imprint.Plan(steps=40, lr=0.05)
    return Case(imprint.Task.classifier(Reader()), (tokens, labels), by_eights(256), plan, memory="2GB")


def by_eights(n: int) -> imprint.Sources:
    return imprint.Sources.by_label([i % 8 for i in range(n)])


CASES = {"perceptron": perceptron, "convolution": convolution, "transformer": transformer}


def child(name: str, phase: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]()
    given = (case.task, case.data, case.sources, case.plan)
    if phase == "check":
        found = imprint.check(*given, memory=case.memory).estimate
        assert found is not None
        print(json.dumps({"seconds": found.seconds, "peak_bytes": found.peak_bytes}))
    else:
        print(json.dumps(asdict(imprint.simulate(*given, memory=case.memory, progress=False).manifest.cost)))


def measured(name: str, phase: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, "--phase", phase]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--phase", choices=("check", "simulate"))
    options = parser.parse_args()
    if options.case:
        child(options.case, options.phase)
        return
    print("task, seconds estimated and taken, ratio; peak MB estimated and taken, ratio")
    for name in CASES:
        expected, taken = measured(name, "check"), measured(name, "simulate")
        seconds, peak = expected["seconds"] / taken["seconds"], expected["peak_bytes"] / taken["peak_bytes"]
        print(
            f"{name:12} {expected['seconds']:6.1f} {taken['seconds']:6.1f} {seconds:5.2f}"
            f"   {expected['peak_bytes'] / 1e6:6.0f} {taken['peak_bytes'] / 1e6:6.0f} {peak:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
