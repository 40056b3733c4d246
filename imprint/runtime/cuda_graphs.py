"""Records a computation on a GPU as a CUDA graph, which repeats all of its operations with one launch.

A graph repeats the operations, at the same addresses, and not the Python code that launched them. `readout.captured`
decides what may be repeated like that.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from imprint.compat import TorchDispatchMode, abandon_capture, without_values
from imprint.errors import ReadoutError

Compute = Callable[[], Tensor]
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class Recorder:
    """Records computations on one device; their graphs share memory, so that no two may run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs, self._pool = WeakSet[torch.cuda.CUDAGraph](), torch.cuda.graph_pool_handle()

    def rehearse(self, compute: Compute) -> Tensor:
        """Compute once where it will be recorded; raise an error if a graph could not repeat it.

        Afterwards everything exists that torch and its libraries make on first use. An error during a recording itself
        would leave torch's allocator in a bad state.
        """
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream), without_values(), Unrepeatable(self._device), MadeInPlace():
                found = compute()
            torch.cuda.synchronize()
        return found

    def record(self, compute: Compute) -> Compute:
        """Return what repeats a computation, and gives its result in a tensor of its own."""
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch refuses a pool again that all graphs have left
            self._pool = torch.cuda.graph_pool_handle()
        into = torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), self._undisturbed(), without_values(), into, MadeInPlace():
            found = compute()
        self._graphs.add(graph)

        def repeat() -> Tensor:
            graph.replay()
            return found.clone()

        return repeat

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Abandon a recording that fails; what is freed meanwhile, such as another graph, could make it fail."""
        try:
            with without_collection(), torch.cuda.stream(self._stream):  # which torch leaves set if a capture fails
                yield
        except BaseException:
            abandon_capture(self._device, self._pool)
            raise


@contextmanager
def without_collection() -> Iterator[None]:
    """Have Python collect no garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return a recorder for a device, if it has graphs."""
    return Recorder(device) if device.type == "cuda" else None


class MadeInPlace(TorchFunctionMode):
    """Has `torch.tensor` of one number fill a tensor where it lies: by itself it copies it from the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **named)
        return func(*args, **named)


class Unrepeatable(TorchDispatchMode):
    """Refuses operations that a graph could not repeat: those that read values, and copies from and to the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, given = func._schema.name, [value for value in args if isinstance(value, Tensor)]
        if name in _COPIES:
            refused = len({tensor.device for tensor in (*given, result)}) > 1
        elif name in _INDEXING:
            refused = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        else:  # `torch.tensor` comes from the CPU, and ends with `lift_fresh`
            refused = name == "aten::lift_fresh" or bool(_READS_VALUES.intersection(func.tags))
        if refused and any(tensor.device.type == self._device for tensor in (*given, result)):
            raise ReadoutError(f"the model calls {name.removeprefix('aten::')}, which a CUDA graph cannot repeat")
        return result
