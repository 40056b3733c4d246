"""What reading a query takes is measured for each length, and never by computing what would not fit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from imprint.batches import Batch
from imprint.readout.sizes import BySize, find_peak

Columns = dict[str, Tensor]


class Ruler:
    """Measures rows of tokens by a function of their length; keeps what it was given."""

    def __init__(self, takes: Callable[[int], int]) -> None:
        self.takes, self.given = takes, list[Columns]()

    def measure(self, batch: Batch, count: int) -> int:
        assert all(len(column) == count for column in batch.values())
        self.given.append(batch)
        return self.takes(batch["ids"].shape[1])

    @property
    def lengths(self) -> list[int]:
        return [batch["ids"].shape[1] for batch in self.given]


def make_rows(length: int, count: int = 1) -> Columns:
    return {"ids": torch.arange(length).repeat(count, 1), "weights": torch.zeros(count, length)}


def test_queries_of_about_a_length_are_measured_once_and_longer_ones_again() -> None:
    ruler = Ruler(lambda length: length)
    sizes = BySize(ruler.measure)
    assert [sizes.of(make_rows(length), 1) for length in (10, 9, 7, 6, 11, 100, 70)] == [10, 10, 10, 6, 11, 100, 100]
    assert ruler.lengths == [10, 6, 11, 100]


def test_few_rows_are_measured_and_all_of_their_tokens_count() -> None:
    ruler = Ruler(lambda length: length)
    BySize(ruler.measure).of(make_rows(10, count=64), 64)
    assert len(ruler.given[0]["ids"]) == 2 and bool((ruler.given[0]["weights"] == 1).all())


@pytest.mark.parametrize("takes", [lambda length: 1000 * length, lambda length: length**2], ids=["linear", "quadratic"])
def test_a_long_query_is_measured_step_by_step(takes: Callable[[int], int]) -> None:
    ruler = Ruler(takes)
    sizes = BySize(ruler.measure)
    assert find_peak(sizes, make_rows(1000), 1, 10**9) == takes(1000)
    assert ruler.lengths == [16, 32, 64, 128, 256, 512, 1000]
    assert find_peak(sizes, make_rows(900), 1, 10**9) == takes(1000) and len(ruler.lengths) == 7


@pytest.mark.parametrize("takes", [lambda length: 1000 * length, lambda length: length**2], ids=["linear", "quadratic"])
@pytest.mark.parametrize("length", [100, 1000, 100_000])
def test_what_does_not_fit_is_not_computed_and_what_fits_is_not_refused(
    takes: Callable[[int], int], length: int
) -> None:
    for most in (takes(length) - 1, takes(length), 10_000):
        ruler = Ruler(takes)
        found = find_peak(BySize(ruler.measure), make_rows(length), 1, most)
        assert (found <= most) == (takes(length) <= most)
        assert max(map(takes, ruler.lengths[1:]), default=0) <= 2 * most


def test_what_is_no_row_of_tokens_is_measured_as_it_is() -> None:
    def refuse_short(batch: Batch, count: int) -> int:
        if batch.shape[1] < 64:
            raise RuntimeError("shapes cannot be multiplied")
        return 7

    assert find_peak(BySize(refuse_short), torch.zeros(3, 64), 3, 10) == 7
    pictures = torch.zeros(3, 1, 8, 8), torch.zeros(3)
    assert find_peak(BySize(lambda batch, count: int(batch[0].numel() / count)), pictures, 3, 10) == 64
    assert find_peak(BySize(lambda batch, count: count), [torch.zeros(3, 8), "more"], 3, 10) == 3
