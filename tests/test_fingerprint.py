"""Fingerprints tell what differs, and do not tell what is only cut or placed otherwise."""

import torch

from imprint.fingerprint import of_batches


def of(*columns: torch.Tensor) -> str:
    return of_batches([(len(columns[0]), columns)])


def test_queries_of_the_same_bytes_and_another_kind_are_others() -> None:
    numbers = torch.arange(8, dtype=torch.int32)
    assert of(numbers) != of(numbers.view(torch.float32))
    rows = numbers.reshape(2, 4)
    assert of(rows) != of(rows.reshape(2, 2, 2))
    assert of(rows) != of(rows[:, :2], rows[:, 2:])


def test_queries_may_be_cut_into_any_batches() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    parts = [(2, (x[:2], y[:2])), (4, (x[2:], y[2:]))]
    assert of_batches(parts) == of(x, y)
    assert of_batches(reversed(parts)) != of(x, y)
