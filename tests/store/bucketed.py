"""A small store in a bucket, and the machines that read and write it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import imprint
from imprint.store.uploading import Upload

X, Y = torch.randn(24, 3, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 3
PLAN = imprint.Plan(steps=4, lr=0.1)
SOURCES = imprint.Sources.by_label([f"press-{i % 6}" for i in range(24)])


class Cache:
    """The caches of several machines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        self.move("one")

    def move(self, machine: str) -> None:
        """Go on at another machine."""
        self._monkeypatch.setenv("IMPRINT_CACHE", str(self._folder / f"cache-{machine}"))


class Killed(BaseException):
    """In place of SIGKILL."""


def kill_after(monkeypatch: pytest.MonkeyPatch, requests: int) -> list[str]:
    """Have every upload and deletion fail from one of them on; return the names of what was uploaded or deleted."""
    import obstore

    done: list[str] = []

    def limit(real: Any) -> Any:
        def call(store: Any, name: str, *given: Any, **options: Any) -> Any:
            if len(done) >= requests:
                raise Killed
            done.append(name)
            return real(store, name, *given, **options)

        return call

    for name in ("put", "delete"):
        monkeypatch.setattr(obstore, name, limit(getattr(obstore, name)))
    return done


def stop_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have writers do nothing by themselves, as a process that is stopped."""
    for name in ("_renew", "_catch_up"):
        monkeypatch.setattr(Upload, name, lambda self: None)


def new_task() -> imprint.Task:
    torch.manual_seed(0)
    return imprint.Task.classifier(nn.Linear(3, 3))


def simulate(out: Any, sources: imprint.Sources = SOURCES, **more: Any) -> imprint.Store:
    return imprint.simulate(new_task(), (X, Y), sources, PLAN, out=out, progress=False, **more)


def scores(store: Any) -> torch.Tensor:
    return imprint.attribute(new_task(), store, (X[:5], Y[:5]), progress=False).scores
