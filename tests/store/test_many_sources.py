"""A hundred thousand sources."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from imprint import Plan, Sources, Store, Task, attribute, simulate
from imprint.cli.inspection import inspect_store


@pytest.mark.long
def test_a_hundred_thousand_sources_are_a_matter_of_seconds(tmp_path: Path) -> None:
    many = 100_000
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(many, 2, generator=generator), torch.randint(0, 2, (many,), generator=generator)
    model = Task.classifier(nn.Linear(2, 2))
    plan = Plan(steps=2, lr=0.1, batch_size=8)
    begin = time.process_time()
    simulate(model, (x, y), Sources.per_example(many), plan, out=tmp_path / "store", progress=False)
    made = time.process_time()
    store = Store(tmp_path / "store")
    store.verify()
    top = attribute(model, store, (x[:3], y[:3]), top=5, progress=False)
    values = inspect_store(store)
    read = time.process_time()
    assert len(store) == values["sources"] == many
    assert top.scores.shape == (3, 5)
    assert made - begin < 60, "it takes five seconds"
    assert read - made < 20, "it takes half a second"
    assert store.bytes < 100 * many
