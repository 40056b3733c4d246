"""How many sources are simulated at once follows from what a step of some of them takes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from imprint import Plan, Sources, Task, simulate
from imprint.data import Data
from imprint.runtime.memory import Peak, most_that_fit
from imprint.simulation import sizing
from imprint.simulation.descent import Descent
from imprint.simulation.source_gradients import choose_heaviest

PEAKS = {
    "each the same": lambda rows: 10 * rows,
    "much that is shared": lambda rows: 100 + rows,
    "all that is shared": lambda rows: 100,
    "a first stage": lambda rows: max(90, 10 * rows),
    "a first stage and little else": lambda rows: max(500, 7 + 3 * rows),
    "more from some number on": lambda rows: 100 * rows + (30 if rows >= 8 else 0),
    "too much at once": lambda rows: 10 * rows if rows < 30 else sys.maxsize,
}


@pytest.mark.parametrize("peak", PEAKS.values(), ids=PEAKS.keys())
@pytest.mark.parametrize("most", [1, 2, 3, 40, 5000])
@pytest.mark.parametrize("allowed", [5, 60, 120, 170, 501, 2000, 10**6])
def test_what_fits_is_found_up_to_an_eighth(peak: Callable[[int], int], most: int, allowed: int) -> None:
    tried: list[int] = []

    def measured(rows: int) -> int:
        tried.append(rows)
        return peak(rows)

    found = most_that_fit(measured, allowed, most)
    assert found == 0 or peak(found) <= allowed
    assert found == most or peak(min(most, found + 1 + found // 8)) > allowed
    assert max(tried) <= 4 * max(1, found) and len(tried) < 20


def test_a_peak_is_seen_around_another() -> None:
    outer = Peak(torch.device("cpu"))
    large = torch.ones(50_000_000)
    del large
    inner = Peak(torch.device("cpu"))
    assert outer.bytes is not None and inner.bytes is not None
    assert outer.bytes - inner.bytes > 100_000_000


def descent_of(sources: Sources, n: int, **plan: Any) -> Descent:
    """A descent of several steps on n examples, as small as can be."""
    task, data = Task.classifier(torch.nn.Linear(2, 2)), (torch.zeros(n, 2), torch.zeros(n).long())
    functional, theta = task.at(task.state())
    return Descent(functional, theta, Data(data, device=torch.device("cpu")), sources, Plan(**plan), steps=7, lr=1.0)


def test_the_heaviest_sources_are_the_largest_and_the_largest_done_together() -> None:
    sources = Sources.groups({"a": range(40), "b": range(5), "c": range(32), "d": range(50)})

    def heaviest(**plan: Any) -> list[list[str]]:
        return [list(choice.ids) for choice in choose_heaviest(descent_of(sources, 50, **plan), 2)]

    assert heaviest() == [["d", "a"]]
    assert heaviest(batch_size=10) == [["d", "a"], ["c", "b"]]
    assert heaviest(batch_size=10, source_sample=8) == [["d", "a"]]


def test_a_step_of_some_sources_tells_how_many_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a GPU, where what is shared takes 1000 bytes, a source 100, and more than 9000 is too much."""
    tried: list[int] = []

    def attempt(descent: Descent) -> None:
        assert descent.steps == 1
        tried.append(len(descent.sources))
        if 1000 + 100 * tried[-1] > 9000:
            raise torch.OutOfMemoryError

    class Told:
        bytes = property(lambda self: 5000 + 1000 + 100 * tried[-1])

    monkeypatch.setattr(sizing, "Peak", lambda device: Told())
    monkeypatch.setattr(sizing, "budget", lambda memory, device: memory)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5000)
    descent = descent_of(Sources.per_example(200), 200)
    descent.data.device = torch.device("cuda")

    def rows_that_fit(memory: int, before: int | None = None) -> int:
        return sizing.rows_that_fit(descent, memory, attempt, 1, before)

    assert rows_that_fit(2000) == 10
    assert rows_that_fit(1 << 20) >= 70
    assert max(tried) > 80  # more than there is room for was tried, and told
    assert rows_that_fit(1050) == 1
    tried.clear()
    assert rows_that_fit(2000, before=6) == 6
    assert tried == [1, 6]
    assert rows_that_fit(2000, before=60) == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_a_simulation_on_cuda_keeps_about_to_the_memory_it_may_use(engine: Any) -> None:
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512)).to(device)
    data = torch.randn(2000, 64), torch.randint(0, 512, (2000,))
    sources, plan = Sources.by_label([i % 40 for i in range(2000)]), Plan(engine=engine, steps=3, lr=1e-3)
    rows = []
    for memory in (4 << 30, 200 << 20, 50 << 20):  # the first has room for what torch makes for itself, once
        before, peak = torch.cuda.memory_allocated(), Peak(device)
        store = simulate(Task.classifier(model), data, sources, plan, memory=memory, progress=False, batch_size=500)
        rows.append(store.checkpoints[0].choices.rows_at_once)
        assert (peak.bytes or 0) - before <= 1.25 * memory  # trials may go beyond it
    assert 1 < rows[2] < rows[1] < rows[0] == 40
