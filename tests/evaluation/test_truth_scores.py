"""Only scores of the same data, queries, sources and model are held against a truth."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from imprint import DataError, Plan, Sources, Task, attribute, simulate
from imprint.data import Data
from imprint.evaluation.metrics import evaluate
from imprint.evaluation.retraining import retrain
from imprint.evaluation.together import Together
from imprint.evaluation.training import Training
from tests.evaluation.truths import HALVES, OTHER, QUERIES, REMOVALS, N, ask, points, task, together, train


def test_a_truth_knows_the_data_it_is_told_of(tmp_path: Path) -> None:
    own = task()
    store = simulate(own, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(own, store, points(QUERIES, 1), progress=False)
    same, other = (ask(how=train, task=own, data=points(N, seed)) for seed in (0, 2))
    mine = {
        name: value
        for name, value in result.labels.fingerprints.items()
        if name not in ("measures", "store", "model", "plan")  # a ground truth has no plan
    }
    assert same.about["fingerprints"] == {**mine, **same.about["fingerprints"]}
    assert len(evaluate(result, same)) == len(evaluate(result, ask(how=train, task=own))) == 1
    for truth in (other, ask(how=together(data=points(N, 2)), task=own)):
        with pytest.raises(DataError, match="scores are of other training data than the ground truth"):
            evaluate(result, truth)
    data = Data(TensorDataset(*points(N, 0)), device=torch.device("cpu"))
    assert ask(how=train, data=data).about["fingerprints"] == same.about["fingerprints"]
    with pytest.raises(DataError, match="subsets are made for 24 training examples, the data has 23"):
        ask(how=train, data=points(23, 0))
    with pytest.raises(DataError, match="differs from the data that the Together trains on"):
        ask(data=points(N, 2))
    assert ask(data=points(N, 0)).about["fingerprints"] == ask().about["fingerprints"]


def test_scores_of_another_model_are_not_held_against_a_truth() -> None:
    small = Task.classifier(nn.Linear(4, 3).double())
    store = simulate(small, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    with pytest.raises(DataError, match="scores are of another model or measurement than the ground truth"):
        evaluate(attribute(small, store, points(QUERIES, 1), progress=False), ask())


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 3)),
    ],
)
def test_a_model_with_parameters_of_the_same_shapes_is_told_from_another(other: nn.Module) -> None:
    task = Task.classifier(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double())
    store = simulate(task, points(N, 0), HALVES.sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(task, store, points(QUERIES, 1), progress=False)
    how = Together(lambda: deepcopy(other).double(), Task.classifier, points(N, 0), Training(epochs=1, lr=0.1))
    truth = retrain(how, Task.classifier(other.double()), points(QUERIES, 1), HALVES, progress=False)
    with pytest.raises(DataError, match="another model or measurement than the ground truth: F at random parameters"):
        evaluate(result, truth)


def test_only_scores_of_the_same_queries_and_sources_are_held_against_a_truth() -> None:
    sources, own, queries = REMOVALS.sources, task(), points(QUERIES, 1)
    truth = ask(subsets=REMOVALS, task=own)
    store = simulate(own, points(N, 0), sources, Plan(steps=2, lr=0.1), progress=False)
    result = attribute(own, store, queries, batch_size=2, progress=False)
    assert len(evaluate(result, truth)) == 3
    x, y = queries
    for other in ((x.flip(0), y.flip(0)), OTHER):
        with pytest.raises(DataError, match="other queries than the ground truth"):
            evaluate(attribute(own, store, other, progress=False), truth)
    swapped = Sources.by_label([3 - i % 4 for i in range(N)])
    wrong = simulate(own, points(N, 0), swapped, Plan(steps=2, lr=0.1), progress=False)
    with pytest.raises(DataError, match="sources with other members"):
        evaluate(attribute(own, wrong, queries, progress=False), truth)
