"""Repeat readouts as CUDA graphs: on a GPU a query otherwise waits for hundreds of kernels to be launched by Python.

`Reader` asks `Captured` for the scores of a block before it computes them. A block that is read a second time for
queries of the same shape is captured, and from then on repeated with the queries copied in. A graph reads the present
values of the tensors on its device, but takes the way through the code that Python took when it was captured. Therefore

- graphs are dropped once the imprints have moved, or the model has another copy because its modules changed; what they
  read lives as long as they do;
- the task checks every batch by its values before a graph computes with it (`Task.check_batch`);
- what is not known to repeat itself is captured only if the user says so, and no query of a user's own measurement is
  padded;
- a graph whose first scores differ from plain ones by more than rounding is not used;
- its 1st, 2nd, 4th, 8th … repetition is compared with computing the same by Python. If they differ, nothing is captured
  any more, the call that noticed is read again, and a warning says since when nothing was compared.

All calls come from readouts, which take turns (`Task.evaluating`) and wait for their scores before the turn ends.
"""

import logging
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from imprint.batches import Batch, leaves, map_tensors
from imprint.compat import TorchDispatchMode, has_convolutions, without_values
from imprint.errors import ReadoutError, first_line
from imprint.model.replica import tensors_of
from imprint.readout.budget import Activations
from imprint.runtime.cuda_graphs import recorder_for
from imprint.task import Task

logger = logging.getLogger(__name__)
SWITCH = "IMPRINT_CAPTURE"
"""The environment variable that, at 0, has nothing captured unless a reader asks for it."""
_GRAPHS = 8  # at once
_DROPS = 3  # of a block's graph, after which it is read plainly
_BLOCKS = 1024  # that are remembered
_AGREEING = 1e-5  # of the largest score
_ROUNDED = {torch.float64: 1e-8, torch.float32: 1e-4}  # of the largest score: between queries as they are and padded
_ROUNDED_MORE = 0.02  # in half precision or TF32, and in float32 where scores are differences of values
_LOWERED = ("tf32", "bf16")  # precisions of float32
_INTERVAL = 1024  # repetitions between two comparisons, at most
Reading = Callable[[Batch, int], Tensor]


@dataclass
class _Graph:
    """A captured readout.

    batch: the tensors that it reads the queries from, and `others`: the rest of what it reads.
    compute: the same by Python, and with the same operations.
    repeated: how often it was used, and `unchecked` how often since it was last compared.
    """

    batch: Batch
    others: tuple[Tensor, ...]
    compute: Callable[[], Tensor]
    repeat: Callable[[], Tensor]
    repeated: int = 0
    unchecked: int = 0


@dataclass
class _Block:
    """Some sources at a checkpoint, read for queries of one shape.

    depends_on: the measurement, and the addresses of imprints.
    """

    depends_on: tuple[Any, ...]
    graph: _Graph | None = None
    dropped: int = 0
    plain: bool = False  # for good


class Captured:
    """The graphs of one reader. Where `read` returns None, scores are to be computed plainly.

    room: bytes that graphs may take; 0 afterwards where there will be none.
    capture: whether to capture any task, or none; by default those that are known to repeat themselves.
    own: whether what is measured is the task's own measurement.
    """

    def __init__(self, task: Task, room: int, *, capture: bool | None, own: bool) -> None:
        self._task, self._device, self._any, self._own = task, task.device, bool(capture), own
        self._blocks = OrderedDict[Hashable, _Block]()
        self._replica: nn.Module | None = None  # that all graphs compute with
        self._unchecked = 0  # repetitions of dropped graphs
        self.warnings: tuple[str, ...] = ()
        may = own and os.environ.get(SWITCH) != "0" if capture is None else capture
        self._recorder = recorder_for(self._device) if may else None
        self.room = room if self.is_on else 0

    @property
    def is_on(self) -> bool:
        """Whether anything may be captured now."""
        return self._recorder is not None and not self.warnings and (self._any or self._task.repeats)

    def read(
        self,
        place: tuple[int, int, int],
        queries: tuple[Batch, int],
        imprints: Sequence[Tensor],
        prepare: Callable[[], Reading],
        activations: Callable[[Batch, int], Activations],
        *,
        linear: bool,
    ) -> Tensor | None:
        """Return the scores of a block by its graph, shape (sources, queries), if capturing `is_on`.

        place: the checkpoint, and the first and last source of the block.
        queries: a batch, and how many queries it has.
        prepare: returns what computes the scores of a batch; it may read values of imprints.
        activations: tells what reading a batch computes: there must be room for it for as long as there is a graph.
        linear: whether scores are derivatives; as differences of values they have many times their rounding.
        """
        batch, count = queries
        if torch.is_autocast_enabled(self._device.type) or not _is_on(batch, self._device):
            return None
        padded = self._task.pad_batch(batch) if self._own and self._task.repeats else batch
        key = (*place, count, _describe(padded), _settings())
        self._follow(self._task.replica)
        block = self._look_up(key, (self._task.measure, *(tensor.data_ptr() for tensor in imprints)))
        if block is None or block.plain:
            return None
        self._task.check_batch(batch)
        if block.graph is None:
            if activations(padded, count).bytes(place[2] - place[1], count) > self.room:
                block.plain = True
                return None
            return self._capture(block, queries, padded, imprints, prepare, linear)
        for mine, given in zip(leaves(block.graph.batch), leaves(padded), strict=True):
            mine.copy_(given)
        return self._repeat(block.graph)

    def _follow(self, replica: nn.Module) -> None:
        """Forget everything about another copy of the model."""
        if replica is not self._replica:
            for block in self._blocks.values():
                self._drop(block)
            self._blocks.clear()
            self._replica = replica

    def _look_up(self, key: Hashable, depends_on: tuple[Any, ...]) -> _Block | None:
        """Return a block that was read before; None where it was not, or what its graph depends on has changed."""
        block = self._blocks.get(key)
        if block is None:
            self._blocks[key] = _Block(depends_on)
            if len(self._blocks) > _BLOCKS:
                self._drop(self._blocks.popitem(last=False)[1])
            return None
        self._blocks.move_to_end(key)
        if block.depends_on == depends_on:
            return block
        self._drop(block)
        block.depends_on = depends_on
        return None

    def _capture(
        self,
        block: _Block,
        queries: tuple[Batch, int],
        padded: Batch,
        imprints: Sequence[Tensor],
        prepare: Callable[[], Reading],
        linear: bool,
    ) -> Tensor | None:
        """Capture a block and return its first scores; None if that is not possible."""
        recorder, static = self._recorder, map_tensors(lambda tensor: tensor.detach().clone(), padded)
        assert recorder is not None
        with_graphs = [other for other in self._blocks.values() if other.graph is not None]
        if len(with_graphs) >= _GRAPHS:
            self._drop(with_graphs[0])
        try:
            reading = prepare()
            compute = lambda: reading(static, queries[1])  # noqa: E731
            with _Precision() as precision:
                expected = recorder.rehearse(compute)
            apart = _difference(expected, reading(*queries))
            if apart > precision.rounding(self._task.replica, linear):
                raise ReadoutError(f"without the checks of values, and padded, scores differ by {apart:.2g}")
            repeat = recorder.record(compute)
            others = (*imprints, *tensors_of(self._task.replica))  # a module may forget what it had when captured
            block.graph = _Graph(static, others, compute, repeat)
        except Exception as error:  # any, as in `attempt`: computing plainly will raise it again if it is the user's
            logger.info("a readout is not captured: %s", first_line(error))
            block.plain = True
            return None
        return self._repeat(block.graph, expected)

    def _repeat(self, graph: _Graph, expected: Tensor | None = None) -> Tensor | None:
        """Return the scores that a graph gives; None, and the end of all graphs, if computing plainly differs."""
        found = graph.repeat()
        graph.repeated += 1
        if graph.repeated & (graph.repeated - 1) and graph.repeated % _INTERVAL:
            graph.unchecked += 1
            return found
        if expected is None:
            with without_values():
                expected = graph.compute()
        apart = _difference(found, expected)
        if apart <= _AGREEING:
            graph.unchecked = 0
            return found
        for block in self._blocks.values():
            self._drop(block)
        self.warnings = (_explain(apart, self._unchecked),)
        logger.warning("%s", self.warnings[0])
        return None

    def _drop(self, block: _Block) -> None:
        if block.graph is not None:
            self._unchecked += block.graph.unchecked
            block.graph, block.dropped = None, block.dropped + 1
            block.plain = block.dropped >= _DROPS


class _Precision(TorchDispatchMode):
    """Finds the lowest precision that anything is computed in.

    Neither the weights nor the scores tell: a float64 model may compute attention in float32, and a measurement may
    turn autocast on by itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lowest = torch.float64

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype.itemsize < self._lowest.itemsize:
                self._lowest = leaf.dtype
        return result

    def rounding(self, model: nn.Module, linear: bool) -> float:
        """Return how far rounding may move scores, relative to the largest."""
        if self._lowest == torch.float32 and not (linear and _keeps_float32(model)):
            return _ROUNDED_MORE
        return _ROUNDED.get(self._lowest, _ROUNDED_MORE)


def _keeps_float32(model: nn.Module) -> bool:
    """Return whether a model's products of float32 are computed in float32, not in TF32 or bfloat16."""
    products, convolutions = _float32_precisions()
    return products not in _LOWERED and not (convolutions in _LOWERED and has_convolutions(model))


def _float32_precisions() -> tuple[str, str]:
    """Return in which precision a GPU computes matrix products and convolutions of float32."""
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision  # type: ignore[attr-defined]


def _explain(apart: float, unchecked: int) -> str:
    doubt = f" Up to {unchecked} readouts before were not compared: ask for them again." if unchecked else ""
    return (
        f"the model does not repeat itself: a captured readout is {apart:.2g} of the largest score away from computing "
        f"it plainly, as is done from now on.{doubt} If code of the model or of the measurement depends on what "
        f"changes between queries, switch capturing off: Reader(capture=False) or {SWITCH}=0."
    )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest score; infinity if other scores are not finite."""
    finite = expected.isfinite()
    others = (scores.masked_fill(finite, 0.0).nan_to_num() for scores in (found, expected))
    if not (torch.equal(found.isfinite(), finite) and torch.equal(*others)):
        return math.inf
    found, expected = (torch.where(finite, scores, 0.0).double() for scores in (found, expected))
    largest, apart = float(expected.abs().max()), float((found - expected).abs().max())
    return apart / largest if largest else math.inf * apart if apart else 0.0


def _is_on(batch: Batch, device: torch.device) -> bool:
    """Return whether a batch is nothing but tensors on a device, which can be copied in."""
    return all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves(batch))


def _describe(batch: Batch) -> Hashable:
    """Describe the containers of a batch, and the shapes and dtypes of its tensors."""
    return type(batch), repr(map_tensors(lambda tensor: (tensor.shape, tensor.dtype), batch))  # type: ignore[arg-type, return-value]


def _settings() -> Hashable:
    """Return the settings of torch by which operations are chosen."""
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.are_deterministic_algorithms_enabled()
    return torch.get_default_dtype(), *_float32_precisions(), benchmark, deterministic
