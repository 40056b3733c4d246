"""Stores and names that mean harm, and whether what is shown of them is harmless."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from imprint import Plan, Sources, Store, Task, simulate
from imprint.store.values import sealed

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\r\nrm -rf\u2028\x7f"


DATA = (torch.randn(9, 2, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 2)
MODEL = """
import torch
from torch import nn
import imprint

torch.manual_seed(0)
data = queries = (torch.randn(4, 2), torch.tensor([0, 1, 0, 1]))
sources = imprint.Sources.per_example(4)
plan = imprint.Plan(steps=2, lr=0.1)
task = imprint.Task.classifier(nn.Linear(2, 2))
"""


def task() -> Task:
    torch.manual_seed(0)
    return Task.classifier(nn.Linear(2, 2))


def made(out: Path | None = None, note: Any = None, names: list[str] | None = None) -> Store:
    named = dict(zip("abc", names or ["a", "b", "c"], strict=True))
    sources = Sources.by_label(["a", "b", "c"] * 3, named)
    return simulate(task(), DATA, sources, Plan(steps=2, lr=0.1), out=out, note=note, progress=False)


def forge(store: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest and give it the checksum it should have."""
    values = json.loads((store / "manifest.json").read_text())
    change(values)
    values.pop("sha256")
    (store / "manifest.json").write_text(json.dumps(sealed(values)))


def harmless(text: str) -> bool:
    """Whether a text has no control characters but the ends of its lines, and nothing that turns or hides others."""
    return all(line.isprintable() for line in text.split("\n"))
