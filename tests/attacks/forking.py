"""Forks of a process whose other threads are in the middle of a simulation or a readout."""

import os
import pickle
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from imprint import ImprintError, Task
from tests.attacks.cases import PATIENCE
from tests.attacks.concurrency import PLANS, Bench, dropping_mlp, points


class Gate:
    """Stops a thread inside the user's function, until it may go on."""

    def __init__(self) -> None:
        self.process, self.thread = os.getpid(), 0
        self.inside, self.open = threading.Event(), threading.Event()

    def pass_through(self) -> None:
        """Wait, if this is the thread that is to be stopped."""
        if self.thread == threading.get_ident() and self.process == os.getpid():
            self.inside.set()
            self.open.wait(2 * PATIENCE)

    @contextmanager
    def stopping(self, call: Callable[[], Any]) -> Iterator[None]:
        """Run a call in another thread, and stop it inside the user's function meanwhile."""
        results: list[Any] = []

        def run() -> None:
            self.thread = threading.get_ident()
            try:
                results.append(call())
            except BaseException as error:
                results.append(error)

        self.inside.clear()
        self.open.clear()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert self.inside.wait(PATIENCE), "the call does not reach the user's function"
        try:
            yield
        finally:
            self.thread = 0
            self.open.set()
            thread.join(PATIENCE)
        assert not thread.is_alive(), "the parent's call hangs"
        if isinstance(results[0], BaseException):
            raise results[0]


def gated() -> tuple[Bench, Gate]:
    """Return a bench whose loss and measure can be stopped."""
    gate = Gate()
    torch.manual_seed(3)
    model = dropping_mlp().double().train()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        gate.pass_through()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def measure(model: nn.Module, batch: Any) -> Tensor:
        gate.pass_through()
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    task = Task(model, loss, measure=measure)
    plans = {name: plan for name, plan in PLANS.items() if name != "spectral"}
    return Bench.on(task, "mlp", points(8, 1), points(4, 2), plans), gate


def in_child(act: Callable[[], Any]) -> tuple[str, Any]:
    """Run something in a forked child: ("done", value), ("refused", why), ("raised", what) or ("hangs", None)."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            try:
                outcome: tuple[str, Any] = ("done", act())
            except ImprintError as error:
                outcome = ("refused", str(error))
            except BaseException as error:
                outcome = ("raised", f"{type(error).__name__}: {error}")
            os.write(write, pickle.dumps(outcome))
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], PATIENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
            return "hangs", None
        told = b"".join(iter(lambda: os.read(read, 1 << 16), b""))
        return pickle.loads(told) if told else ("died", None)
    finally:
        os.close(read)
        os.waitpid(child, 0)


def require_answer(outcome: tuple[str, Any]) -> Any:
    """Return what a child says; fail unless it finished or was refused in the library's own words."""
    kind, value = outcome
    assert kind in ("done", "refused"), f"the child {kind}: {value}"
    return value if kind == "done" else None
