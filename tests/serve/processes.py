"""Processes of `imprint serve`, which tests start, ask, and kill."""

import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from imprint.credit import Ledger
from imprint.serve.access import Access
from tests.serve.news import POLICY, News, make_ledger

FORKS = multiprocessing.get_context("forkserver")  # imports once: a process then starts in a second, not in several
FORKS.set_forkserver_preload([__name__, "imprint.cli.app", "imprint.serve.app", "imprint.serve.running"])
TASK = """
import torch
from torch import nn

import imprint

model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
model.load_state_dict(torch.load({model!r}))
task = imprint.Task.classifier(model, form=imprint.NumbersForm((4,), classes=3))
"""
_PATIENCE = 120  # seconds, after which a test fails instead of waiting


def _run_command(arguments: list[str], out: int, log: str) -> None:
    """Run a command line in this process, with a pipe for its standard output."""
    from imprint.cli.app import main

    torch.set_num_threads(1)
    os.dup2(out, 1)
    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    sys.argv = ["imprint", *arguments]
    main()


@dataclass(frozen=True)
class Site:
    """What processes serve: a store, its task, a ledger with its policy, and a key."""

    folder: Path
    ledger: str
    secret: str

    @property
    def arguments(self) -> list[str]:
        """The command line of a process."""
        where = ["--ledger", self.ledger, "--policy", str(self.folder / "policy.json"), "--metrics", "none"]
        return ["serve", str(self.folder / "store"), f"{self.folder / 'task.py'}:task", *where]

    def open_ledger(self) -> Ledger:
        return Ledger(self.ledger)


def make_site(news: News, folder: Path, ledger: str) -> Site:
    """Write what a process needs into a folder, beside a link to the store."""
    (folder / "store").symlink_to(news.store.path, target_is_directory=True)
    torch.save(news.task.model.state_dict(), folder / "model.pt")
    (folder / "task.py").write_text(TASK.format(model=str(folder / "model.pt")), encoding="utf-8")
    (folder / "policy.json").write_text(json.dumps(POLICY.to_json()), encoding="utf-8")
    make_ledger(ledger).close()
    access = Access(ledger if "://" in ledger else f"{ledger}.access")
    secret = access.create("app", "query").secret
    access.close()
    return Site(folder, ledger, secret)


class Served:
    """A process that serves a site. log: its standard error, which processes of one name share.

    patched: other values for names of modules, such as {"imprint.serve.running._FINISHING": 1}.
    """

    def __init__(
        self,
        site: Site,
        port: int = 0,
        name: str = "log",
        more: tuple[str, ...] = (),
        patched: Mapping[str, float] | None = None,
    ) -> None:
        out, given = FORKS.Pipe(duplex=False)
        self.log = site.folder / name
        arguments = [*site.arguments, "--port", str(port), *more]
        self.process = FORKS.Process(target=_start, args=(arguments, given, str(self.log), patched or {}))
        self.process.start()
        given.close()
        self.lines: list[str] = []
        self._out = os.fdopen(os.dup(out.fileno()), encoding="utf-8")
        out.close()

    def wait_until_ready(self) -> "Served":
        """Read what the process announces once it answers."""
        for line in self._out:
            self.lines.append(line)
            if line.split()[:1] == ["keys"]:
                return self
        self.process.join(_PATIENCE)
        raise AssertionError(f"exit code {self.process.exitcode}: {self.log.read_text(encoding='utf-8')}")

    @property
    def url(self) -> str:
        (found,) = re.findall(r"^ *address +(\S+)$", "".join(self.lines), re.MULTILINE)
        return str(found)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """Kill it, as a machine that fails would."""
        self.process.kill()
        self.process.join(_PATIENCE)
        assert self.process.exitcode == -signal.SIGKILL

    def stop(self) -> int | None:
        """Tell it to stop; return its exit status once it has."""
        self.process.terminate()
        self.process.join(_PATIENCE)
        self._out.close()
        return self.process.exitcode

    def __enter__(self) -> "Served":
        return self.wait_until_ready()

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join(_PATIENCE)


def _start(arguments: list[str], out: Connection, log: str, patched: Mapping[str, float]) -> None:
    for name, value in patched.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, value)
    _run_command(arguments, out.fileno(), log)
