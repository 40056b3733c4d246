"""How much memory a computation may take, and how much it would."""

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from imprint.compat import TorchDispatchMode
from imprint.errors import PlanError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_FEWEST = 1 << 20  # bytes that a plain number may say: fewer are a forgotten unit


def budget(memory: float | str | None, device: torch.device) -> int:
    """Bytes that may be used: a number, a text with a unit such as "2GiB", or by default a share of what is available.

    >>> budget("1.5GiB", torch.device("cpu"))
    1610612736
    """
    if memory is None:
        if device.type == "cuda":
            kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for itself
            return int(0.5 * (torch.cuda.mem_get_info(device)[0] + kept))
        return int(0.25 * available_bytes())
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?)b?\s*", memory.lower())
        if match is None or match[2] not in _UNITS:
            raise PlanError(f'memory must be a number of bytes or a text such as "2GiB", got {memory!r}.')
        if memory.strip()[-1] in "0123456789." and float(match[1]):
            raise PlanError(f'memory must have a unit, got {memory!r}: write "{memory.strip()}GiB", or "MiB" or "B".')
        memory = int(float(match[1]) * _UNITS[match[2]])
    elif 0 < memory < _FEWEST:
        raise PlanError(
            f'memory must be at least 1 MiB where it is a plain number, got {memory} bytes: write "{memory}GiB" if '
            "that is meant."
        )
    if not (memory > 0 and math.isfinite(memory)):
        raise PlanError(f"memory must be positive, got {memory}.")
    return int(memory)


def available_bytes(root: Path = Path("/")) -> int:
    """Return how much memory can be allocated without swapping; page cache counts, as the kernel gives it back.

    root: where /proc and /sys are found. Without them, as on macOS, 4 GiB are assumed.
    """
    available = 4 << 30
    with contextlib.suppress(OSError, ValueError, KeyError):
        available = 1024 * _figures(root / "proc/meminfo")["MemAvailable:"]
    for group, (limit, usage, *cached) in _control_groups(root):  # a container may have less than its machine
        with contextlib.suppress(OSError, ValueError):  # no such group, or no limit: "max"
            left = int((group / limit).read_text()) - int((group / usage).read_text())
            with contextlib.suppress(OSError, ValueError, KeyError):
                figures = _figures(group / "memory.stat")
                left += sum(figures[name] for name in cached)
            available = min(available, left)
    return max(available, 64 << 20)


# The limit of a control group, its usage, and the fields of memory.stat that are page cache.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file", "active_file")


def _control_groups(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folders that may limit this process: its control group, and every group that one is part of."""
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            base = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            group = base / place.lstrip("/")
            while group.is_relative_to(base):
                yield group, _VERSION_1 if controllers else _VERSION_2
                group = group.parent


def _figures(file: Path) -> dict[str, int]:
    """Return the numbers of a file with lines such as "MemFree: 1024 kB", by their names."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of a dictionary of tensors."""
    return sum(tensor.nbytes for tensor in tensors.values())


class _Outputs(TorchDispatchMode):
    """Adds up the sizes of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and not func.is_view:
                self.total += value.nbytes
        return result


def activation_bytes(function: Callable[[], object]) -> int:
    """The size of everything one evaluation of `function` computes: an upper bound of what is alive at once."""
    outputs = _Outputs()
    with torch.no_grad(), outputs:
        function()
    return outputs.total


class _Alive(TorchDispatchMode):
    """Finds out how much is alive at once of what operations return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._size = 0, 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and not func.is_view:
                self._add(StorageWeakRef(value.untyped_storage()), value.untyped_storage().nbytes())
        return result

    def _add(self, storage: StorageWeakRef, size: int) -> None:
        if storage.cdata in self._storages:  # an operation in place
            return
        self._storages[storage.cdata] = storage, size
        self._size += size
        if self._size > self.peak:  # by what is gone too
            self._storages = {key: known for key, known in self._storages.items() if not known[0].expired()}
            self._size = sum(size for _, size in self._storages.values())
            self.peak = max(self.peak, self._size)


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that is alive at once of what one evaluation of `function` computes.

    >>> peak_bytes(lambda: torch.ones(1000).add(1).add(1).add(1))
    8000
    """
    alive = _Alive()
    with torch.no_grad(), alive:
        function()
    return alive.peak


def most_that_fit(peak: Callable[[int], int], allowed: int, most: int) -> int:
    """About how many things, up to `most`, take no more than is allowed; 0 if not even one does.

    peak: what so many of them take, which is tried: more, as long as they fit, by what the last ones have added; and
        once some do not, halfway between, until an eighth is all that could be gained.

    >>> most_that_fit(lambda rows: 100 + 10 * rows, 170, 24)
    7
    """
    fits, taken, fails = 0, 0, most + 1
    rows = 1
    while fits < rows < fails:
        found = peak(rows)
        if found > allowed:
            fails = rows
        else:
            added = found - taken
            further = rows + (allowed - found) * (rows - fits) // added if added > 0 else most
            fits, taken = rows, found
        if fails <= most:
            rows = (fits + fails) // 2 if fails - fits > 1 + fits // 8 else fits
        else:
            rows = min(max(further, 2 if fits == 1 else 0), 4 * fits, most)
    return fits


_PEAKS: "WeakSet[Peak]" = WeakSet()


class Peak:
    """The most memory that was in use at once since this was made: of the device, or on the CPU of the process.

    On Linux the kernel's own high-water mark is set back; elsewhere it is that of the process's whole life.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._earlier = 0
        for other in list(_PEAKS):  # they see no further back than this once the mark is set back
            other._earlier = other.bytes or 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        _PEAKS.add(self)

    @property
    def bytes(self) -> int | None:
        """None where the platform does not tell."""
        mark = self._mark()
        return None if mark is None else max(self._earlier, mark)

    def _mark(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        with contextlib.suppress(OSError):
            status = Path("/proc/self/status").read_text()
            if found := re.search(r"VmHWM:\s+(\d+) kB", status):
                return 1024 * int(found[1])
        try:
            import resource
        except ImportError:  # not on this platform
            return None
        largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return largest if sys.platform == "darwin" else 1024 * largest
