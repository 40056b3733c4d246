"""Readouts from several threads take turns: right scores, and the user's model as it was."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from imprint import Plan, Reader, Sources, Store, Task, attribute, simulate


def test_threads_get_right_scores_and_leave_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    task = Task.classifier(model)
    data = (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    store = simulate(task, data, Sources.by_label([i % 5 for i in range(20)]), Plan(steps=3, lr=0.1), progress=False)
    readers = [Reader(task, store), Reader(task, store)]
    expected = readers[0].scores(data)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda i: readers[i % 2].scores(data), range(60)))
    assert all(torch.equal(scores, expected) for scores in found)
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert Task.classifier(model).names == task.names


def simulated(model: nn.Module) -> tuple[Task, Store, tuple[Tensor, Tensor]]:
    task = Task.classifier(model)
    data = (torch.randn(20, 4), torch.randint(0, 3, (20,)))
    sources = Sources.by_label([i % 5 for i in range(20)])
    return task, simulate(task, data, sources, Plan(steps=3, lr=0.1), progress=False), data


def test_attributing_from_four_threads_never_raises() -> None:
    task, store, data = simulated(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
    expected = attribute(task, store, data, progress=False).scores
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: attribute(task, store, data, progress=False).scores, range(40)))
    assert all(torch.equal(scores, expected) for scores in found)


def test_copies_of_the_state_taken_meanwhile_hold_the_models_own_weights() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    task, store, data = simulated(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reader, stop, wrong, dropped = Reader(task, store), threading.Event(), [], []

    def look() -> None:
        while not stop.is_set():
            wrong.append(any(not torch.equal(t, before[name]) for name, t in model.state_dict().items()))
            dropped.append(bool((model[:2](data[0]) == 0).any()))

    thread = threading.Thread(target=look)
    thread.start()
    while len(wrong) < 50:
        reader.scores(data)
    stop.set()
    thread.join()
    assert not any(wrong)
    assert all(dropped)  # a training thread keeps its dropout


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this platform")
def test_a_child_forked_in_the_middle_of_a_readout_computes_the_same() -> None:
    """Run apart, with two threads, so that the parent's pool of threads is there to be missed."""
    found = subprocess.run([sys.executable, "-c", _FORKING], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["same", "0"]


_FORKING = """
import os, threading, torch
from torch import nn
from imprint import Plan, Reader, Sources, Task, attribute, simulate

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 3))
task = Task.classifier(model)
data = (torch.randn(200, 64), torch.randint(0, 3, (200,)))
store = simulate(task, data, Sources.by_label([i % 5 for i in range(200)]), Plan(steps=2, lr=0.1), progress=False)
expected = attribute(task, store, data, progress=False).scores
torch.set_num_threads(2)
torch.ones(1 << 20).exp().sum()  # starts the pool
inside, forked = threading.Event(), threading.Event()

def slow(model, batch):
    inside.set()
    forked.wait()
    return model(batch[0])[:, 0]

def read():
    task.measure = slow
    attribute(task, store, data, progress=False)

thread = threading.Thread(target=read)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    task.measure = task.loss
    scores = attribute(task, store, data, progress=False).scores
    print("same" if torch.allclose(scores, expected, rtol=1e-4, atol=1e-6) else "other", flush=True)
    os._exit(0)
forked.set()
print(os.waitpid(child, 0)[1])
thread.join()
"""
