"""Batches that are dictionaries, a collate function, checkpoints in files, and imprints of the last layer only."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import imprint

Sample = dict[str, Any]


class Classifier(nn.Module):
    """A small convolutional network with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(3), nn.Flatten()
        )
        self.head = nn.Linear(72, 4)

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.head(self.body(image))
        return features


def collate(samples: list[Sample]) -> Sample:
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
    }


torch.manual_seed(0)
patterns = torch.randn(4, 1, 8, 8)
samples: list[Sample] = [
    {"image": patterns[i % 4] + 0.7 * torch.randn(1, 8, 8), "label": i % 4, "owner": f"camera {i % 5}"}
    for i in range(200)
]
for sample in samples:
    if sample["owner"] == "camera 3":  # its labels are off by one
        sample["label"] = (sample["label"] + 1) % 4

model = Classifier()
optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
folder = Path(tempfile.mkdtemp())
files = []
for epoch in range(6):
    model.train()
    for batch in DataLoader(samples, batch_size=32, shuffle=True, collate_fn=collate):  # type: ignore[arg-type]
        optimiser.zero_grad()
        F.cross_entropy(model(batch["image"]), batch["label"]).backward()
        optimiser.step()
    if epoch in (1, 3):
        files.append(folder / f"epoch-{epoch}.safetensors")
        save_file(model.state_dict(), files[-1])

task = imprint.Task(
    model,
    outputs=lambda model, batch: model(batch["image"]),  # a measure by name needs to see the outputs,
    output_loss=lambda z, batch: F.cross_entropy(z, batch["label"], reduction="none"),
    measure="margin",  # … and finds the right class under "label", "labels", "target", "targets" or "y"
    parameters="head.*",
)
store = imprint.simulate(
    task,
    samples,
    imprint.Sources.by_label([sample["owner"] for sample in samples]),
    imprint.Plan(steps=100),
    checkpoints=files,
    collate_fn=collate,
    out=folder / "store",
)
queries = [{"image": patterns[label], "label": label} for label in range(4)]
print(imprint.attribute(task, store, queries, collate_fn=collate).top(2))
