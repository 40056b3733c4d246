"""The default budget follows from the memory that is available, and how many sources fit it from what a step takes."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from imprint import Plan, Sources, Task, simulate
from imprint.data import Data
from imprint.runtime.memory import Peak, available_bytes, budget, most_that_fit
from imprint.simulation import sizing
from imprint.simulation.descent import Descent
from imprint.simulation.source_gradients import choose_heaviest

GIB = 1 << 30


def machine(root: Path, groups: str = "0::/\n", **files: str) -> Path:
    """Make the /proc of a machine of 16 GiB, of which 12 are available, and these files of control groups."""
    (root / "proc/self").mkdir(parents=True)
    cached = f"MemFree: {GIB >> 10} kB\nHugePages_Total: 0\nMemAvailable: {12 * GIB >> 10} kB\n"
    (root / "proc/meminfo").write_text(f"MemTotal: {16 * GIB >> 10} kB\n{cached}")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def version_2(folder: str, limit: object, *, used: int = 6 * GIB, cached: int = 4 * GIB) -> dict[str, str]:
    stat = f"anon {used - cached}\nfile {cached}\ninactive_file {cached - GIB}\nactive_file {GIB}\n"
    figures = {"memory.max": limit, "memory.current": used, "memory.stat": stat}
    return {f"{folder}{name}": f"{value}\n" for name, value in figures.items()}


def version_1(folder: str, limit: object, *, used: int = 6 * GIB, cached: int = 4 * GIB) -> dict[str, str]:
    stat = f"cache 1\ninactive_file 5\ntotal_inactive_file {cached - GIB}\ntotal_active_file {GIB}\n"
    figures = {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}
    return {f"memory/{folder}{name}": f"{value}\n" for name, value in figures.items()}


def test_page_cache_is_available(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == 12 * GIB


def test_a_platform_without_proc_has_some_memory(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 4 * GIB


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", version_2("", 8 * GIB), 6),  # 8 less the 2 that are no page cache
        ("0::/\n", version_2("", "max"), 12),
        ("0::/\n", version_2("", 90 * GIB), 12),  # more than the machine has
        ("0::/a/b\n", version_2("a/b/", "max") | version_2("a/", 8 * GIB), 6),  # the group around it has a limit
        ("0::/a/b\n", version_2("a/b/", 7 * GIB) | version_2("a/", 8 * GIB), 5),
        ("0::/not/mounted\n", version_2("", 8 * GIB), 6),  # a container sees its own group as the root
        ("0::/../..\n", version_2("", 8 * GIB), 6),
        ("4:cpu,memory:/\n0::/\n", version_1("", 8 * GIB), 6),
        ("4:memory:/a\n3:cpuset:/\n", version_1("", 1 << 63) | version_1("a/", 8 * GIB), 6),
        ("4:memory:/docker/1\n", version_1("", 8 * GIB), 6),
        ("3:cpuset:/\n", version_1("", 8 * GIB), 12),  # memory is not limited by groups
    ],
)
def test_a_container_has_what_its_limit_leaves_without_page_cache(
    groups: str, files: dict[str, str], expected: int, tmp_path: Path
) -> None:
    assert available_bytes(machine(tmp_path, groups, **files)) == expected * GIB


@pytest.mark.parametrize(
    ("broken", "text", "expected"),
    [
        ("proc/meminfo", "MemTotal: 5 kB\n", 4 * GIB),
        ("proc/meminfo", "MemAvailable\n", 4 * GIB),
        ("proc/meminfo", "MemAvailable: much kB\n", 4 * GIB),
        ("proc/self/cgroup", "nothing\n", 12 * GIB),
        ("proc/self/cgroup", "", 12 * GIB),
        ("sys/fs/cgroup/memory.max", "", 12 * GIB),
        ("sys/fs/cgroup/memory.current", "?", 12 * GIB),
        ("sys/fs/cgroup/memory.stat", "anon 5\n", 2 * GIB),  # all of it may be in use
        ("sys/fs/cgroup/memory.stat", "", 2 * GIB),
    ],
)
@pytest.mark.parametrize("absent", [False, True])
def test_what_cannot_be_read_is_left_out(broken: str, text: str, expected: int, absent: bool, tmp_path: Path) -> None:
    file = machine(tmp_path, **version_2("", 8 * GIB)) / broken
    file.write_text(text)
    if absent:
        file.unlink()
    assert available_bytes(tmp_path) == expected


def test_a_full_container_still_gets_a_little(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, **version_2("", GIB, used=GIB, cached=GIB))) == GIB
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(9 * GIB))
    assert available_bytes(tmp_path) == 64 << 20


def test_the_default_budget_is_a_share_of_what_is_available() -> None:
    assert 0.2 * available_bytes() < budget(None, torch.device("cpu")) < 0.3 * available_bytes()


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
