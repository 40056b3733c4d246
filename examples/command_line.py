"""A model to work on from the terminal: `imprint check examples/command_line.py:task` and so on.

The commands look for `task`, `data`, `sources`, `queries`, `checkpoints` and `plan` in the file they are given; a
function is called for what it returns.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

import imprint

torch.manual_seed(0)
centres = torch.randn(3, 8)
labels = torch.randint(0, 3, (300,))
inputs = centres[labels] + torch.randn(300, 8)
labels[250:] = torch.randint(0, 3, (50,))  # the blog does not check its facts
data = TensorDataset(inputs, labels)
sources = imprint.Sources.by_label(["times"] * 150 + ["post"] * 100 + ["blog"] * 50)
queries = TensorDataset(centres, torch.arange(3))
plan = imprint.Plan(steps=100)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
checkpoints: list[dict[str, Tensor]] = []


def task() -> imprint.Task:
    """Train, keeping two early checkpoints. In practice: load what your training kept."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        for inputs, targets in DataLoader(data, batch_size=32, shuffle=True):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
        if epoch in (1, 3):
            checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return imprint.Task.classifier(model)


def train(subset: Tensor, seed: int) -> nn.Module:
    """The same training on a part of the data: what `imprint retrain` needs to find out the truth."""
    torch.manual_seed(seed)
    fresh = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimiser = torch.optim.SGD(fresh.parameters(), lr=0.1)
    part = Subset(data, subset.tolist())
    for _ in range(20):
        for inputs, targets in DataLoader(part, batch_size=32, shuffle=True):
            optimiser.zero_grad()
            F.cross_entropy(fresh(inputs), targets).backward()
            optimiser.step()
    return fresh
