"""Norms of stacked vectors."""

import pytest
import torch

from imprint.tensors import vectors
from imprint.tensors.vectors import row_norms


@pytest.mark.parametrize("widened", [1, 5, 7, 1 << 20])
def test_norms_do_not_depend_on_how_many_rows_are_widened_at_once(
    widened: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    stack = {"a": torch.randn(6, 2, 3, generator=generator), "b": torch.randn(6, generator=generator)}
    monkeypatch.setattr(vectors, "_WIDENED", widened)
    flat = torch.cat([tensor.reshape(6, -1) for tensor in stack.values()], dim=1).double()
    assert torch.allclose(row_norms(stack), flat.norm(dim=1), rtol=1e-12)


def test_norms_of_no_values_are_zero() -> None:
    assert row_norms({"a": torch.zeros(2, 0)}).tolist() == [0.0, 0.0]
