"""Attribute your own model: ordinary training code, two checkpoints, three publishers."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import imprint

torch.manual_seed(0)
centres = 1.5 * torch.randn(3, 8)
y = torch.randint(0, 3, (300,))
x = centres[y] + torch.randn(300, 8)
publishers = ["times"] * 150 + ["post"] * 100 + ["blog"] * 50
y[250:] = torch.randint(0, 3, (50,))  # the blog does not check its facts
train, queries = TensorDataset(x, y), TensorDataset(centres, torch.arange(3))

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = []
for epoch in range(20):
    for inputs, labels in DataLoader(train, batch_size=32, shuffle=True):
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    if epoch in (1, 3):  # early checkpoints carry the signal
        checkpoints.append({name: tensor.clone() for name, tensor in model.state_dict().items()})

task = imprint.Task(model, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"))
sources = imprint.Sources.by_label(publishers)
store = imprint.simulate(task, train, sources, imprint.Plan(steps=100), checkpoints=checkpoints)
result = imprint.attribute(task, store, queries)
print(result)
