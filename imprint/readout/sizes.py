"""Measures queries once for each size that they have: what reading one takes depends on how long it is.

`Reader` asks how many sources, and how many queries, it may read at once.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from imprint.batches import Batch, is_columnar, leaves, map_tensors
from imprint.tensors.batching import attempt

T = TypeVar("T")
_NEAR = 1.5  # times a size: what a query of up to so much more takes is not measured again
_ROWS = 2  # queries that are measured
_FIRST = 16  # tokens that are measured first


class BySize(Generic[T]):
    """Measures some queries of a batch, unless queries of that size, or a little larger, were measured before."""

    def __init__(self, measure: Callable[[Batch, int], T]) -> None:
        self._measure, self._known = measure, dict[int, T]()

    def recall(self, batch: Batch, count: int) -> T | None:
        """Return the measure of the queries of a batch, if such were measured before."""
        size = _find_size(batch, count)
        near = [known for known in self._known if size <= known <= _NEAR * size]
        return self._known[min(near)] if near else None

    def of(self, batch: Batch, count: int) -> T:
        """Return the measure of the queries of a batch."""
        known = self.recall(batch, count)
        if known is None:
            known = self._known[_find_size(batch, count)] = self._measure(*_pick(batch, count))
        return known


def find_peak(peaks: BySize[int], batch: Batch, count: int, most: int) -> int:
    """Return how many bytes reading one query of a batch takes, or, once it is clear, something larger than `most`.

    Rows of tokens are measured from short ones on, each at most twice as long as the last, so that nothing is computed
    that would not fit: what a query takes grows with the square of its length at most.
    """
    width = _count_tokens(batch, count)
    length = _FIRST
    while width is not None and length < width:
        shorter = map_tensors(lambda rows, end=length: rows[:, :end], batch)  # type: ignore[misc]
        peak, failure = attempt(lambda: peaks.of(shorter, count))  # noqa: B023
        if failure is not None:  # these are no tokens: rows cannot be shortened
            break
        assert peak is not None
        following = min(2 * length, width)
        if (estimate := int(peak * (following / length) ** 2)) > 2 * most:
            return estimate
        length = following
    return peaks.of(batch, count)


def pick_rows(batch: Batch, first: int, last: int) -> Batch:
    """Return some queries of a batch of columns."""
    return map_tensors(lambda tensor: tensor[first:last], batch)


def take_some(batch: Batch, count: int) -> tuple[Batch, int]:
    """Return the first queries of a batch, and how many they are: all, if it cannot be divided."""
    return (pick_rows(batch, 0, _ROWS), min(count, _ROWS)) if is_columnar(batch, count) else (batch, count)


def _pick(batch: Batch, count: int) -> tuple[Batch, int]:
    """Return the queries that are measured. Of rows of tokens all count, since others may weigh other ones."""
    some = take_some(batch, count)
    return some if _count_tokens(batch, count) is None else (map_tensors(_weigh_all, some[0]), some[1])


def _weigh_all(rows: Tensor) -> Tensor:
    return torch.ones_like(rows) if rows.is_floating_point() else rows


def _find_size(batch: Batch, count: int) -> int:
    return sum(leaf.numel() for leaf in leaves(batch) if isinstance(leaf, Tensor)) // count


def _count_tokens(batch: Batch, count: int) -> int | None:
    """Return how many tokens the rows of a batch have; None if its tensors are not of one width."""
    if not is_columnar(batch, count):
        return None
    widths = {tuple(leaf.shape[1:]) for leaf in leaves(batch)}
    width = widths.pop()
    return int(width[0]) if not widths and len(width) == 1 else None
