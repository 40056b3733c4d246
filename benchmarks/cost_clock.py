"""Times calls for the cost model: the processor's time of one thread on a CPU, the wall clock on a GPU.

A core that other programs share gives the same processor time as one that is free, or little more; with one thread and
nothing to wait for, that is what a wall clock would show on a free machine.
"""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


class Clock:
    """Reads the time of a device; on a GPU once it has finished."""

    def __init__(self, device: torch.device, *, wall: bool = False) -> None:
        self.device, self.wall = device, wall or device.type == "cuda"

    @property
    def name(self) -> str:
        return "wall clock" if self.wall else "processor's time of one thread"

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() if self.wall else time.process_time()

    def once(self, call: Callable[[], object]) -> float:
        begin = self.now()
        call()
        return self.now() - begin

    def interleaved(self, calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
        """Return the median seconds of each call, after one to warm up; the calls take turns."""
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(repeats + 1):
            for name, call in calls.items():
                taken = self.once(call)
                if repeat:
                    times[name].append(taken)
        return {name: median(taken) for name, taken in times.items()}
