"""What counts as "this model cannot be vectorised", and what must reach the caller."""

import pytest
import torch

from imprint.errors import ConcurrencyError, ImprintError, TaskError
from imprint.tensors.batching import attempt, vectorise_or_loop
from imprint.tensors.vectors import over_rows


def _total(vectorise: bool, rows: torch.Tensor) -> torch.Tensor:
    def one(row: dict[str, torch.Tensor]) -> torch.Tensor:
        return row["x"] * (2 if row["x"].sum().item() > 0 else 3)  # `.item()` has no batching rule

    found: torch.Tensor = over_rows(one, {"x": rows}, vectorise=vectorise)
    return found


def test_a_model_that_vmap_cannot_run_is_looped_over_with_the_reason() -> None:
    rows = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    found, reason = vectorise_or_loop(lambda vectorise: _total(vectorise, rows))
    assert torch.equal(found, torch.tensor([[2.0, 4.0], [-3.0, -6.0]]))
    assert reason is not None and reason.startswith("RuntimeError: ") and "\n" not in reason


def test_what_can_be_vectorised_runs_once() -> None:
    calls: list[bool] = []

    def compute(vectorise: bool) -> int:
        calls.append(vectorise)
        return len(calls)

    assert vectorise_or_loop(compute) == (1, None) and calls == [True]


@pytest.mark.parametrize(
    "error", [ImprintError, TaskError, ConcurrencyError, torch.OutOfMemoryError, MemoryError, KeyboardInterrupt]
)
def test_errors_that_no_other_way_would_cure_propagate(error: type[BaseException]) -> None:
    def fail(*_: bool) -> None:
        raise error("what happened")

    with pytest.raises(error, match="what happened"):
        attempt(fail)
    with pytest.raises(error, match="what happened"):
        vectorise_or_loop(fail)


def test_an_error_of_the_loop_is_the_models_own() -> None:
    def fail(vectorise: bool) -> None:
        raise ValueError("vmap" if vectorise else "the loop")

    with pytest.raises(ValueError, match="the loop"):
        vectorise_or_loop(fail)
