"""Fills rows of tokens up to one length, and warns where one long row makes all others mostly padding."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

logger = logging.getLogger(__name__)
_MOST = 0.5  # of the tokens may be padding without a warning
_FEWEST_ROWS, _FEWEST_TOKENS = 32, 10_000  # below which nobody waits


def pad_rows(rows: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> dict[str, Tensor]:
    """Return rows of different lengths as columns, filled up on the right with token 0 of weight 0."""
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[*row, *[0] * (length - len(row))] for row in rows]),
        "weights": torch.tensor([[*row, *[0.0] * (length - len(row))] for row in weights]),
    }


def pad_columns(batch: Any, most: int | None) -> Any:
    """Pad columns of tokens and weights to a common length, of `most` at most; leave other batches as they are.

    Common lengths are 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768 and so on.
    """
    if not isinstance(batch, Mapping) or set(batch) != {"input_ids", "weights"} or batch["input_ids"].dim() != 2:
        return batch
    length = batch["input_ids"].shape[1]
    step = max(16, 1 << max(0, (length - 1).bit_length() - 2))
    common = min(-(-length // step) * step, most or math.inf)
    if batch["weights"].shape != batch["input_ids"].shape or common <= length:
        return batch
    return {name: F.pad(column, (0, int(common) - length)) for name, column in batch.items()}


def warn_of_padding(rows: Sequence[Sequence[int]], remedy: str, count_rows: Callable[[int, int], int]) -> None:
    """Warn, in the log, where more than half of the tokens of many rows are padding; name a shorter length.

    remedy: what a shorter length does to longer rows.
    count_rows: returns how many rows one of so many tokens becomes at some length.
    """
    sizes = sorted(map(len, rows))
    longest, computed = sizes[-1], len(sizes) * sizes[-1]
    wasted = 1 - sum(sizes) / computed
    if wasted <= _MOST or len(sizes) < _FEWEST_ROWS or computed < _FEWEST_TOKENS:
        return
    usual = sizes[math.ceil(0.9 * len(sizes)) - 1]
    length = max(2, usual if usual <= longest / 1.5 else sizes[len(sizes) // 2])
    shorter = length * sum(starmap(count_rows, ((size, length) for size in sizes)))
    logger.warning(
        "%.0f%% of the tokens in %s rows are padding, which is computed like any other: all rows are as long as the "
        "longest, which has %d tokens, and 90%% of them have at most %d. A smaller length= %s: length=%d makes all "
        "work about %.2g times faster.",
        *(100 * wasted, f"{len(sizes):,}", longest, usual, remedy, length, computed / shorter),
    )
