"""On planted problems, 95% intervals contain the truth in 90 to 99% of 200 repetitions.

Each run is the truth plus an error that all its queries share, as imprints have it, plus a small one of each query.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from imprint import Attribution
from tests.attribution.results import make_labels, make_repeated

REPETITIONS, QUERIES, SOURCES, N = 200, 30, 6, 10
GROUPS = {"x": ["s0", "s1", "s2"], "y": ["s3"]}
TRUTH = torch.randn(QUERIES, SOURCES, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def draw_runs(count: int, seed: int, checkpoints: int = 1) -> Tensor:
    """Scores of some runs, each with so many checkpoints, shape (runs · checkpoints, queries, sources)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shared = draw(count, 1, SOURCES).repeat_interleave(checkpoints, 0)
    return -N * TRUTH + 3 * shared + draw(count * checkpoints, QUERIES, SOURCES)


def share_covered(make: Callable[[int], tuple[Attribution, Tensor]], level: float = 0.95) -> float:
    """How often the interval of the first effect contains the truth."""
    covered = 0
    for seed in range(REPETITIONS):
        result, truth = make(seed)
        low, high = result.interval(level)
        covered += bool(low[0, 0] <= truth[0, 0] <= high[0, 0])
    return covered / REPETITIONS


def mean_of_groups(values: Tensor) -> Tensor:
    return values[:, :3].sum(1, keepdim=True).mean(0, keepdim=True)


CLAIMS: dict[str, Callable[[int], tuple[Attribution, Tensor]]] = {
    "a single effect": lambda seed: (make_repeated(draw_runs(4, seed)), TRUTH),
    "of two runs": lambda seed: (make_repeated(draw_runs(2, seed)), TRUTH),
    "of unequal shares": lambda seed: (make_repeated(draw_runs(4, seed), (0.4, 0.3, 0.2, 0.1)), TRUTH),
    "a mean over queries": lambda seed: (make_repeated(draw_runs(4, seed)).mean(), TRUTH.mean(0, keepdim=True)),
    "a mean over some": lambda seed: (make_repeated(draw_runs(4, seed))[:7].mean(), TRUTH[:7].mean(0, keepdim=True)),
    "a group": lambda seed: (make_repeated(draw_runs(4, seed)).group(GROUPS), TRUTH[:, :3].sum(1, keepdim=True)),
    "a mean of groups": lambda seed: (make_repeated(draw_runs(4, seed)).group(GROUPS).mean(), mean_of_groups(TRUTH)),
    "a difference": lambda seed: (
        make_repeated(draw_runs(5, seed)) - make_repeated(0.5 * draw_runs(3, 1000 + seed), names="xyz"),
        0.5 * TRUTH,
    ),
    "a mean of differences": lambda seed: (
        (make_repeated(draw_runs(5, seed)) - make_repeated(0.5 * draw_runs(5, 1000 + seed), names="vwxyz")).mean(),
        0.5 * TRUTH.mean(0, keepdim=True),
    ),
    "a difference of the same runs": lambda seed: (
        make_repeated(draw_runs(4, seed)) - make_repeated(0.5 * draw_runs(4, seed)),
        0.5 * TRUTH,
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_intervals_contain_the_truth_about_as_often_as_they_say(claim: str) -> None:
    assert 0.9 <= share_covered(CLAIMS[claim]) <= 0.99


def test_other_levels_hold_too() -> None:
    assert 0.43 <= share_covered(CLAIMS["a mean over queries"], level=0.5) <= 0.57
    assert share_covered(CLAIMS["a mean over queries"], level=0.99) >= 0.97


def test_dividing_by_the_root_of_the_queries_would_claim_far_too_much() -> None:
    """The naive interval of a mean over queries: as if their errors were independent."""
    covered = 0
    for seed in range(REPETITIONS):
        result = make_repeated(draw_runs(4, seed))
        low, high = result.interval()
        half = (high - low).square().mean(0).sqrt()[0] / 2 / QUERIES**0.5
        covered += bool((result.removal_effect.mean(0)[0] - TRUTH.mean(0)[0]).abs() <= half)
    assert covered / REPETITIONS < 0.6


def test_the_spread_over_checkpoints_of_one_run_is_too_small() -> None:
    """They share what the seed does: this is why such errors are called a lower bound."""

    def make(seed: int) -> tuple[Attribution, Tensor]:
        return make_repeated(draw_runs(1, seed, checkpoints=4), over="checkpoints"), TRUTH

    assert share_covered(make) < 0.8


def test_intervals_of_a_repeated_run_contain_the_effect_without_chance() -> None:
    """A run deviates by chance with and without a source; two runs with a perturbed start show how far."""
    covered = dict.fromkeys(("one", "two", "mean"), 0)
    for seed in range(REPETITIONS):
        generator = torch.Generator().manual_seed(seed)
        chance = torch.randn(3 + 2, 4, generator=generator, dtype=torch.float64)  # the run, two more, two removals
        truth = TRUTH[:4, :2]
        labels = make_labels(
            source_ids=("a", "b"), source_names=("a", "b"), source_sizes=(1, 1), question="this_run", removes=True
        )
        result = Attribution(labels, -N * (truth + chance[3:].T - chance[:1].T), noise_changes=chance[1:3] - chance[0])
        for name, found, true in (
            ("one", result, truth),
            ("two", result.group({"both": ["a", "b"]}), truth.sum(1, keepdim=True)),
            ("mean", result.mean(), truth.mean(0, keepdim=True)),
        ):
            low, high = found.interval()
            covered[name] += bool(low[0, 0] <= true[0, 0] <= high[0, 0])
    assert all(0.9 <= count / REPETITIONS <= 0.99 for count in covered.values()), covered
