"""What the tests of the command line share: its commands, a model's file, and what a command leaves with."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from typer.main import get_command

from imprint import Store
from imprint.cli.app import app

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
MODEL = """
import torch
from torch import nn
import imprint

torch.manual_seed(0)
data = (torch.randn(12, 3), torch.randint(0, 3, (12,)))
sources = imprint.Sources.by_label(["times", "post", "[blog]"] * 4)
queries = (torch.randn(2, 3), torch.tensor([0, 1]))
plan = imprint.Plan(steps=3, lr=0.1)
task = imprint.Task.classifier(nn.Linear(3, 3))
"""
TASK = ("--task", "model.py:task")


class Finished(NamedTuple):
    """A command that has left: its exit code, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def values(self) -> Any:
        """Standard output, all of it, as strict JSON."""

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is no JSON")

        assert self.code == 0, self.err
        return json.loads(self.out, parse_constant=refuse)


Command = Callable[..., Finished]


def loaded(file: Path) -> SimpleNamespace:
    """What a model's file defines, for the library to work on."""
    return SimpleNamespace(**runpy.run_path(str(file)))


def imprints(store: str | Path) -> dict[str, str]:
    """The checksums of a store's imprints by file."""
    files = (file for checkpoint in Store(store).checkpoints for file in checkpoint.imprints)
    return {file.path: file.sha256 for file in files}
