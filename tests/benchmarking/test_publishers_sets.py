"""Correlations with sets that were really left out, and differences of them, have intervals that contain them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from publishers_sets import Sets, find_removed

SOURCES, QUERIES, N = 8, 20, 100


@pytest.fixture
def made() -> tuple[Sets, torch.Tensor, torch.Tensor]:
    """Sets of which two runs tell the effects, scores close to the truth, and scores further away."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(QUERIES, SOURCES, generator=generator, dtype=torch.float64)
    removed = torch.rand(24, SOURCES, generator=generator) < 0.4
    noise = torch.randn(2, QUERIES, 24, generator=generator, dtype=torch.float64)
    actual = -(scores @ removed.double().T) / N + 0.002 * noise
    far = scores + 2 * torch.randn(QUERIES, SOURCES, generator=generator, dtype=torch.float64)
    return Sets(removed, actual.numpy(), N), scores, far


def test_a_nearly_perfect_correlation_lies_in_its_interval(made: Any) -> None:
    sets, near, far = made
    for scores in (near, far):
        found = sets.correlate(scores)
        assert found["low"] <= found["value"] <= found["high"]
        assert found["value"] == sets.value(scores)
    assert sets.correlate(near)["low"] > sets.correlate(far)["high"]
    assert sets.correlate(near)["slope"] == pytest.approx(1, abs=0.05)
    assert sets.correlate(10 * near)["slope"] == pytest.approx(0.1, abs=0.005)


def test_what_one_is_ahead_the_other_is_behind(made: Any) -> None:
    sets, near, far = made
    ahead, behind = sets.differ(near, far), sets.differ(far, near)
    assert ahead["value"] == pytest.approx(sets.value(near) - sets.value(far))
    assert ahead["low"] > 0
    assert [ahead["low"], ahead["high"]] == pytest.approx([-behind["high"], -behind["low"]])
    assert sets.differ(near, near)["value"] == 0


def test_noise_of_the_ground_truth_lowers_agreement_and_ceiling(made: Any) -> None:
    sets, near, _ = made
    assert 0 < sets.agreement < sets.value(near) <= 1
    assert sets.agreement < sets.ceiling < 1
    one = Sets(sets.removed, sets.actual[:1], N)
    assert one.correlate(near)["low"] < one.correlate(near)["value"]  # without an interval over runs


def test_the_run_without_a_removal_is_no_set() -> None:
    membership = torch.tensor([[True, True], [False, True], [True, False]])
    assert find_removed(membership).tolist() == [[True, False], [False, True]]
