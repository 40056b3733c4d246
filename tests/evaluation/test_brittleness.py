"""Predictions are held up by examples, and flip without those an attribution names."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import imprint
from imprint import Attribution, DataError, Plan, Sources, Task
from imprint.data import Data
from imprint.evaluation.brittleness import Brittleness, brittleness
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training

TRAINING = Training(epochs=30, lr=0.5, batch_size=24)
SOURCES = Sources.per_example(24)


def build() -> nn.Module:
    return nn.Linear(4, 2)


def data() -> tuple[Tensor, Tensor]:
    """Four directions; each query stands on the six examples of its own, and nothing else supports it."""
    directions = torch.eye(4).repeat_interleave(6, 0)
    noise = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return 2 * directions + 0.05 * noise, torch.tensor([0, 1, 0, 1]).repeat_interleave(6)


QUERIES = (2 * torch.eye(4), torch.tensor([0, 1, 0, 1]))


class Counting:
    """A `train(subset, seed)` that counts what is trained."""

    def __init__(self, together: Together) -> None:
        self.together, self.models = together, 0

    def __call__(self, subset: Tensor, seed: int) -> nn.Module:
        self.models += 1
        return self.together(subset, seed)


def asked(
    measure: str | None = "margin",
    of: Callable[[Attribution], Attribution] = lambda result: result,
    sources: Sources = SOURCES,
    queries: Any = QUERIES,
    counted: bool = False,
    attributed: str | None = "margin",
    **options: Any,
) -> Brittleness:
    """Brittleness of an attribution, `of` which may make another; if `counted`, nothing may be trained."""
    x, y = data()
    together = Together(build, Task.classifier, Data((x, y), device=torch.device("cpu")), TRAINING)
    task = Task.classifier(together(torch.arange(24), 0), measure=measure)
    store = imprint.simulate(task, (x, y), SOURCES, Plan(steps=20, lr=0.5), progress=False)
    result = of(imprint.attribute(Task.classifier(task.model, measure=attributed), store, QUERIES, progress=False))
    train = Counting(together)
    given: dict[str, Any] = {"removed": (1, 6), "runs": 2, "progress": False, **options}
    try:
        return brittleness(train if counted else together, task, queries, result, sources, **given)
    finally:
        assert not counted or train.models == 0


def test_a_prediction_flips_or_weakens_without_what_holds_it_up_and_not_without_the_rest() -> None:
    found = asked()
    assert found.removed == (1, 6)
    assert found.before == 0
    assert found.shares[0].estimate.value == 0  # one of six is not missed
    assert found.shares[1].estimate.value > found.at_random[1].estimate.value
    assert "6 removed" in str(found) and "none removed: 0% wrong" in str(found)


@pytest.mark.parametrize("measure", ["margin", None], ids=["margin", "loss"])
def test_what_helps_is_removed_whether_the_attribution_is_of_a_margin_or_of_a_loss(measure: str | None) -> None:
    """Without its own six examples a query is as good as undecided; the others stand as they stood."""
    found = asked(attributed=measure, removed=(6,), runs=8)
    assert found.shares[0].estimate.value > 0.3
    assert found.shares[0].estimate.value > found.at_random[0].estimate.value + 0.2


def test_each_query_is_asked_about_the_removal_that_is_its_own() -> None:
    """Only the first query is told by the attribution what holds it up; the others lose what is not theirs."""

    def of(result: Attribution) -> Attribution:
        helpful = torch.zeros(4, 24)
        helpful[0, :6] = 1  # of the first query's own direction
        helpful[1:, :6] = 1
        return replace(result, scores=helpful)

    found = asked(of=of, removed=(6,), runs=8)
    assert found.shares[0].per_query.shape == (4,)
    assert found.shares[0].per_query[0] > 0.2
    assert found.shares[0].per_query[1:].max() == 0
    assert found.shares[0].estimate.value == pytest.approx(found.shares[0].per_query.mean())
    assert found.shares[0].estimate.low <= found.shares[0].estimate.value <= found.shares[0].estimate.high
    assert "flipped without 6" in str(found.shares[0])
    assert found.shares[0].over == "runs and queries"
    assert asked(of=of, removed=(6,), runs=1).shares[0].over == "queries"


def test_sources_need_not_know_how_many_examples_there_are() -> None:
    assert str(asked(sources=replace(SOURCES, length=None))) == str(asked())


def test_queries_may_come_in_batches_that_can_be_read_once() -> None:
    x, y = QUERIES
    assert str(asked(queries=iter([(x[:3], y[:3]), (x[3:], y[3:])]))) == str(asked())


def test_another_seed_draws_another_chance() -> None:
    first, again, other = (asked(seed=seed, removed=(18, 21)).at_random for seed in (0, 0, 1))
    assert [metric.per_query.tolist() for metric in first] == [metric.per_query.tolist() for metric in again]
    assert [metric.per_query.tolist() for metric in first] != [metric.per_query.tolist() for metric in other]


def test_queries_that_are_wrong_from_the_start_are_told() -> None:
    x, y = QUERIES
    with pytest.warns(UserWarning, match="25% of the queries are wrong with nothing removed"):
        found = asked(queries=(x, torch.cat([1 - y[:1], y[1:]])), of=unknown)
    assert found.before == 0.25


def unknown(result: Attribution) -> Attribution:
    """The same, with nothing known of its queries."""
    return replace(result, labels=replace(result.labels, fingerprints={}))


def elsewhere(result: Attribution) -> Attribution:
    return replace(result, labels=replace(result.labels, source_ids=("other", *result.labels.source_ids[1:])))


SWAPPED = replace(SOURCES, members=SOURCES.members[::-1])


def flat(result: Attribution) -> Attribution:
    scores = result.scores.clone()
    scores[2] = 0.1
    return replace(result, scores=scores)


def undirected(result: Attribution) -> Attribution:
    return replace(result, labels=replace(result.labels, measure="kindness", better=None))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"measure": None}, 'needs measure="margin"'),
        ({"of": undirected}, "measures 'kindness', for which it is unknown whether lower or higher is better"),
        ({"of": lambda result: result[:3]}, "the result has 3 queries, but 4 are given"),
        ({"of": lambda result: result[[3, 2, 1, 0]]}, "not of all queries in their order: row 0 is query 3"),
        ({"queries": (QUERIES[0].flip(0), QUERIES[1].flip(0))}, "other queries than the ground truth"),
        ({"of": elsewhere}, "other sources than the ground truth: number 0 is 'other', there '0'"),
        ({"sources": Sources.per_example(20)}, "other sources than the ground truth: 24 sources, there 20"),
        ({"sources": SWAPPED}, "sources with other members than in the ground truth"),
        ({"of": lambda result: replace(result, scores=result.scores * torch.nan)}, "scores must be finite"),
        ({"of": flat}, "the scores of query 2 are the same for every source"),
        ({"of": lambda result: result.scores}, "needs an Attribution and its Sources, got Tensor and Sources"),
        ({"sources": 24}, "got Attribution and int"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"removed": 5}, "removed must be whole numbers from 1 to 23"),
        ({"removed": ()}, "removed must be whole numbers from 1 to 23"),
        ({"removed": (0, 2)}, "removed must be whole numbers from 1 to 23"),
        ({"removed": (2, 24)}, r"fewer than there are sources; got \(2, 24\)"),
        ({"removed": (2.5,)}, "removed must be whole numbers"),
        ({"runs": 0}, "runs must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_anything_is_trained(given: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        asked(**given, counted=True)
