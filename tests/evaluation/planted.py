"""Truths that are made of known scores, or of chance, and attributions to hold against them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from imprint import Attribution, Sources
from imprint.attribution.labels import Labels
from imprint.evaluation.metrics import Metric
from imprint.evaluation.subsets import Subsets
from imprint.evaluation.truth import Truth

N, QUERIES = 20, 8
GROUPS = Sources.by_label([i % 5 for i in range(N)])
HALVES = Subsets.halves(N, 40)
LOO = Subsets.without_each(N)
REMOVALS = Subsets.without_each(GROUPS)
UNIONS = Subsets.without_some(N, 30, share=0.3)
PAIRS = Subsets.without(GROUPS, [[], [0, 1], [4]])
KINDS = {"halves": HALVES, "single examples": LOO, "sources": REMOVALS, "unions": UNIONS}
every_kind = pytest.mark.parametrize("subsets", KINDS.values(), ids=KINDS.keys())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scores_for(subsets: Subsets, queries: int = QUERIES, seed: int = 0) -> Tensor:
    return draw(queries, len(subsets.sources), seed=seed)


def attribution(scores: Tensor, subsets: Subsets, **changes: Any) -> Attribution:
    sources = subsets.sources
    labels = Labels(subsets.n, sources.ids, sources.names, sources.sizes, "loss", "lower")
    return Attribution(replace(labels, **changes), scores)


def planted(
    scores: Tensor, subsets: Subsets, runs: int = 1, noise: float = 0.0, size: float = 1.0, seed: int = 1
) -> Truth:
    """A truth in which the scores are right but for their size: F = F₀ + size·Σ s/|S| over what a subset S has."""
    weight = torch.tensor([[1 / len(subsets.examples(index))] for index in range(len(subsets))], dtype=torch.float64)
    exact = 3 + size * weight * (subsets.membership().double() @ scores.T)
    values = exact + noise * weight * draw(runs, *exact.shape, seed=seed)
    return Truth(subsets, values, "loss")


def random_truth(subsets: Subsets, runs: int = 3) -> Truth:
    return Truth(subsets, draw(runs, len(subsets), QUERIES, seed=2), "loss")


def metric_of(metrics: list[Metric]) -> Metric:
    """The one that is defined per query."""
    (found,) = (metric for metric in metrics if len(metric.per_query))
    return found


def known(result: Attribution, **prints: Any) -> Attribution:
    """The same, with fingerprints."""
    return replace(result, labels=replace(result.labels, fingerprints=prints))
