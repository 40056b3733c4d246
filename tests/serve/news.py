"""A small store that is served in tests: publishers of three classes, a recorded run, replayed and validated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import imprint
from imprint.credit import Ledger, Policy, Tariff
from imprint.serve.service import Service
from imprint.serve.settings import Settings

POLICY = Policy("house rules", question="this_run", rule="positive_part")


@dataclass(frozen=True)
class News:
    """What is served: a task with a form, its store, and some queries with their JSON."""

    task: imprint.Task
    store: imprint.Store
    inputs: Tensor
    labels: Tensor

    def ask(self, place: int, *, labelled: bool = True) -> dict[str, Any]:
        """Return a query as JSON values."""
        query: dict[str, Any] = {"values": self.inputs[place].tolist()}
        return {**query, "label": int(self.labels[place])} if labelled else query

    def serve(self, ledger: Ledger | None = None, **settings: Any) -> Service:
        """Make a service of it."""
        policy = None if ledger is None else POLICY
        return Service(self.task, self.store, policy=policy, ledger=ledger, settings=Settings(**settings))


def make_news(folder: Path) -> News:
    """Train, record, replay and validate."""
    torch.manual_seed(0)
    centres, y = 1.5 * torch.randn(3, 4), torch.randint(0, 3, (120,))
    x = centres[y] + torch.randn(120, 4)
    y[100:] = torch.randint(0, 3, (20,))
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    run = imprint.RunRecorder(folder / "run", model, optimiser, data=(x, y))
    for indices in run.batches(120, 20, epochs=4):
        with run.step(indices) as step:
            optimiser.zero_grad()
            step.backward(nn.functional.cross_entropy(model(x[indices]), y[indices]))
            optimiser.step()
    recording = run.finish()
    task = imprint.Task.classifier(model, form=imprint.NumbersForm((4,), classes=3))
    sources = imprint.Sources.by_label([f"publisher-{index // 20}" for index in range(120)])
    store = imprint.simulate(task, (x, y), sources, run=recording, out=folder / "store", progress=False)
    asked = torch.randint(0, 3, (40,))
    inputs = centres[asked] + torch.randn(40, 4)
    imprint.validate(store, (inputs, asked), progress=False)
    return News(task, store, inputs, asked)


def make_ledger(place: str | Path) -> Ledger:
    return Ledger.create(place, Tariff("EUR", per_query=250_000))
