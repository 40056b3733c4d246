"""Threads and forks beside simulations and readouts: right results, no errors, and a live model that nobody touches."""

import contextlib
import gc
import multiprocessing
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from imprint import ImprintError, attribute, self_influence, simulate
from tests.attacks.cases import PATIENCE, limited
from tests.attacks.concurrency import CALLS, KINDS, PLANS, SOURCES, THREADS, Bench, bench, beside, repeat, require
from tests.attacks.forking import Gate, gated, in_child, require_answer

EVERY = ("forwards", "state_dicts", "training", "modes", "saves", "deep_copies", "parameters", "same_jvp")
SOME = tuple(name for name in THREADS if name not in EVERY)


def pairs() -> list[tuple[str, str, str]]:
    """Every call beside the threads that matter most, three calls beside the others; kinds of models take turns."""
    calls, kinds = list(CALLS), list(KINDS)
    chosen = [(thread, call) for thread in EVERY for call in calls]
    chosen += [(thread, calls[(3 * k + j * 4) % len(calls)]) for k, thread in enumerate(SOME) for j in range(3)]
    return [(thread, call, kinds[(index + index // 4) % len(kinds)]) for index, (thread, call) in enumerate(chosen)]


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Have Python switch between threads far more often than it does, and stop what hangs."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    try:
        with limited(4 * PATIENCE):
            yield
    finally:
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize(("thread", "call", "kind"), pairs())
def test_a_call_and_a_thread_do_not_see_each_other(thread: str, call: str, kind: str) -> None:
    live = bench(kind)
    if "other" in thread:
        bench("tied"), bench("mlp")  # made now, not inside the thread
    live.restore()
    hooks = {module: dict(module._forward_hooks) for module in live.model.modules()}
    try:
        with beside(THREADS[thread](live)) as failures:
            repeat(lambda: require(call, CALLS[call](live), live.expected[call]))
        assert not failures, failures[0]
    finally:
        for module, before in hooks.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(before)
        live.restore()


# --- the user's own forward mode: torch has one level of it per process, and no lock


@pytest.mark.long
@pytest.mark.parametrize("call", ["jvp", "central", "gradient", "reader", "tangent", "trajectories", "self_influence"])
def test_a_users_forward_mode_spoils_no_result(call: str) -> None:
    """The user's jvp, or ours, may find torch's one level taken: ours then gives right values or an ImprintError.

    In a child, because torch may be left with that level in disorder.
    """
    live = bench("mlp")
    x = torch.linspace(0, 1, 5)

    def act() -> None:
        with contextlib.suppress(RuntimeError):  # torch's own words for a level that another thread took away
            torch.func.jvp(torch.sin, (x,), (x,))

    def attacked() -> int:
        done = 0
        with beside(act):
            for _ in range(3):
                with contextlib.suppress(ImprintError):
                    require(call, CALLS[call](live), live.expected[call], tolerance=1e-4)
                    done += 1
        return done

    kind, value = in_child(attacked)
    assert kind == "done", f"the call {kind}: {value}"


# --- forks


FORKED: dict[str, Callable[[Bench], Any]] = {
    "jvp": lambda b: b.attribute("jvp"),
    "central": lambda b: b.attribute("central"),
    "literal": lambda b: b.attribute("literal", "trajectories"),
    "gradient": lambda b: b.attribute("gradient"),
    "reader": lambda b: b.reader.scores(b.queries),
    "tangent": lambda b: b.simulate("tangent"),
    "trajectories": lambda b: b.simulate("trajectories"),
    "self_influence": lambda b: self_influence(b.task, b.stores["tangent"], b.data, progress=False),
    "check": lambda b: b.check(),
    "forward": lambda b: b.model.eval()(b.queries[0]).detach(),
    "state": lambda b: torch.cat([tensor.flatten() for tensor in b.model.state_dict().values()]),
    "gradients": lambda b: torch.autograd.grad(
        b.model.eval()(b.queries[0]).sum(), list(b.model.parameters()), allow_unused=True
    )[0],
}
_FORKED: list[tuple[Bench, Gate]] = []


@pytest.fixture
def stopped() -> tuple[Bench, Gate]:
    """A bench whose calls can be stopped in the middle."""
    if not _FORKED or not _FORKED[0][0].intact():
        _FORKED[:] = [gated()]
    return _FORKED[0]


@pytest.mark.long
@pytest.mark.parametrize("meanwhile", ["jvp", "tangent"])
@pytest.mark.parametrize("act", FORKED)
def test_a_child_of_a_process_in_the_middle_of_a_call_finishes(
    act: str, meanwhile: str, stopped: tuple[Bench, Gate]
) -> None:
    live, gate = stopped
    expected = FORKED[act](live)
    live.restore()
    with gate.stopping(lambda: FORKED[meanwhile](live)):
        found = require_answer(in_child(lambda: FORKED[act](live)))
    if found is not None:
        require(act, found, expected)


@pytest.mark.long
@pytest.mark.parametrize("act", ["jvp", "gradient", "tangent", "forward", "state"])
def test_a_child_made_by_multiprocessing_finishes(act: str, stopped: tuple[Bench, Gate]) -> None:
    live, gate = stopped
    expected = FORKED[act](live)
    live.restore()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(("done", FORKED[act](live).numpy()))
        except ImprintError as error:
            sender.send(("refused", str(error)))

    with gate.stopping(lambda: FORKED["jvp"](live)):
        child = context.Process(target=work, daemon=True)
        child.start()
        answered = receiver.poll(PATIENCE)
        if not answered:
            child.kill()
        child.join(PATIENCE)
    assert answered, "the child hangs"
    found = require_answer(receiver.recv())
    if found is not None:
        require(act, torch.from_numpy(found), expected)


@pytest.mark.long
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_child_of_a_child_finishes(depth: int, stopped: tuple[Bench, Gate]) -> None:
    live, gate = stopped
    expected = FORKED["jvp"](live)

    def descend(left: int) -> Any:
        if not left:
            return FORKED["jvp"](live)
        return require_answer(in_child(lambda: descend(left - 1)))

    with gate.stopping(lambda: FORKED["jvp"](live)):
        found = descend(depth)
    if found is not None:
        require("jvp", found, expected)


@pytest.mark.long
@pytest.mark.parametrize("call", ["jvp", "central", "gradient", "reader"])
def test_queries_may_come_from_a_loader_with_workers_while_readouts_run(call: str, stopped: tuple[Bench, Gate]) -> None:
    live, gate = stopped
    expected = FORKED["jvp"](live)
    loader = DataLoader(TensorDataset(*live.queries), batch_size=2, num_workers=2)
    outcome: list[Any] = []

    def read() -> None:
        try:
            outcome.append(attribute(live.task, live.stores["tangent"], iter(loader), progress=False).scores)
        except BaseException as error:
            outcome.append(error)

    reading = threading.Thread(target=read, daemon=True)
    with gate.stopping(lambda: FORKED[call](live)):
        reading.start()
        time.sleep(0.1)  # its workers are forked while the other thread is in the middle of its call
    reading.join(PATIENCE)
    assert not reading.is_alive(), "the readout hangs"
    assert isinstance(outcome[0], torch.Tensor), f"the readout raised {outcome[0]!r}"
    require("jvp", outcome[0], expected)


def leave(store: Any) -> None:
    del store
    gc.collect()


ENDS: dict[str, Callable[[list[Any]], object]] = {
    "drops it": lambda held: held.clear() or gc.collect(),  # type: ignore[func-returns-value]
    "makes and drops one of its own": lambda held: leave(bench("tied").simulate("tangent")),
    "reads it and drops it": lambda held: leave(attribute(*held[0], progress=False)) or held.clear(),  # type: ignore[func-returns-value]
    "runs its exit functions": lambda held: weakref.finalize._exitfunc(),  # type: ignore[attr-defined]
}


@pytest.mark.long
@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_ends_leaves_the_parents_temporary_store(end: str) -> None:
    live = bench("tied")
    fresh = simulate(live.task, live.data, SOURCES, PLANS["tangent"], checkpoints=[live.state], progress=False)
    held = [(live.task, fresh, live.queries)]
    folder = fresh.path
    del fresh
    require_answer(in_child(lambda: bool(ENDS[end](held))))
    assert (folder / "manifest.json").exists(), "the child deleted the parent's store"
    require("jvp", attribute(*held[0], progress=False).scores, live.expected["jvp"])


@pytest.mark.long
def test_a_child_that_exits_in_the_ordinary_way_leaves_the_parents_temporary_store() -> None:
    script = """
import os, sys, torch
from imprint import Plan, Sources, Task, attribute, simulate
task, data = Task.classifier(torch.nn.Linear(3, 3)), (torch.randn(6, 3), torch.arange(6) % 3)
store = simulate(task, data, Sources.per_example(6), Plan(steps=1, lr=0.1), progress=False)
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print(attribute(task, store, data, progress=False).scores.shape)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * PATIENCE + 30)
    assert done.returncode == 0 and "[6, 6]" in done.stdout, done.stderr[-300:]
