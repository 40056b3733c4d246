"""How many sources are simulated at once follows from what a step of some of them takes."""

from typing import Any

import pytest
import torch

from imprint import Plan, Sources, Task, simulate
from imprint.memory import Peak, most_that_fit


@pytest.mark.parametrize(("shared", "each", "stage"), [(0, 10, 0), (100, 10, 0), (100, 1, 0), (0, 10, 90), (7, 3, 500)])
@pytest.mark.parametrize("most", [1, 2, 3, 40])
@pytest.mark.parametrize("allowed", [5, 60, 170, 501, 10_000])
def test_what_fits_is_found_without_trying_more_than_is_allowed(
    shared: int, each: int, stage: int, most: int, allowed: int
) -> None:
    """Of a computation whose first stage takes the same for any number, and whose second takes more for each."""
    tried: list[int] = []

    def peak(rows: int) -> int:
        tried.append(rows)
        return max(stage, shared + each * rows)

    found = most_that_fit(peak, allowed, most)
    assert found == 0 or max(stage, shared + each * found) <= allowed
    full = max(stage, shared + each * (found + 1)) > allowed
    assert found == most or full or max(stage, shared + each * found) >= 0.8 * allowed
    assert max(stage, shared + each * max(tried)) <= 2 * allowed or tried == [1]
    assert len(tried) <= 12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("engine", ["tangent", "trajectories"])
def test_a_simulation_on_cuda_stays_within_the_memory_it_may_use(engine: Any) -> None:
    device = torch.device("cuda")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512)).to(device)
    data = torch.randn(2000, 64), torch.randint(0, 512, (2000,))
    sources, plan = Sources.by_label([i % 40 for i in range(2000)]), Plan(engine=engine, steps=3, lr=1e-3)
    rows = []
    for memory in (50 << 20, 200 << 20, 4 << 30):
        before, peak = torch.cuda.memory_allocated(), Peak(device)
        store = simulate(Task.classifier(model), data, sources, plan, memory=memory, progress=False, batch_size=500)
        rows.append(store.checkpoints[0].figures["rows_at_once"])
        assert rows[-1] == 1 or (peak.bytes or 0) - before < 1.2 * memory
    assert rows[0] < rows[1] < rows[2] == 40
